"""`sky_trainer rollout`: collect a data set of trajectories, for supervised or offline training elsewhere."""

from __future__ import annotations

import argparse
from pathlib import Path

from sky_trainer.commands.evaluate import add_parser, roll_out
from sky_trainer.commands.output import print_json, print_line
from sky_trainer.rows import check_export, export_rows
from skyenv.errors import ConfigError


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = add_parser(commands, "rollout", "collect trajectories and export them with exact ids")
    parser.add_argument("--export", type=Path, help="write rows: FILE.parquet, FILE.jsonl, or a dataset's directory")
    parser.add_argument(
        "--rows", choices=("segment", "turn"), default="segment", help="a row merges turns, or is one (default segment)"
    )
    parser.add_argument("--min-reward", type=float, help="export only trajectories with at least this reward")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Collect; status 1 when infrastructure spoiled a sample."""
    if arguments.out is None and arguments.export is None:
        raise ConfigError("give --out or --export, or nothing will be kept")
    if arguments.export is not None:
        check_export(arguments.export)
    _plan, trajectories = roll_out(arguments)
    failed = sum(trajectory.failure is not None for trajectory in trajectories)
    result = {"trajectories": len(trajectories), "failed": failed}
    if arguments.export is not None:
        least = arguments.min_reward
        kept = [t for t in trajectories if t.reward is not None and (least is None or t.reward >= least)]
        if not kept:
            wanted = "a reward" if least is None else f"a reward of at least {least:g}"
            raise ConfigError(f"--export {arguments.export}: no trajectory has sampled ids and {wanted}")
        result["rows"] = export_rows(arguments.export, kept, arguments.rows)
        print_line(f"{result['rows']} rows of {len(kept)} trajectories written to {arguments.export}")
    if arguments.json:
        print_json(result)
    return 1 if failed else 0
