"""`skyenv serve`: a sandbox node server."""

from __future__ import annotations

import argparse
from pathlib import Path

from skyenv.commands.output import print_line
from skyenv.errors import ConfigError


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`skyenv serve`."""
    serve = commands.add_parser("serve", help="run a sandbox node server until interrupted")
    serve.add_argument("--host", default="127.0.0.1", help="address to bind (default: loopback only)")
    serve.add_argument("--port", type=int, default=8765, help="port to bind; 0 picks a free one (default 8765)")
    serve.add_argument("--token", help="clients must send this token; required for any host but loopback")
    serve.add_argument("--token-file", type=Path, help="read the token from this file instead")
    serve.add_argument("--backend", choices=("local", "process"), default="local", help="process isolates nothing")
    serve.add_argument(
        "--state", type=Path, help="directory of this server: when it is killed, the next one takes its sandboxes over"
    )
    serve.add_argument("--max-sandboxes", type=int, default=1024, help="how many may live at a time (default 1024)")
    serve.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    from skyenv.remote.listen import Listening
    from skyenv.remote.serve import ServeOptions, serve

    token = arguments.token
    if arguments.token_file:
        try:
            token = arguments.token_file.read_text().strip()
        except OSError as error:
            raise ConfigError(f"--token-file {arguments.token_file}: {error.strerror}") from error
    options = ServeOptions(
        Listening(arguments.host, arguments.port),
        token=token,
        backend=arguments.backend,
        max_sandboxes=arguments.max_sandboxes,
        state=arguments.state,
    )
    serve(options, on_ready=lambda url: print_line(f"serving sandboxes at {url} (backend {arguments.backend})"))
    return 0
