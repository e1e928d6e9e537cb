"""Where the trainer's thread meets the pipeline's event loop: tasks in, whole groups of trajectories out.

One portal thread lives for the whole run and owns everything asynchronous: sandboxes, engine, pipeline. The trainer's
thread only waits on it, so an interrupt there cancels the rollouts and returns once they have cleaned up.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
from anyio.from_thread import BlockingPortal

from skyenv.errors import SkyEnvError
from skyenv.types import Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    from skyenv.vector.pipeline import RolloutPipeline
    from skyenv.vector.sharded import ShardedPipeline

T = TypeVar("T")


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


def grouped(trajectories: Sequence[Trajectory], groups: int, group_size: int) -> list[TrajectoryGroup]:
    """Sort trajectories into whole groups. SkyEnvError unless each (group, sample) is there exactly once."""
    by_place = {(t.group_id, t.sample_index): t for t in trajectories}
    wanted = [(group, sample) for group in range(groups) for sample in range(group_size)]
    if len(trajectories) != len(wanted) or any(place not in by_place for place in wanted):
        raise SkyEnvError(
            f"the pipeline returned {len(trajectories)} trajectories for {groups} groups of {group_size};"
            " each sample must come back exactly once"
        )
    rows = [[by_place[group, sample] for sample in range(group_size)] for group in range(groups)]
    return [TrajectoryGroup(row[0].task_id, group, row) for group, row in enumerate(rows)]
