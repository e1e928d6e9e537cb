"""Curriculum stages from evaluations: tasks that a policy solves sometimes, neither never nor always.

The reference's task sets of 80, 220 and 293 were made this way. A stage is a plain task file, a reference to the set
it was chosen from and the ids, in the order from easy to hard.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sky_trainer.evaluated import read_samples
from skyenv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Rule:
    """Which tasks stay: at least `min_solved` samples resolved, at most `max_rate` of them, at least `min_samples`.

    With `max_rate` below 1 a task that is always solved is left out: it teaches a group nothing.
    """

    min_solved: int = 1
    max_rate: float = 0.999
    min_samples: int = 1

    def __post_init__(self) -> None:
        if self.min_samples < 1 or self.min_solved < 0:
            raise ConfigError("--min-samples must be at least 1 and --min-solved at least 0")
        if not 0.0 <= self.max_rate <= 1.0:
            raise ConfigError(f"--max-rate {self.max_rate}: must be from 0 to 1")


@dataclass(frozen=True, slots=True)
class Chosen:
    """One task that stays, with how often it was resolved."""

    task_id: str
    solved: int
    samples: int

    @property
    def rate(self) -> float:
        """Share of its samples that were resolved."""
        return self.solved / self.samples


def count_solved(files: Iterable[Path]) -> dict[str, tuple[int, int]]:
    """Task id to (resolved, valid samples) over all evaluations; infrastructure's failures are no samples."""
    counts: dict[str, tuple[int, int]] = {}
    for file in files:
        samples = read_samples(file)
        if not samples:
            raise ConfigError(f"{file}: holds no transcript; give files that `sky_trainer eval --out` wrote")
        for sample in samples:
            if sample.failure is None:
                solved, of = counts.get(sample.task_id, (0, 0))
                counts[sample.task_id] = solved + bool(sample.verdict.get("resolved")), of + 1
    return counts


def choose(counts: dict[str, tuple[int, int]], known: Sequence[str], rule: Rule) -> list[Chosen]:
    """The tasks of `known` that stay, easiest first, in the order of `known` among equals."""
    chosen = [Chosen(task_id, *counts[task_id]) for task_id in known if task_id in counts]
    kept = [
        task
        for task in chosen
        if task.samples >= rule.min_samples and task.solved >= rule.min_solved and task.rate <= rule.max_rate
    ]
    return sorted(kept, key=lambda task: -task.rate)


def split(chosen: Sequence[Chosen], sizes: Sequence[int]) -> list[list[Chosen]]:
    """Cut into stages of these sizes; what is left over is the last one. No sizes: one stage."""
    stages, start = [], 0
    for size in sizes:
        if size < 1:
            raise ConfigError("--sizes: each must be at least 1")
        stages.append(list(chosen[start : start + size]))
        start += size
    stages.append(list(chosen[start:]))
    return [stage for stage in stages if stage]


def write_stage(path: Path, tasks: str, stage: Sequence[Chosen]) -> None:
    """Write a task file that names a set and ids of it. ConfigError when the disk refuses."""
    place = Path(tasks)
    named = str(place.resolve()) if place.exists() else tasks
    rates = {task.task_id: [task.solved, task.samples] for task in stage}
    content = {"tasks": named, "ids": [task.task_id for task in stage], "solved": rates}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {path}: {error.strerror}") from error
