"""`sky_trainer train CONFIG.yaml [--key value ...]`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sky_trainer import config as configuration
from sky_trainer.commands.interrupts import deferred_interrupt
from sky_trainer.commands.output import make_console, print_json, print_line
from sky_trainer.config import Config
from skyenv.errors import ConfigError

if TYPE_CHECKING:
    from sky_trainer.layout import Machine
    from sky_trainer.run import Outcome

EPILOG = """\
Any key of the configuration can be given on the command line: --steps 50, --rollout.group_size 8,
--grpo.learning_rate 1e-5. Below grpo stand the options of TRL's GRPOConfig that are not set by another key. An
existing run directory is resumed from its newest checkpoint. The keys and their defaults:

"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "train",
        help="train with GRPO as a configuration file says",
        epilog=EPILOG + configuration.defaults_text(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("config", type=Path, metavar="CONFIG.yaml", help="see recipes/ for examples")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    add_dry_run(parser)
    parser.set_defaults(run=run)


def add_dry_run(parser: argparse.ArgumentParser) -> None:
    """The options of a dry run."""
    parser.add_argument("--dry-run", action="store_true", help="build and check everything, stop before the first step")
    parser.add_argument(
        "--assume-gpu",
        nargs="?",
        const="",
        metavar="N|TYPE|NxTYPE|MACHINESxNxTYPE",
        help="with --dry-run: as if these GPUs were here (default: those of sized_for), and with published shapes for"
        " a model out of reach",
    )


def run(arguments: argparse.Namespace) -> int:
    """Train, then say what came of it."""
    config = configuration.load(arguments.config, arguments.overrides)
    if arguments.dry_run:
        return check(config, arguments.assume_gpu, arguments.json)
    if arguments.assume_gpu is not None:
        raise ConfigError("--assume-gpu goes with --dry-run; training takes the GPUs that are there")
    outcome = train(config, "training")
    if os.environ.get("RANK", "0") == "0":
        report(outcome, config, arguments.json)
    return 0


def check(
    config: Config, assume: str | None, as_json: bool, machines: Callable[[], Sequence[Machine]] | None = None
) -> int:
    """The dry run: a line a check; status 1 when something would keep the run from starting.

    `assume` "" takes the GPUs that the configuration was sized for; `machines` asks a cluster for its own.
    """
    if assume == "":
        if not config.sized_for:
            raise ConfigError("--assume-gpu names no GPUs, and sized_for is not set; write --assume-gpu 8xH100")
        assume = config.sized_for
    with deferred_interrupt():
        import sky_trainer.grpo  # noqa: F401
        from sky_trainer import gpus
        from sky_trainer.dry_run import Finding, dry_run

    def show(finding: Finding) -> None:
        mark = {True: "ok  ", False: "FAIL", None: "-   "}[finding.ok]
        print_line(f"{mark} {finding.name:10} {finding.found}")

    there = gpus.assumed(assume) if assume else gpus.probed()
    if assume:
        print_line(f"assumed, not probed: {there.describe()}")
    findings = dry_run(config, there, show, machines() if machines is not None else None)
    bad = [finding.name for finding in findings if not finding.ok]
    print_line("ready to train" if not bad else f"not ready: {', '.join(bad)}")
    if as_json:
        checks = [{"name": f.name, "ok": f.ok, "found": f.found} for f in findings]
        print_json({"ok": not bad, "assumed": assume, "checks": checks})
    return 1 if bad else 0


def train(config: Config, title: str) -> Outcome:
    """Train with a live table; an interrupt says where the run stands and how to go on."""
    with deferred_interrupt():
        import sky_trainer.grpo  # noqa: F401  # the slow import, while an interrupt cannot be lost
        from sky_trainer.display import Display
        from sky_trainer.run import train as run_training

    display = Display(make_console(), f"{title}: {config.run_dir}", config.steps)
    try:
        return run_training(config, display)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_standing(config)) from None


def _standing(config: Config) -> str:
    """Where an interrupted run stands."""
    from sky_trainer.record import last_checkpoint, read_metrics

    if not config.run_dir.is_dir():
        return "interrupted before anything was written"
    done, checkpoint = len(read_metrics(config.run_dir)), last_checkpoint(config.run_dir)
    onward = f"goes on from {checkpoint.name}" if checkpoint else "starts its steps again, as no checkpoint was due"
    return (
        f"interrupted after {done} of {config.steps} steps; everything so far is in {config.run_dir};"
        f" the same command with --out {config.run_dir} {onward}"
    )


def report(outcome: Outcome, config: Config, as_json: bool) -> None:
    """One line for people, one object for programs."""
    first, last = outcome.first_quarter, outcome.last_quarter
    rewards = "no rewards" if first is None or last is None else f"mean reward {first:.3f} -> {last:.3f}"
    print_line(
        f"{rewards} (first and last quarter of {outcome.steps} steps), {outcome.seconds:.0f} s; see {outcome.run_dir}"
    )
    if config.lora.rank and (outcome.run_dir / "final").is_dir():
        print_line(f"final holds the adapter; for the whole model: sky_trainer export {outcome.run_dir} OUT")
    if as_json:
        print_json(
            {
                "first_quarter": first,
                "last_quarter": last,
                "seconds": round(outcome.seconds, 1),
                "run_dir": str(outcome.run_dir),
                "seed": config.seed,
            }
        )
