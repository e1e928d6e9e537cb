"""`skyenv serve`: a sandbox node server."""

from __future__ import annotations

import argparse
from pathlib import Path

from skyenv.commands.output import print_line

PORT = 8765


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`skyenv serve`."""
    from skyenv.commands.options import add_server_flags

    serve = commands.add_parser(
        "serve", help="run a sandbox node server until interrupted", argument_default=argparse.SUPPRESS
    )
    add_server_flags(serve, PORT)
    serve.add_argument(
        "--backend", choices=("local", "oci", "docker", "kubernetes", "process"),
        help="what sandboxes are made of (default local; process isolates nothing)",
    )  # fmt: skip
    serve.add_argument("--image", help="image of sandboxes that ask for none (backends oci, docker, kubernetes)")
    serve.add_argument("--runtime", help="program that starts containers: crun, runc, runsc (backends oci, docker)")
    serve.add_argument(
        "--backend-option", action="append", dest="backend_settings", metavar="KEY=VALUE",
        help="an option of the backend's own, its value as YAML (may be repeated)",
    )  # fmt: skip
    serve.add_argument(
        "--state", type=Path, help="directory of this server: when it is killed, the next one takes its sandboxes over"
    )
    serve.add_argument("--slots", type=int, help="sandboxes at a time (default 1024)")
    serve.add_argument("--queue", type=int, help="creations that may wait for a place (default 1024)")
    serve.add_argument("--queue-timeout", type=float, help="seconds that one may wait (default 300)")
    serve.add_argument("--drain-timeout", type=float, help="seconds that SIGTERM leaves to sandboxes (default 0)")
    serve.add_argument(
        "--gateway", action="append", dest="gateways", metavar="URL",
        help="gateway to join (may be repeated); every address behind its name is told",
    )  # fmt: skip
    serve.add_argument(
        "--allow-egress", action="store_true", help="sandboxes may ask for the machine's network (network='host')"
    )
    serve.add_argument(
        "--tunnel", action="append", dest="tunnels", metavar="HOST:PORT",
        help="address that a port inside a sandbox may lead to, a model's say; HOST:* for any port (may be repeated)",
    )  # fmt: skip
    serve.add_argument("--name", help="this node's name at the gateways: lower-case letters, digits and '-'")
    serve.add_argument("--url", help="where gateways reach this node (default: where it listens)")
    serve.set_defaults(run=run, parser=serve)


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    from skyenv.commands.options import backend_settings, given, join_token, listening, start_logging
    from skyenv.remote.serve import ServeOptions, serve

    chosen = given(arguments.parser, arguments)
    start_logging(chosen)
    backend = chosen.get("backend", "local")
    backend_options = backend_settings(chosen.pop("backend_settings", ()))
    backend_options |= {key: chosen.pop(key) for key in ("image", "runtime") if key in chosen}
    if backend == "kubernetes" and "name" in chosen:
        backend_options.setdefault("node", chosen["name"])
    options = ServeOptions(
        listening=listening(chosen, PORT),
        join_token=join_token(chosen),
        gateways=tuple(chosen.pop("gateways", ())),
        tunnels=tuple(chosen.pop("tunnels", ())),
        backend_options=backend_options,
        **chosen,
    )
    serve(options, on_ready=lambda url: print_line(f"serving sandboxes at {url} (backend {backend})"))
    return 0
