"""The `sky_trainer` command. Wiring only: a user's mistake is one line on stderr and status 2, never a traceback.

Status: 0 fine, 1 something did not work out, 2 the input is wrong, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence

from sky_trainer.checks import EXTRA_HINT, EXTRA_MODULES
from sky_trainer.commands import (
    demo,
    doctor,
    evaluate,
    export,
    launch,
    rollout,
    select,
    serve_engine,
    sft,
    show,
    timeline,
    train,
)
from sky_trainer.commands.output import print_error
from skyenv.errors import ConfigError, SkyEnvError
from skyenv.version import version


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its status."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads starve the sandboxes on small machines
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|trl|torch)\.")
    arguments, rest = build_parser().parse_known_args(argv)
    try:
        if rest and arguments.run not in (train.run, launch.run, sft.run, evaluate.run, rollout.run):
            raise ConfigError(f"unknown argument {rest[0]!r}; see sky_trainer {arguments.command} --help")
        arguments.overrides = rest
        status: int = arguments.run(arguments)
    except ConfigError as error:
        print_error(str(error))
        return 2
    except SkyEnvError as error:
        print_error(str(error))
        return 1
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA_MODULES:
            raise
        print_error(f"{arguments.command} needs {package}: {EXTRA_HINT}")
        return 2
    except OSError as error:
        print_error(f"{error.filename}: {error.strerror}" if error.filename else str(error))
        return 1
    except KeyboardInterrupt as interrupt:
        print_error(str(interrupt) or "interrupted")
        return 130
    return status


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = argparse.ArgumentParser(
        prog="sky_trainer", description="Train tool-using language models with GRPO in real sandboxes."
    )
    parser.add_argument("--version", action="version", version=version())
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for module in (demo, sft, train, launch, export, evaluate, rollout, select, show, timeline, serve_engine, doctor):
        module.add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
