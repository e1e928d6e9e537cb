"""One run of a pipeline: the coroutines of its trajectories, from admission to delivery.

See `skyenv.vector.pipeline` for the invariants. A run owns its tasks, its board and, unless they are shared, its
stages; it never outlives `stop`.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sized
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import anyio
from anyio.streams.memory import MemoryObjectSendStream

from skyenv.core import Env, Task
from skyenv.errors import (
    DeadlineExceeded,
    EngineError,
    EnvError,
    RewardError,
    SandboxError,
    SandboxUnavailable,
    SkyEnvError,
    boundary,
)
from skyenv.rewards import reward_function
from skyenv.rollout import RolloutOptions, rollout
from skyenv.types import Failure, StopReason, Trajectory
from skyenv.vector.background import Background
from skyenv.vector.lanes import Stage, Stages
from skyenv.vector.metrics import Meter, MeteredEngine
from skyenv.vector.progress import WAIT_OF, Board, Item
from skyenv.vector.stopping import failed_reason, settled

if TYPE_CHECKING:
    from skyenv.vector.pipeline import RolloutPipeline

logger = logging.getLogger(__name__)
T = TypeVar("T")

LONGEST_PAUSE = 30.0
ENOUGH = "GroupComplete"


@dataclass(frozen=True, slots=True)
class Request:
    """What a run is asked for; see `RolloutPipeline.run`."""

    tasks: Iterable[Task | str]
    group_size: int
    enough: int | None = None
    priority: int = 0
    first_group: int = 0


@dataclass(slots=True)
class Group:
    """The siblings of one task: how many have a reward, and the scopes of those under way."""

    usable: int = 0
    complete: bool = False
    scopes: dict[Item, anyio.CancelScope] = field(default_factory=dict)


class Work:
    """The coroutines of one run, in a task of their own between `start` and `stop`."""

    def __init__(self, pipeline: RolloutPipeline, request: Request) -> None:
        self.pipeline, self._request = pipeline, request
        tasks = request.tasks
        total = len(tasks) * request.group_size if isinstance(tasks, Sized) else None
        self.meter = pipeline.meter or Meter()
        self.board = Board(total, pipeline.on_event, self.meter, request.group_size)
        self.stages = pipeline.stages or Stages(pipeline.widths)
        self._options = RolloutOptions(pipeline.limits, pipeline.sampling, pipeline.rules)
        self._reward = reward_function(pipeline.reward)
        self._reasons: Counter[str] = Counter()
        self._groups: dict[int, Group] = {}
        self._background: Background | None = None

    @property
    def error(self) -> SkyEnvError | None:
        """What ended the run before its end."""
        return self._background.error if self._background is not None else None

    def start(self, results: MemoryObjectSendStream[Trajectory]) -> None:
        """Begin to put trajectories into `results`, which is closed at the end."""
        self._background = Background(lambda: self._main(results), "pipeline")
        self._background.start()

    async def stop(self) -> None:
        """Cancel what is under way and wait until it is cleaned up; idempotent."""
        if self._background is not None:
            await self._background.stop()

    def _items(self) -> Iterator[tuple[Item, Task | str]]:
        """Sibling after sibling, task after task."""
        for group_id, task in enumerate(self._request.tasks, self._request.first_group):
            task_id = task if isinstance(task, str) else task.task_id
            for sample_index in range(self._request.group_size):
                yield Item(task_id, group_id, sample_index), task

    async def _main(self, results: MemoryObjectSendStream[Trajectory]) -> None:
        with self.board.running(self.stages):
            await self._admit_all(results)

    async def _admit_all(self, results: MemoryObjectSendStream[Trajectory]) -> None:
        async with results, anyio.create_task_group() as beside:
            beside.start_soon(self._name_stalled)
            async with anyio.create_task_group() as group:
                for item, task in self._items():
                    await self.stages.live.acquire(self._rank(item))
                    group.start_soon(self._one, item, task, results)
            beside.cancel_scope.cancel()

    def _rank(self, item: Item) -> tuple[int, ...]:
        """Evaluation before training, older groups first, so that siblings finish together."""
        return -self._request.priority, item.group_id, item.sample_index

    async def _one(self, item: Item, task: Task | str, results: MemoryObjectSendStream[Trajectory]) -> None:
        """One requested sample, from admission to delivery."""
        group = self._groups.setdefault(item.group_id, Group())
        self.board.admit(item)
        try:
            trajectory = await self._within_deadline(item, task, group)
        finally:
            self.board.leave(item)
            self.stages.live.release()
        trajectory.seconds.update(item.seconds)
        if item.close_errors:
            trajectory.counters["close_errors"] = item.close_errors
        self._count_usable(group, trajectory)
        results.send_nowait(trajectory)
        self.board.deliver(item, trajectory)
        self._watch(trajectory)

    async def _within_deadline(self, item: Item, task: Task | str, group: Group) -> Trajectory:
        """All attempts, until the trajectory's deadline passes or its group needs no more samples."""
        limit = self.pipeline.limits.trajectory_timeout
        with anyio.move_on_after(limit) as scope:
            if group.complete:
                return _no_longer_needed(item)
            group.scopes[item] = scope
            try:
                return await self._attempts(item, task)
            finally:
                del group.scopes[item]
        if group.complete:
            return _no_longer_needed(item)
        late = f"not done within {limit:g} s, all attempts together"
        return _given_up(item, StopReason.SANDBOX_ERROR, DeadlineExceeded.__name__, late)

    def _count_usable(self, group: Group, trajectory: Trajectory) -> None:
        """Cancel what is left of a group that has enough."""
        group.usable += trajectory.reward is not None
        if self._request.enough is not None and group.usable >= self._request.enough and not group.complete:
            group.complete = True
            for scope in group.scopes.values():
                scope.cancel()

    async def _name_stalled(self) -> None:
        """Say once for each state who has been in it for too long."""
        while True:
            await anyio.sleep(max(1.0, self.board.next_stall(self.pipeline.stall_after)))
            for item, seconds in self.board.stalled(self.pipeline.stall_after):
                where = f"{item.task_id} sample {item.sample_index}"
                logger.warning("%s has been in %s for %.0f s", where, item.state, seconds)

    def _watch(self, trajectory: Trajectory) -> None:
        """End the run when too much fails."""
        if trajectory.failure is None or trajectory.stop_reason is StopReason.CANCELLED:
            return
        self._reasons[f"{trajectory.failure.stage}: {trajectory.failure.kind}: {trajectory.failure.message}"] += 1
        done, failed = self.board.counts
        if self.pipeline.failures.exceeded(done, failed):
            (reason, times), *_ = self._reasons.most_common(1)
            raise SkyEnvError(f"stopped: {failed} of {done} trajectories failed, {times} of them in {reason}")

    async def _attempts(self, item: Item, task: Task | str) -> Trajectory:
        """Attempts with a fresh environment each, until one says something about the policy or none is left."""
        for attempt in range(1, self.pipeline.max_attempts + 1):
            trajectory = Trajectory(item.task_id, item.group_id, item.sample_index, attempts=attempt)
            error = await self._attempt(item, task, trajectory)
            if not isinstance(error, SandboxError | EngineError) or attempt == self.pipeline.max_attempts:
                break
            logger.info("%s sample %d: attempt %d failed: %s", item.task_id, item.sample_index, attempt, error)
            self.board.retry(item, error)
            await anyio.sleep(_pause(error))
        return trajectory

    async def _attempt(self, item: Item, task: Task | str, trajectory: Trajectory) -> SkyEnvError | None:
        """Init, run and eval of one environment; fills the trajectory and returns what went wrong."""
        stage: Stage = "init"
        limits = self.pipeline.limits
        try:
            async with self._env(item) as env:
                late: SkyEnvError = DeadlineExceeded(f"init did not end within {limits.init_timeout:g} s")
                await self._serve(item, stage, lambda: self._reset(env, item, task), limits.init_timeout, late)
                stage = "run"
                await self._serve(item, stage, lambda: self._play(env, item, trajectory), math.inf, late)
                stage = "eval"
                late = RewardError(f"evaluation did not end within {limits.eval_timeout:g} s")
                await self._serve(item, stage, lambda: self._evaluate(env, trajectory), limits.eval_timeout, late)
        except SkyEnvError as error:
            trajectory.reward = None
            trajectory.stop_reason = failed_reason(error)
            trajectory.failure = Failure(stage, type(error).__name__, str(error)[:2000])
            return error
        return None

    async def _serve(
        self, item: Item, stage: Stage, work: Callable[[], Awaitable[T]], timeout: float, late: SkyEnvError
    ) -> T:
        """Wait for a slot of the stage, then do the work within its deadline; raises `late` when that passes."""
        lane, patience = self.stages.lanes[stage], self.pipeline.limits.queue_timeout
        self.board.enter(item, WAIT_OF[stage])
        with anyio.move_on_after(patience) as wait:
            await lane.acquire(self._rank(item))
        if wait.cancelled_caught:
            raise DeadlineExceeded(f"no slot of the {stage} stage within {patience:g} s")
        try:
            self.board.enter(item, stage)
            self.stages.follow()
            with anyio.move_on_after(timeout):
                return await work()
            raise late
        finally:
            lane.release()
            self.stages.follow()

    async def _reset(self, env: Env, item: Item, task: Task | str) -> None:
        seed = self.pipeline.sampling.seed
        if seed is not None:  # the same start for all siblings
            seed = zlib.crc32(f"{seed} {item.task_id}".encode()) >> 1
        with boundary(EnvError, "env.areset"):
            await env.areset(seed=seed, options={"task": task})

    async def _play(self, env: Env, item: Item, trajectory: Trajectory) -> None:
        engine = MeteredEngine(self.pipeline.engine, self.meter, item)
        await rollout(env, engine, self.pipeline.renderer, trajectory, self._options)

    async def _evaluate(self, env: Env, trajectory: Trajectory) -> None:
        """Grade, then reward, then what the stop policy makes of it."""
        with boundary(RewardError, "env.aevaluate"):
            reward, verdict = await env.aevaluate()
            trajectory.verdict = {**verdict, "reward": reward}
        with boundary(RewardError, "reward"):
            reward = self._reward(trajectory)
        trajectory.reward = settled(reward, trajectory.stop_reason, self.pipeline.stop_policy)
        if reward is not None and trajectory.reward is not None and trajectory.reward != reward:
            terms = trajectory.verdict.get("reward_terms", {"outcome": reward})
            penalty = {f"stop_{trajectory.stop_reason}": trajectory.reward - reward}
            trajectory.verdict["reward_terms"] = {**terms, **penalty}

    @asynccontextmanager
    async def _env(self, item: Item) -> AsyncIterator[Env]:
        """A fresh environment that is closed whatever happens, within `close_timeout`."""
        with boundary(EnvError, "make_env"):
            env = self.pipeline.make_env()
        try:
            yield env
        finally:
            self.board.enter(item, "close")
            try:
                with anyio.CancelScope(shield=True), boundary(EnvError, "env.aclose"):
                    with anyio.fail_after(self.pipeline.close_timeout):
                        await env.aclose()
            except SkyEnvError as error:
                logger.warning("%s sample %d: not closed: %s", item.task_id, item.sample_index, error)
                item.close_errors += 1


def _no_longer_needed(item: Item) -> Trajectory:
    return _given_up(item, StopReason.CANCELLED, ENOUGH, "enough siblings have a reward")


def _given_up(item: Item, reason: StopReason, kind: str, message: str) -> Trajectory:
    """What comes back of a sample that was cancelled: nothing but why, and in which stage it was."""
    trajectory = Trajectory(item.task_id, item.group_id, item.sample_index)
    trajectory.stop_reason = reason
    trajectory.failure = Failure(item.stage, kind, message)
    return trajectory


def _pause(error: SkyEnvError) -> float:
    """Seconds to wait before the next attempt: what the sandbox server asks for, within reason."""
    asked = error.retry_after if isinstance(error, SandboxUnavailable) else None
    return min(max(asked or 0.0, 0.0), LONGEST_PAUSE)
