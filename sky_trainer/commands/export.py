"""`sky_trainer export RUN OUT`: a run's policy as one whole model."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from sky_trainer.commands.interrupts import deferred_interrupt
from sky_trainer.commands.output import print_json, print_line

EPILOG = """\
With lora, `train` leaves the adapter alone in final and best: this writes the model with the adapter merged into it,
which transformers, vLLM and SGLang load as any other:

  sky_trainer export runs/swe-32b-lora models/swe-32b

RUN may also be a directory that holds a model or an adapter.
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "export",
        help="write a run's policy as one whole model, an adapter merged into it",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("source", type=Path, metavar="RUN", help="directory of a run, a model or an adapter")
    parser.add_argument("out", type=Path, metavar="OUT", help="new directory to write to")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--best", action="store_true", help="the best policy of the run's evaluations, not its last one")
    which.add_argument("--step", type=int, metavar="N", help="the policy of the checkpoint after step N")
    parser.add_argument("--base", default="", metavar="MODEL", help="what the adapter is for, if that is elsewhere now")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="type of the numbers (default: the model's own)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write it, then say what was written."""
    with deferred_interrupt():
        from sky_trainer.exporting import export, find_policy
    source = find_policy(arguments.source, best=arguments.best, step=arguments.step)
    made = export(source, arguments.out, base=arguments.base, dtype=arguments.dtype)
    kind = "its adapter merged into the model" if made.merged else "a whole model"
    print_line(
        f"{arguments.out}: {made.source}, {kind}, {made.parameters / 1e6:.2f} million parameters in {made.dtype}"
    )
    if arguments.json:
        print_json({"out": str(arguments.out), **asdict(made), "source": str(made.source)})
    return 0
