"""One run of a pipeline: the coroutines of its trajectories, from admission to delivery.

See `skyenv.vector.pipeline` for the invariants. A run owns its tasks, its board and, unless they are shared, its
stages; it never outlives `stop`.
"""

from __future__ import annotations

import itertools
import logging
import math
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from skyenv.core import Env, GradesAhead, SharesBeginning, Task
from skyenv.errors import (
    DeadlineExceeded,
    EnvError,
    RewardError,
    SandboxUnavailable,
    SkyEnvError,
    boundary,
)
from skyenv.rewards import checked, reward_function
from skyenv.rollout import RolloutOptions, rollout
from skyenv.types import Failure, StopReason, Trajectory
from skyenv.vector.background import Background
from skyenv.vector.closing import close
from skyenv.vector.lanes import Lane, Stage, Stages
from skyenv.vector.metrics import Meter, MeteredEngine
from skyenv.vector.progress import WAIT_OF, Board, Item, Progress
from skyenv.vector.request import Request
from skyenv.vector.sharing import SharedInit
from skyenv.vector.stopping import Failing, attempts_for, failed_reason, settled

if TYPE_CHECKING:
    from skyenv.vector.pipeline import RolloutPipeline

logger = logging.getLogger(__name__)
T = TypeVar("T")

LONGEST_PAUSE = 30.0
ENOUGH = "GroupComplete"


@dataclass(slots=True)
class Group:
    """The siblings of one task: how many are to come back, how many have a reward, the scopes of those under way."""

    left: int
    shared: SharedInit = field(default_factory=SharedInit)
    usable: int = 0
    complete: bool = False
    scopes: dict[Item, anyio.CancelScope] = field(default_factory=dict)


