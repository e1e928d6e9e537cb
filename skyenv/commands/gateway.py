"""`skyenv gateway`: one address in front of many node servers."""

from __future__ import annotations

import argparse

from skyenv.commands.output import print_line
from skyenv.errors import ConfigError

PORT = 8764


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`skyenv gateway`."""
    from skyenv.commands.options import add_server_flags

    gateway = commands.add_parser(
        "gateway", help="run a gateway in front of node servers until interrupted", argument_default=argparse.SUPPRESS
    )
    add_server_flags(gateway, PORT)
    gateway.add_argument(
        "--silence",
        type=float,
        help="seconds without heartbeat after which a node gets no new sandboxes (default 10)",
    )
    gateway.add_argument(
        "--forget", type=float, help="seconds after which a silent node's sandboxes count as lost (default 60)"
    )
    gateway.set_defaults(run=run, parser=gateway)


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    from skyenv.commands.options import given, join_token, listening, start_logging
    from skyenv.remote.gateway_process import GatewayOptions, serve_gateway

    chosen = given(arguments.parser, arguments)
    start_logging(chosen)
    shared = join_token(chosen)
    if shared is None:
        raise ConfigError("a gateway needs --join-token-file, which its nodes get too")
    options = GatewayOptions(join_token=shared, listening=listening(chosen, PORT), **chosen)
    serve_gateway(options, on_ready=lambda url: print_line(f"gateway at {url}"))
    return 0
