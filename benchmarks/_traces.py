"""Traces: for each trajectory of a batch how long its init, every generation, every tool call and its evaluation take.

Drawn from stated distributions or taken from the trajectories of a recorded run; what fails, hangs or starts slowly is
drawn on top. All schedulers play the same trace. `twin_of` draws other trajectories of the same tasks: a history.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from skyenv.trajectory_io import read_trajectories

FOREVER = 1e12
SLOW_START = 20.0


@dataclass(frozen=True, slots=True)
class Shape:
    """Stated distributions, in seconds: log-normal with this median and sigma.

    A task's mean number of turns is uniform between the bounds of `turns`; a sibling's is that times a log-normal
    factor of sigma `unlike`. The default is a SWE task: generation dominates, tools and inits have long tails.
    `faults` is the share of trajectories that fail once somewhere, `hangs` the share that hang once, `slow` the share
    whose init takes `SLOW_START` times as long, `dead` the share of engines that die for ten minutes.
    """

    init: tuple[float, float] = (8.0, 0.6)
    generate: tuple[float, float] = (6.0, 0.7)
    tool: tuple[float, float] = (0.8, 1.2)
    evaluate: tuple[float, float] = (25.0, 0.7)
    turns: tuple[int, int] = (5, 35)
    unlike: float = 0.25
    group: int = 8
    faults: float = 0.0
    hangs: float = 0.0
    slow: float = 0.0
    dead: float = 0.0


@dataclass(slots=True)
class Script:
    """One trajectory of a trace. `trouble` maps a place to `fault` or `hang`, and is used up when it strikes."""

    init: float
    generate: list[float]
    tool: list[float]
    evaluate: float
    trouble: dict[str, str] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Seconds of all of it, one after the other."""
        return self.init + sum(self.generate) + sum(self.tool) + self.evaluate

    async def spend(self, place: str, seconds: float, error: Exception) -> None:
        """Take the time of a place, or fail or hang there the first time."""
        trouble = self.trouble.pop(place, None)
        await anyio.sleep(FOREVER if trouble == "hang" else seconds)
        if trouble is not None:
            raise error


def draw_trace(shape: Shape, count: int, seed: int, recorded: Sequence[Sequence[Script]] = ()) -> list[Script]:
    """`count` trajectories, group after group, the same for the same seed; whole groups of `recorded` if there are."""
    tasks, times = random.Random(f"tasks {seed}"), random.Random(f"times {seed}")
    trace: list[Script] = []
    while len(trace) < count:
        if recorded:
            trace += [dataclasses.replace(script, trouble={}) for script in tasks.choice(recorded)]
        else:
            turns = tasks.uniform(*shape.turns)
            trace += [_draw(shape, turns, times) for _ in range(shape.group)]
    del trace[count:]
    _trouble(trace, shape, random.Random(f"trouble {seed}"))
    return trace


def twin_of(shape: Shape, count: int, seed: int) -> list[Script]:
    """Other trajectories of the tasks of `draw_trace`, one for each of its own: as an earlier epoch had them."""
    tasks, times = random.Random(f"tasks {seed}"), random.Random(f"earlier {seed}")
    groups = -(-count // shape.group)
    drawn = [tasks.uniform(*shape.turns) for _ in range(groups)]
    return [_draw(shape, turns, times) for turns in drawn for _ in range(shape.group)][:count]


def _draw(shape: Shape, mean_turns: float, chosen: random.Random) -> Script:
    def time(distribution: tuple[float, float]) -> float:
        return distribution[0] * chosen.lognormvariate(0.0, distribution[1])

    turns = max(1, round(mean_turns * chosen.lognormvariate(0.0, shape.unlike)))
    return Script(
        time(shape.init),
        [time(shape.generate) for _ in range(turns)],
        [time(shape.tool) for _ in range(turns)],
        time(shape.evaluate),
    )


def _trouble(trace: Sequence[Script], shape: Shape, chosen: random.Random) -> None:
    for script in trace:
        middle = len(script.generate) // 2
        for kind, share in (("fault", shape.faults), ("hang", shape.hangs)):
            if chosen.random() < share:
                places = ("init", f"generate{middle}", f"tool{middle}", "evaluate")
                script.trouble[chosen.choice(places)] = kind
        if chosen.random() < shape.slow:
            script.init *= SLOW_START


def recorded_groups(path: Path) -> list[list[Script]]:
    """The trajectories of a store, by task; those with a failure are left out. ValueError when none is left."""
    by_task: dict[str, list[Script]] = {}
    for trajectory in read_trajectories(path):
        if trajectory.failure is None and trajectory.turns:
            script = Script(
                trajectory.seconds.get("init", 0.0),
                [turn.generate_seconds for turn in trajectory.turns],
                [turn.step_seconds for turn in trajectory.turns],
                trajectory.seconds.get("eval", 0.0),
            )
            by_task.setdefault(trajectory.task_id, []).append(script)
    if not by_task:
        raise ValueError(f"{path}: no trajectory that was served to its end")
    return list(by_task.values())


def described(trace: Sequence[Script]) -> dict[str, float]:
    """What a trace is like: means, seconds."""
    return {
        "trajectories": len(trace),
        "turns": statistics.fmean(len(script.generate) for script in trace),
        "init": statistics.fmean(script.init for script in trace),
        "generate": statistics.fmean(seconds for script in trace for seconds in script.generate),
        "tool": statistics.fmean(seconds for script in trace for seconds in script.tool),
        "evaluate": statistics.fmean(script.evaluate for script in trace),
        "total": statistics.fmean(script.total for script in trace),
        "longest": max(script.total for script in trace),
    }
