"""The `skyenv` command: serve sandboxes, look at and validate tasks. Wiring only; a user's mistake is one line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from skyenv.commands import gateway, serve, tasks, top
from skyenv.commands.output import print_error
from skyenv.errors import SkyEnvError
from skyenv.version import version


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (0 fine, 1 a check failed, 2 the input is wrong, 130 interrupted)."""
    arguments = build_parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except SkyEnvError as error:
        print_error(str(error))
        return 2
    except KeyboardInterrupt:
        print_error("interrupted")
        return 130
    return status


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = argparse.ArgumentParser(prog="skyenv", description="Sandboxes and tasks for training tool-using models.")
    parser.add_argument("--version", action="version", version=version())
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (serve, gateway, top, tasks):
        command.add(commands)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
