"""The batches of a plan, played before they are asked for: rollouts go on while the trainer steps.

Invariants: batch n + `staleness` starts when batch n is asked for and not before, so what was accepted and what runs
never exceed `staleness` + 1 batches beyond those that were trained on, and no token of a batch is older than
`staleness` batches when it trains; with 0 nothing runs between two batches, and what the next one needs (images, files,
sandboxes) is fetched meanwhile. A batch is the plan's, whole and in order: stragglers hold up their own batch alone.
Older batches have their slots first. Trajectories that were on disk when a run was killed are not played again,
provided that their whole group is there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import anyio
from anyio.abc import TaskGroup

from sky_trainer.curriculum import Batch, Plan
from skyenv.errors import SkyEnvError
from skyenv.types import Trajectory
from skyenv.vector.pipeline import RolloutPipeline

if TYPE_CHECKING:
    from skyenv.vector.sharded import ShardedPipeline

OnTrajectory = Callable[[int, Trajectory], None]
"""Called with a batch's number and a trajectory of it that ended, one at a time, in a thread where it may block."""


@dataclass(slots=True)
class Played:
    """A batch on its way: what ended so far, and when it is whole or failed."""

    found: list[Trajectory] = field(default_factory=list)
    replayed: int = 0
    error: SkyEnvError | None = None
    ended: anyio.Event = field(default_factory=anyio.Event)


class Ahead:
    """Plays a plan's batches from `first` on. Open it with `opened`; leaving that cancels what runs.

    `pipelines` are those of the plan's stages, which should share their slots; `stored` are trajectories by batch.
    """

    def __init__(
        self,
        plan: Plan,
        pipelines: Sequence[RolloutPipeline | ShardedPipeline],
        group_size: int,
        *,
        staleness: int = 0,
        stored: Mapping[int, Sequence[Trajectory]] | None = None,
        on_trajectory: OnTrajectory | None = None,
    ) -> None:
        self.plan, self.group_size, self.staleness = plan, group_size, staleness
        self._pipelines = pipelines
        self._stored = stored or {}
        self._on_trajectory = on_trajectory
        self._one_at_a_time: anyio.CapacityLimiter | None = None
        self._tasks: TaskGroup | None = None
        self._batches: dict[int, Played] = {}
        self._running = self._extra = 0
        self._busy, self._since = 0.0, 0.0
        self._prefetching: anyio.CancelScope | None = None

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Self]:
        """Ready to play, inside the block."""
        self._one_at_a_time = anyio.CapacityLimiter(1)
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            try:
                yield self
            finally:
                self._tasks = None
                tasks.cancel_scope.cancel()

    async def take(self, number: int) -> Played:
        """Batch `number`, whole. Starts it and those that may run ahead of it now. Raises what ended its rollouts."""
        if self._tasks is None:
            raise SkyEnvError("rollouts are closed")
        for near in range(number, min(number + self.staleness + 1, self.plan.length)):
            if near not in self._batches:
                self._batches[near] = Played()
                if self._prefetching is not None:
                    self._prefetching.cancel()
                self._tasks.start_soon(self._play, self.plan.batch(near), self._batches[near])
        played = self._batches[number]
        await played.ended.wait()
        del self._batches[number]
        if played.error is not None:
            raise SkyEnvError(str(played.error)) from played.error
        upcoming = number + self.staleness + 1
        if upcoming < self.plan.length and not self._running:
            self._prefetching = anyio.CancelScope()
            self._tasks.start_soon(self._prefetch, self.plan.batch(upcoming), self._prefetching)
        return played

    async def _prefetch(self, batch: Batch, until_it_starts: anyio.CancelScope) -> None:
        """While the trainer steps and nothing runs: images, files and sandboxes of the next batch. Not in workers."""
        pipeline = self._pipelines[batch.stage.number]
        if isinstance(pipeline, RolloutPipeline):
            with until_it_starts:
                await pipeline.prefetch(batch.tasks, self.group_size)

    async def more(self, number: int, tasks: Sequence[Any], group_size: int) -> list[Trajectory]:
        """Groups beside the plan, played now with the settings of batch `number`."""
        batch = self.plan.batch(number)
        self._extra += len(tasks)
        first = self.plan.length * self.plan.groups + self._extra - len(tasks)
        with self._counted():
            return await self._drain(batch, tasks, range(first, first + len(tasks)), group_size)

    def busy_seconds(self) -> float:
        """How long rollouts were under way so far."""
        return self._busy + (anyio.current_time() - self._since if self._running else 0.0)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Rollouts are under way in the block."""
        if not self._running:
            self._since = anyio.current_time()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._busy += anyio.current_time() - self._since

    async def _play(self, batch: Batch, played: Played) -> None:
        try:
            with self._counted():
                played.found = self._whole_groups(batch)
                played.replayed = len(played.found)
                there = {trajectory.group_id for trajectory in played.found}
                missing = {number: task for number, task in batch.groups() if number not in there}
                if missing:
                    found = await self._drain(batch, list(missing.values()), list(missing), self.group_size)
                    played.found += found
        except SkyEnvError as error:
            played.error = error
        finally:
            played.ended.set()

    def _whole_groups(self, batch: Batch) -> list[Trajectory]:
        """What was stored of a batch, of groups of which every sample is there."""
        groups: dict[int, dict[int, Trajectory]] = {number: {} for number, _ in batch.groups()}
        tasks = dict(batch.groups())
        for trajectory in self._stored.get(batch.number, ()):
            task = tasks.get(trajectory.group_id)
            if task is not None and task.task_id == trajectory.task_id:
                groups[trajectory.group_id][trajectory.sample_index] = trajectory
        whole = [group for group in groups.values() if sorted(group) == list(range(self.group_size))]
        return [trajectory for group in whole for trajectory in group.values()]

    async def _drain(
        self, batch: Batch, tasks: Sequence[Any], numbers: Sequence[int], group_size: int
    ) -> list[Trajectory]:
        """Every sample of these tasks, whose groups have these numbers over the whole run."""
        found = []
        pipeline = self._pipelines[batch.stage.number]
        async with pipeline.run(tasks, group_size, first_group=numbers[0]) as run:
            async for trajectory in run:
                trajectory.group_id = numbers[trajectory.group_id - numbers[0]]
                found.append(trajectory)
                if self._on_trajectory is not None:
                    await anyio.to_thread.run_sync(
                        self._on_trajectory, batch.number, trajectory, limiter=self._one_at_a_time
                    )
        return found
