"""Where the trainer's thread meets the pipeline's event loop: tasks in, whole groups of trajectories out.

One portal thread lives for the whole run and owns everything asynchronous: sandboxes, engine, pipeline. The trainer's
thread only waits on it, so an interrupt there cancels the rollouts and returns once they have cleaned up.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
from anyio.from_thread import BlockingPortal

from skyenv.errors import SkyEnvError
from skyenv.types import Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    from sky_trainer.ahead import Ahead, Played
    from sky_trainer.curriculum import Plan
    from sky_trainer.metering import Metering
    from skyenv.vector.pipeline import RolloutPipeline
    from skyenv.vector.sharded import ShardedPipeline

T = TypeVar("T")


class PlannedRollouts:
    """Blocking face of a plan's batches for the trainer's thread. Portal and `ahead` belong to whoever opened them.

    `upcoming` is the number of the batch that comes next; `version` tells which policy a batch trains, `metering` what
    rollouts cost.
    """

    def __init__(
        self,
        portal: BlockingPortal,
        ahead: Ahead,
        version: Callable[[], int],
        metering: Metering | None = None,
        first: int = 0,
    ) -> None:
        self._portal, self._ahead, self._version, self._metering = portal, ahead, version, metering
        self.upcoming = first
        self._left: tuple[float, float] | None = None
        self._numbers: dict[str, float] = {}

    @property
    def plan(self) -> Plan:
        """What is played."""
        return self._ahead.plan

    def collect(self, tasks: Sequence[Any], group_size: int) -> list[TrajectoryGroup]:
        """The plan's next batch: groups in the order of `tasks`, which must be its own, siblings by sample index.

        Raises SkyEnvError when rollouts ended, or a sample did not come back exactly once.
        """
        number = self.upcoming
        batch = self.plan.batch(number)
        if [task.task_id for task in tasks] != [task.task_id for task in batch.tasks]:
            raise SkyEnvError(f"the trainer asks for other tasks than the plan has for batch {number}")
        self.upcoming = number + 1
        asked, busy = time.monotonic(), self._portal.call(self._ahead.busy_seconds)
        played = call(self._portal, self._ahead.take, number)
        groups = grouped(played.found, len(tasks), group_size, batch.groups()[0][0])
        self._count(number, played, asked, busy)
        return groups

    def more(self, tasks: Sequence[Any], group_size: int) -> list[TrajectoryGroup]:
        """Groups beside the plan, with the settings of the last batch."""
        found = call(self._portal, self._ahead.more, max(0, self.upcoming - 1), tasks, group_size)
        return grouped(found, len(tasks), group_size, min(trajectory.group_id for trajectory in found))

    def numbers(self) -> dict[str, float]:
        """What is to be said of the last batch, and of the rollouts since the last call."""
        metered = call(self._portal, self._metering.step) if self._metering is not None else {}
        return {**self._numbers, **metered}

    def _count(self, number: int, played: Played, asked: float, busy: float) -> None:
        now = time.monotonic()
        self._numbers = {
            "curriculum/stage": float(self.plan.batch(number).stage.number + 1),
            "rollout/replayed": float(played.replayed),
            "overlap/wait_seconds": now - asked,
            **staleness(played.found, self._version()),
        }
        if self._left is not None:
            left, busy_then = self._left
            hidden = min(busy - busy_then, asked - left)
            self._numbers |= {"overlap/hidden_seconds": hidden, "overlap/share": hidden / max(now - left, 1e-9)}
        self._left = now, self._portal.call(self._ahead.busy_seconds)


def staleness(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """How many versions older than `version` turns were sampled, and the share of trajectories of several versions."""
    played = [[turn.policy_version for turn in trajectory.turns] for trajectory in trajectories if trajectory.turns]
    ages = [version - sampled for turns in played for sampled in turns]
    if not ages:
        return {}
    return {
        "staleness/mean": fmean(ages),
        "staleness/max": float(max(ages)),
        "staleness/mixed": fmean(len(set(turns)) > 1 for turns in played),
    }


class Rollouts:
    """Blocking face of a pipeline for one thread. The portal and the pipeline belong to whoever opened them.

    `on_trajectory` is called for each trajectory as it ends, one at a time, in a thread where it may block: for files
    and live displays.
    """

    def __init__(
        self,
        portal: BlockingPortal,
        pipeline: RolloutPipeline | ShardedPipeline,
        on_trajectory: Callable[[Trajectory], None] | None = None,
    ) -> None:
        self._portal = portal
        self._pipeline = pipeline
        self._on_trajectory = on_trajectory

    def collect(self, tasks: Sequence[Any], group_size: int) -> list[TrajectoryGroup]:
        """Run every task `group_size` times; groups in the order of `tasks`, siblings by sample index.

        Raises SkyEnvError when the pipeline did not return every sample exactly once.
        """
        found = call(self._portal, self._drain, tasks, group_size)
        return grouped(found, len(tasks), group_size)

    async def _drain(self, tasks: Sequence[Any], group_size: int) -> list[Trajectory]:
        found = []
        async with self._pipeline.run(tasks, group_size=group_size) as run:
            async for trajectory in run:
                found.append(trajectory)
                if self._on_trajectory is not None:
                    await anyio.to_thread.run_sync(self._on_trajectory, trajectory)
        return found


def call(portal: BlockingPortal, function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
    """Run a coroutine function on the portal and wait; an interrupt of the wait cancels it."""
    future = portal.start_task_soon(function, *arguments)
    try:
        return future.result()
    finally:
        future.cancel()


@contextmanager
def opened(portal: BlockingPortal, manager: AbstractAsyncContextManager[T]) -> Iterator[T]:
    """Keep an asynchronous context manager open on the portal.

    It is left without this block's exception: that one belongs to another thread, and an interrupt thrown into the
    portal's tasks would take its loop down before they have cleaned up.
    """
    inner = portal.wrap_async_context_manager(manager)
    value = inner.__enter__()
    try:
        yield value
    finally:
        inner.__exit__(None, None, None)


def grouped(
    trajectories: Sequence[Trajectory], groups: int, group_size: int, first_group: int = 0
) -> list[TrajectoryGroup]:
    """Sort trajectories into whole groups. SkyEnvError unless each (group, sample) is there exactly once."""
    numbers = range(first_group, first_group + groups)
    by_place = {(t.group_id, t.sample_index): t for t in trajectories}
    wanted = [(group, sample) for group in numbers for sample in range(group_size)]
    if len(trajectories) != len(wanted) or any(place not in by_place for place in wanted):
        raise SkyEnvError(
            f"the pipeline returned {len(trajectories)} trajectories for {groups} groups of {group_size};"
            " each sample must come back exactly once"
        )
    rows = [[by_place[group, sample] for sample in range(group_size)] for group in numbers]
    return [TrajectoryGroup(row[0].task_id, row[0].group_id, row) for row in rows]