class Work:
    """The coroutines of one run, in a task of their own between `start` and `stop`."""

    def __init__(self, pipeline: RolloutPipeline, request: Request) -> None:
        self.pipeline, self._request = pipeline, request
        self.meter = pipeline.meter or Meter()
        self.board = Board(request.total, pipeline.on_event, self.meter, request.group_size)
        self.stages = pipeline.stages or Stages(pipeline.widths)
        self._options = RolloutOptions(pipeline.limits, pipeline.sampling, pipeline.rules)
        self._reward = reward_function(pipeline.reward)
        self._failing = Failing(pipeline.failures)
        self._taken = anyio.Event()
        self._groups: dict[int, Group] = {}
        self._places: dict[int, int] = {}
        self._background: Background | None = None

    @property
    def error(self) -> SkyEnvError | None:
        """What ended the run before its end."""
        return self._background.error if self._background is not None else None

    @property
    def progress(self) -> Progress:
        """Where everything stands now."""
        return self.board.snapshot()

    @property
    def numbers(self) -> dict[str, float]:
        """Those of its meter."""
        return self.meter.numbers()

    def start(self) -> MemoryObjectReceiveStream[Trajectory]:
        """See `skyenv.vector.run.Rolling`."""
        sender, results = anyio.create_memory_object_stream[Trajectory](math.inf)
        self._background = Background(lambda: self._main(sender), "pipeline")
        self._background.start()
        return results

    def taken(self) -> None:
        """See `skyenv.vector.run.Rolling`."""
        self._taken.set()

    async def stop(self) -> None:
        """See `skyenv.vector.run.Rolling`."""
        if self._background is not None:
            await self._background.stop()

    def _items(self) -> Iterator[tuple[Item, Task | str]]:
        """Sibling after sibling, task after task; the longest first where that is asked for and known."""
        numbering = self._request.numbering
        tasks: Iterable[tuple[int, Task | str]] = enumerate(self._request.tasks, numbering.group_id)
        history = self.pipeline.longest_first
        if history is not None and isinstance(self._request.tasks, Sequence):
            tasks = sorted(tasks, key=lambda numbered: -history.expected(_id_of(numbered[1])))
        for place, (group_id, task) in enumerate(tasks):
            task_id = _id_of(task)
            self._places[group_id] = numbering.group_id + place
            for sample_index in numbering.samples:
                yield Item(task_id, group_id, sample_index), task

    async def _main(self, results: MemoryObjectSendStream[Trajectory]) -> None:
        try:
            with self.board.running(self.stages):
                await self._admit_all(results)
        finally:
            with anyio.CancelScope(shield=True):
                async with anyio.create_task_group() as group:
                    for unfinished in self._groups.values():
                        group.start_soon(self._free, unfinished)

    async def _admit_all(self, results: MemoryObjectSendStream[Trajectory]) -> None:
        async with results, anyio.create_task_group() as beside:
            beside.start_soon(self._name_stalled)
            async with anyio.create_task_group() as group:
                for item, task in self._items():
                    await self._wanted(results)
                    siblings = self._groups.setdefault(item.group_id, Group(self._request.group_size))
                    refused = await self._refused(item, siblings)
                    if refused is None:
                        group.start_soon(self._one, item, task, siblings, results)
                    else:
                        await self._deliver(item, refused, siblings, results)
            beside.cancel_scope.cancel()

    async def _wanted(self, results: MemoryObjectSendStream[Trajectory]) -> None:
        """Hold back while the consumer has too much to read: it wakes this by reading, or ends it by stopping."""
        while results.statistics().current_buffer_used >= self.pipeline.most_unread:
            self._taken = anyio.Event()
            await self._taken.wait()

    async def _refused(self, item: Item, group: Group) -> Trajectory | None:
        """Wait for a place among the living environments; what comes back of a sample that gets none."""
        refused = _no_longer_needed(item)
        if not group.complete:
            place = f"place among the {self.stages.live.width} living environments"
            try:
                await self._acquire(self.stages.live, item, self.pipeline.limits.admission_timeout, place)
            except DeadlineExceeded as error:
                refused = _given_up(item, StopReason.SANDBOX_ERROR, type(error).__name__, str(error))
            else:
                return None
        self.board.admit(item)
        self.board.leave(item)
        return refused

    async def _acquire(self, lane: Lane, item: Item, patience: float, what: str) -> None:
        """A slot; DeadlineExceeded when there is none in time."""
        with anyio.move_on_after(patience) as wait:
            await lane.acquire(self._rank(item))
        if wait.cancelled_caught:
            raise DeadlineExceeded(f"no {what} within {patience:g} s")

    def _rank(self, item: Item) -> tuple[int, ...]:
        """Evaluation before training, older groups first, so that siblings finish together."""
        return -self._request.priority, self._places[item.group_id], item.sample_index

    async def _one(
        self, item: Item, task: Task | str, group: Group, results: MemoryObjectSendStream[Trajectory]
    ) -> None:
        """One requested sample, from admission to delivery."""
        self.board.admit(item)
        try:
            trajectory = await self._within_deadline(item, task, group)
        finally:
            self.board.leave(item)
            self.stages.live.release()
        await self._deliver(item, trajectory, group, results)

    async def _deliver(
        self, item: Item, trajectory: Trajectory, group: Group, results: MemoryObjectSendStream[Trajectory]
    ) -> None:
        """Hand over what came of a sample; what its siblings shared goes with the last of them."""
        trajectory.seconds.update(item.seconds)
        if item.close_errors:
            trajectory.counters["close_errors"] = item.close_errors
        self._count_usable(group, trajectory)
        if self.pipeline.longest_first is not None:
            self.pipeline.longest_first.note(trajectory)
        results.send_nowait(trajectory)
        self.board.deliver(item, trajectory)
        group.left -= 1
        if not group.left:
            del self._groups[item.group_id], self._places[item.group_id]
            await self._free(group)
        too_much = self._failing.too_much(trajectory, self.board.counts)
        if too_much is not None:
            raise too_much

    async def _free(self, group: Group) -> None:
        """What the siblings shared goes, whatever happened, within `close_timeout`."""
        try:
            with anyio.CancelScope(shield=True), boundary(EnvError, "the siblings' beginning"):
                with anyio.fail_after(self.pipeline.close_timeout):
                    await group.shared.aclose()
        except SkyEnvError as error:
            logger.warning("not freed: %s", error)

    async def _within_deadline(self, item: Item, task: Task | str, group: Group) -> Trajectory:
        """All attempts, until the trajectory's deadline passes or its group needs no more samples."""
        limit = self.pipeline.limits.trajectory_timeout
        with anyio.move_on_after(limit) as scope:
            if group.complete:
                return _no_longer_needed(item)
            group.scopes[item] = scope
            try:
                return await self._attempts(item, task, group)
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

    async def _attempts(self, item: Item, task: Task | str, group: Group) -> Trajectory:
        """Attempts with a fresh environment each, until one says something about the policy or none is left."""
        for attempt in itertools.count(1):
            trajectory = Trajectory(item.task_id, item.group_id, item.sample_index, attempts=attempt)
            error = await self._attempt(item, task, group, trajectory)
            if error is None or attempt >= attempts_for(error, self.pipeline.attempts, self.pipeline.max_attempts):
                break
            logger.info("%s sample %d: attempt %d failed: %s", item.task_id, item.sample_index, attempt, error)
            self.board.retry(item, error)
            await anyio.sleep(_pause(error))
        return trajectory

    async def _attempt(self, item: Item, task: Task | str, group: Group, trajectory: Trajectory) -> SkyEnvError | None:
        """Init, run and eval of one environment; fills the trajectory and returns what went wrong."""
        stage: Stage = "init"
        limits = self.pipeline.limits
        try:
            async with AsyncExitStack() as ahead, self._env(item) as env:
                async with self._beginning(env, group, trajectory.attempts):
                    late: SkyEnvError = DeadlineExceeded(f"init did not end within {limits.init_timeout:g} s")
                    await self._serve(item, stage, lambda: self._reset(env, item, task), limits.init_timeout, late)
                stage = "run"
                await self._serve(item, stage, lambda: self._play(env, item, trajectory, ahead), math.inf, late)
                stage = "eval"
                late = RewardError(f"evaluation did not end within {limits.eval_timeout:g} s")
                await self._serve(item, stage, lambda: self._evaluate(env, trajectory), limits.eval_timeout, late)
        except SkyEnvError as error:
            trajectory.reward = None
            trajectory.stop_reason = failed_reason(error)
            trajectory.failure = Failure(stage, type(error).__name__, str(error)[:2000])
            return error
        return None

    @asynccontextmanager
    async def _beginning(self, env: Env, group: Group, attempt: int) -> AsyncIterator[None]:
        """The block begins an environment as one of its siblings; a repeated attempt begins alone.

        Who waits for the sibling that prepares has no slot, and prepares too when half of an init's deadline is over.
        """
        shared = self.pipeline.fork_groups and self._request.group_size > 1 and attempt == 1
        if not (shared and isinstance(env, SharesBeginning)):
            yield
            return
        async with group.shared.beginning(self.pipeline.limits.init_timeout / 2) as beginning:
            with boundary(EnvError, "env.begin_with"):
                env.begin_with(beginning)
            yield

    async def _serve(
        self, item: Item, stage: Stage, work: Callable[[], Awaitable[T]], timeout: float, late: SkyEnvError
    ) -> T:
        """Wait for a slot of the stage, then do the work within its deadline; raises `late` when that passes."""
        lane = self.stages.lanes[stage]
        self.board.enter(item, WAIT_OF[stage])
        await self._acquire(lane, item, self.pipeline.limits.queue_timeout, f"slot of the {stage} stage")
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

    async def _play(self, env: Env, item: Item, trajectory: Trajectory, ahead: AsyncExitStack) -> None:
        """The turns, and beside them what opens the evaluation's needs, in a slot that `ahead` gives back."""
        engine = MeteredEngine(self.pipeline.engine, self.meter, item)
        playing = partial(rollout, env, engine, self.pipeline.renderer, trajectory, self._options)
        if not (self.stages.widths.ahead and isinstance(env, GradesAhead)):
            await playing()
            return
        with boundary(EnvError, "run"):
            async with anyio.create_task_group() as beside:
                beside.start_soon(self._grade_ahead, env, item, ahead)
                await playing()
                beside.cancel_scope.cancel()

    async def _grade_ahead(self, env: GradesAhead, item: Item, ahead: AsyncExitStack) -> None:
        await self.stages.ahead.acquire(self._rank(item))
        ahead.callback(self.stages.ahead.release)
        try:
            with boundary(EnvError, "env.aprepare_evaluation"):
                await env.aprepare_evaluation()
        except SkyEnvError as error:
            logger.info("%s sample %d: not graded ahead: %s", item.task_id, item.sample_index, error)

    async def _evaluate(self, env: Env, trajectory: Trajectory) -> None:
        """Grade, then reward, then what the stop policy makes of it."""
        with boundary(RewardError, "env.aevaluate"):
            reward, verdict = await env.aevaluate()
            trajectory.verdict = {**verdict, "reward": reward}
        with boundary(RewardError, "reward"):
            reward = checked(self._reward(trajectory), "the reward")
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
            error = await close(env, self.pipeline.close_timeout)
            if error is not None:
                logger.warning("%s sample %d: not closed: %s", item.task_id, item.sample_index, error)
                item.close_errors += 1


def _id_of(task: Task | str) -> str:
    return task if isinstance(task, str) else task.task_id


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
    return min(asked, LONGEST_PAUSE) if asked is not None and asked > 0 else 0.0
