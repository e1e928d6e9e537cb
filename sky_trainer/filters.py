"""Which samples of a batch train, and which are sampled anew before it does.

Everything is bounded: at most `rounds` further collections, each of at most as many samples as are missing. What
cannot be had is left as it is, so that a batch always has the shape that was asked for.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sky_trainer.advantages import Credit, overlong, uniform
from skyenv.errors import SkyEnvError
from skyenv.samples import Row
from skyenv.types import Trajectory, TrajectoryGroup

Collect = Callable[[Sequence[Any], int], list[TrajectoryGroup]]
"""Tasks and group size in, whole groups in the tasks' order out; blocks."""


@dataclass(frozen=True, slots=True)
class FilterConfig:
    """What is left out of a batch.

    `overlong`: samples that a budget of tokens or turns cut off have no loss, though they count in their baseline
    (`rollout.stop_policy` mask leaves them out of that too). `uniform`: groups whose rewards are all the same train as
    others, `mask` gives them no loss, `replace` samples other tasks in their place first. `refill`: what
    infrastructure spoiled is sampled again. Both happen at most `rounds` times a batch. `unmask` trains on what the
    environment wrote as if the policy had: it is wrong, and there to measure what the mask is worth.
    """

    overlong: bool = False
    uniform: Literal["keep", "mask", "replace"] = "keep"
    refill: bool = False
    rounds: int = 2
    unmask: bool = False


def silent(groups: Sequence[TrajectoryGroup], filters: FilterConfig, credit: Credit) -> frozenset[int]:
    """The trajectories that have no loss, numbered over the batch."""
    found, number = set(), 0
    for group in groups:
        dull = filters.uniform != "keep" and uniform(group, credit)
        for trajectory in group.trajectories:
            if dull or (filters.overlong and overlong(trajectory)):
                found.add(number)
            number += 1
    return frozenset(found)


def unmasked(row: Row) -> Row:
    """The row with every id behind its prompt under mask 1; what nobody sampled has no logprob."""
    if not any(row.loss_mask):
        return row
    known = [logprob if mask else math.nan for logprob, mask in zip(row.logprobs, row.loss_mask, strict=True)]
    return dataclasses.replace(row, loss_mask=[1] * len(row.loss_mask), logprobs=known)


class Resampling:
    """`collect` with what is missing or teaches nothing sampled again, by `more`, which takes any tasks.

    Tasks that stand in for others are drawn from `tasks`, those not in the batch first, the same for the same seed
    and batch. `counts` tells how many samples were refilled and groups replaced in the last batch.
    """

    def __init__(self, collect: Collect, more: Collect, tasks: Sequence[Any], filters: FilterConfig, seed: int) -> None:
        self._collect = collect
        self._more = more
        self._tasks = list(tasks)
        self._filters = filters
        self._seed = seed
        self.counts: Counter[str] = Counter()

    def __call__(self, tasks: Sequence[Any], size: int) -> list[TrajectoryGroup]:
        """Whole groups, one a task; some may be of another task than asked for."""
        self.counts = Counter(refilled=0, replaced=0)
        groups = self._collect(tasks, size)
        draw = random.Random(f"{self._seed} {[task.task_id for task in tasks]}")
        by_id = {task.task_id: task for task in [*self._tasks, *tasks]}
        for _ in range(self._filters.rounds):
            again = (self._filters.refill and self._refill(groups, by_id)) or 0
            again += (self._filters.uniform == "replace" and self._replace(groups, size, draw)) or 0
            if not again:
                break
        return groups

    def _refill(self, groups: list[TrajectoryGroup], by_id: dict[str, Any]) -> int:
        """Sample what failed once more, groups with equally many failures together."""
        spoiled: dict[int, list[TrajectoryGroup]] = {}
        for group in groups:
            count = sum(t.failure is not None for t in group.trajectories)
            if count:
                spoiled.setdefault(count, []).append(group)
        for count, members in spoiled.items():
            fresh = self._more([by_id[group.task_id] for group in members], count)
            _check(fresh, members, count)
            for group, new in zip(members, fresh, strict=True):
                usable = [t for t in new.trajectories if t.failure is None]
                self.counts["refilled"] += len(usable)
                _fill(group.trajectories, usable)
        return len(spoiled)

    def _replace(self, groups: list[TrajectoryGroup], size: int, draw: random.Random) -> int:
        """Sample other tasks for the groups that teach nothing; those that teach something take their places."""
        dull = [place for place, group in enumerate(groups) if uniform(group)]
        if not dull:
            return 0
        present = {group.task_id for group in groups}
        others = [task for task in self._tasks if task.task_id not in present] or self._tasks
        chosen = draw.sample(others, min(len(dull), len(others)))
        fresh = [group for group in self._more(chosen, size) if not uniform(group)]
        for place, group in zip(dull, fresh, strict=False):
            groups[place] = TrajectoryGroup(group.task_id, groups[place].group_id, group.trajectories)
        self.counts["replaced"] += min(len(dull), len(fresh))
        return len(dull)


def _fill(members: list[Trajectory], usable: list[Trajectory]) -> None:
    for place, trajectory in enumerate(members):
        if trajectory.failure is not None and usable:
            members[place] = usable.pop()


def _check(fresh: Sequence[TrajectoryGroup], wanted: Sequence[TrajectoryGroup], count: int) -> None:
    if [(g.task_id, len(g.trajectories)) for g in fresh] != [(g.task_id, count) for g in wanted]:
        raise SkyEnvError("what was sampled again is not what was asked for: a task or a sample is missing")
