"""`sky_trainer show`: look at the trajectories of a run or an evaluation in a terminal."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sky_trainer.commands.output import make_console, print_json
from sky_trainer.record import TRANSCRIPTS
from skyenv.errors import ConfigError, did_you_mean
from skyenv.trajectory_io import read_trajectories, trajectory_to_json
from skyenv.types import Trajectory

if TYPE_CHECKING:
    from rich.console import Console

SHOWN_CHARACTERS = 3000


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("show", help="trajectories of a run: a list, or one of them turn by turn")
    parser.add_argument("path", type=Path, metavar="RUN", help="a run's directory, or a file of trajectories")
    parser.add_argument("--trajectory", metavar="ID", help="this one: TASK, TASK#SAMPLE, or its number in the list")
    parser.add_argument("--resolved", action="store_true", help="only those that were resolved")
    parser.add_argument("--failed", action="store_true", help="only those that infrastructure spoiled")
    parser.add_argument("--full", action="store_true", help="do not shorten long texts")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show; status 1 when nothing fits."""
    path: Path = arguments.path
    every = list(enumerate(read_trajectories(path / TRANSCRIPTS if path.is_dir() else path), 1))
    console = make_console()
    if arguments.trajectory is not None:
        trajectory = find(every, arguments.trajectory)
        show_one(trajectory, console, None if arguments.full else SHOWN_CHARACTERS)
        if arguments.json:
            print_json(trajectory_to_json(trajectory))
        return 0
    chosen = [
        (number, trajectory)
        for number, trajectory in every
        if (not arguments.resolved or trajectory.verdict.get("resolved"))
        and (not arguments.failed or trajectory.failure is not None)
    ]
    show_list(chosen, console)
    if arguments.json:
        print_json({"trajectories": [name_of(trajectory) for _, trajectory in chosen]})
    return 0 if chosen else 1


def name_of(trajectory: Trajectory) -> str:
    """How a trajectory is asked for."""
    return f"{trajectory.task_id}#{trajectory.sample_index}"


def find(every: Sequence[tuple[int, Trajectory]], wanted: str) -> Trajectory:
    """The last trajectory of that number or name. ConfigError when there is none."""
    for number, trajectory in reversed(every):
        if wanted in (str(number), name_of(trajectory), trajectory.task_id):
            return trajectory
    hint = did_you_mean(wanted, [name_of(trajectory) for _, trajectory in every])
    raise ConfigError(f"--trajectory {wanted}: not among the {len(every)} that are there{hint}")


def outcome(trajectory: Trajectory) -> str:
    """How it ended, in a few words."""
    if trajectory.failure is not None:
        return f"{trajectory.failure.kind} in {trajectory.failure.stage}"
    return str(trajectory.verdict.get("status", "not graded"))


def show_list(chosen: Sequence[tuple[int, Trajectory]], console: Console) -> None:
    """A table, one line a trajectory."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("no.", "trajectory", "outcome", "reward", "stopped by", "turns", "tokens", "seconds"):
        table.add_column(
            column, justify="right" if column in ("no.", "reward", "turns", "tokens", "seconds") else "left"
        )
    for number, trajectory in chosen:
        reward = "" if trajectory.reward is None else f"{trajectory.reward:.2f}"
        seconds = sum(trajectory.seconds.get(stage, 0.0) for stage in ("init", "run", "eval"))
        table.add_row(
            *(str(number), name_of(trajectory), outcome(trajectory), reward, str(trajectory.stop_reason or "")),
            *(str(len(trajectory.turns)), str(trajectory.sampled_tokens), f"{seconds:.1f}"),
        )
    console.print(table)


def show_one(trajectory: Trajectory, console: Console, limit: int | None) -> None:
    """Prompt, every turn with its call and observation, verdict, times."""
    from rich.rule import Rule

    console.print(Rule(f"{name_of(trajectory)}   {outcome(trajectory)}   reward {trajectory.reward}"))
    for message in trajectory.prompt:
        _say(console, message.role, message.content, limit)
    for number, turn in enumerate(trajectory.turns, 1):
        seconds = f"generated in {turn.generate_seconds:.2f} s, ran {turn.step_seconds:.2f} s"
        console.print(Rule(f"turn {number}   policy {turn.policy_version}   {seconds}", align="left", style="dim"))
        _say(console, "assistant", turn.text, limit)
        for call in turn.calls:
            _say(console, call.name, json.dumps(dict(call.arguments), ensure_ascii=False), limit)
        if turn.error:
            _say(console, "error", turn.error, limit)
        _say(console, "observation", turn.observation, limit)
    console.print(Rule("end", style="dim"))
    if trajectory.failure is not None:
        _say(console, "failure", trajectory.failure.message, limit)
    failing = [
        f"{test}: {result}" for test, result in trajectory.verdict.get("tests", {}).items() if result != "passed"
    ]
    terms = trajectory.verdict.get("reward_terms") or {}
    facts = {
        "reward": ", ".join(f"{term} {value:g}" for term, value in terms.items()) or trajectory.reward,
        "stopped by": trajectory.stop_reason,
        "not passed": ", ".join(failing) or None,
        "flags": ", ".join(trajectory.verdict.get("flags", [])) or None,
        "seconds": ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in trajectory.seconds.items()),
        "of run": f"engine {sum(turn.generate_seconds for turn in trajectory.turns):.2f},"
        f" tools {sum(turn.step_seconds for turn in trajectory.turns):.2f}",
        "tokens": f"{trajectory.sampled_tokens} sampled in {len(trajectory.segments)} segments",
        "attempts": trajectory.attempts,
    }
    for name, value in facts.items():
        if value is not None:
            console.print(f"{name}: {value}", markup=False, highlight=False)


def _say(console: Console, who: str, text: str, limit: int | None) -> None:
    """A text under its speaker's name; control characters are shown, never sent to the terminal."""
    if not text:
        return
    if limit is not None and len(text) > limit:
        half = limit // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
    shown = "".join(c if c in "\n\t" or c.isprintable() else f"\\x{ord(c):02x}" for c in text)
    console.print(who, style="bold cyan" if who == "assistant" else "bold")
    console.print(shown, markup=False, highlight=False)
