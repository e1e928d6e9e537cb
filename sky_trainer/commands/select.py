"""`sky_trainer select`: curriculum stages from evaluations."""

from __future__ import annotations

import argparse
from pathlib import Path

from sky_trainer.commands.output import print_json, print_line
from sky_trainer.selection import Rule, choose, count_solved, split, write_stage
from skyenv.envs.swe.loading import load_tasks
from skyenv.errors import ConfigError


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "select", help="choose tasks that policies solve sometimes and write them as stages of a curriculum"
    )
    parser.add_argument("evaluations", nargs="+", type=Path, metavar="EVALUATION", help="files of `eval --out`")
    parser.add_argument("--tasks", required=True, help="the task set that was evaluated")
    parser.add_argument("--out", type=Path, required=True, help="task file; with --sizes NAME-1.json, NAME-2.json")
    parser.add_argument("--min-solved", type=int, default=1, help="solved in at least so many samples (default 1)")
    parser.add_argument("--max-rate", type=float, default=0.999, help="solved in at most this share (default 0.999)")
    parser.add_argument("--min-samples", type=int, default=1, help="evaluated at least so often (default 1)")
    parser.add_argument("--sizes", default="", help="cut into stages, easiest first, as 80,220; the rest comes last")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the stages; status 1 when no task is left."""
    rule = Rule(arguments.min_solved, arguments.max_rate, arguments.min_samples)
    known = [task.task_id for task in load_tasks(arguments.tasks)]
    counts = count_solved(arguments.evaluations)
    chosen = choose(counts, known, rule)
    evaluated = sum(task_id in counts for task_id in known)
    print_line(f"{len(chosen)} of {evaluated} evaluated tasks are kept ({len(known)} in {arguments.tasks})")
    stages = split(chosen, _sizes(arguments.sizes))
    files = []
    for number, stage in enumerate(stages, 1):
        out: Path = arguments.out
        file = out.with_name(f"{out.stem}-{number}{out.suffix or '.json'}") if arguments.sizes else out
        write_stage(file, arguments.tasks, stage)
        files.append(str(file))
        print_line(f"{file}: {len(stage)} tasks, solved {stage[0].rate:.0%} to {stage[-1].rate:.0%}")
    if arguments.json:
        print_json({"tasks": evaluated, "kept": len(chosen), "files": files, "sizes": [len(stage) for stage in stages]})
    return 0 if chosen else 1


def _sizes(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",") if word]
    except ValueError:
        raise ConfigError(f"--sizes {text}: must be whole numbers separated by commas") from None
