"""The rollout pipeline: init | run | eval, every requested (task, sample) back exactly once.

A trajectory is one straight-line coroutine that owns its environment; the stages are bounded admission (a limiter
each), and one more limiter caps live environments. Invariants: siblings are admitted together and in order; nothing is
admitted beyond the live cap, so init never runs ahead of run; an environment is closed before its trajectory comes
back, in a shielded scope with its own deadline, whatever happened; one failure never ends a sibling and is never
replaced by one; after the iteration ends, breaks or is cancelled no environment is left. Infrastructure failures start
over with a fresh environment up to `max_attempts`, then come back as a typed `Failure` without a reward.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sized
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import AsyncGeneratorType, MappingProxyType, TracebackType
from typing import Self, TypeVar

import anyio
from anyio.streams.memory import MemoryObjectSendStream

from skyenv.core import Engine, Env, MakeEnv, Reward, Task
from skyenv.errors import (
    ConfigError,
    EngineError,
    EnvError,
    RewardError,
    SandboxError,
    SandboxUnavailable,
    SkyEnvError,
    boundary,
)
from skyenv.renderer import Renderer
from skyenv.rewards import reward_function
from skyenv.rollout import RolloutOptions, TurnRules, byte_renderer, rollout
from skyenv.types import Failure, Limits, SamplingParams, StopReason, Trajectory, TrajectoryGroup
from skyenv.vector.background import Background
from skyenv.vector.progress import Board, Item, OnEvent, Progress, Stage, State
from skyenv.vector.stopping import FailureThreshold, StopAction, check_stop_policy, failed_reason, settled

logger = logging.getLogger(__name__)
T = TypeVar("T")

WAITING: Mapping[Stage, State] = MappingProxyType({"init": "init_wait", "run": "run_wait", "eval": "eval_wait"})
LONGEST_PAUSE = 30.0


@dataclass(frozen=True, slots=True)
class StageWidths:
    """How many trajectories a stage serves at once, and how many environments may be alive (None: the sum)."""

    init: int = 8
    run: int = 32
    eval: int = 8
    live: int | None = None

    def __post_init__(self) -> None:
        if min(self.init, self.run, self.eval, 1 if self.live is None else self.live) < 1:
            raise ConfigError(f"widths: each must be at least 1, not {self}")


@dataclass(frozen=True, kw_only=True)
class RolloutPipeline:
    """What every run of a pipeline shares; immutable, holds nothing open.

    `make_env` makes a fresh environment for each attempt. `renderer` must be the engine's own tokenizer and format
    (the default, `byte_renderer`, fits engines that take text). `stop_policy` maps a stop reason to `keep` (the
    default), `mask`, `zero`, or a number that is taken off the reward; failures are always masked. `reward` is a
    function, a name or `package.module:function`. `on_event` is called on the event loop at every change and must not
    block. Raises ConfigError for values that cannot work.
    """

    engine: Engine
    make_env: MakeEnv
    renderer: Renderer = field(default_factory=byte_renderer)
    limits: Limits = field(default_factory=Limits)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    rules: TurnRules = field(default_factory=TurnRules)
    widths: StageWidths = field(default_factory=StageWidths)
    stop_policy: Mapping[StopReason, StopAction] = field(default_factory=dict)
    reward: str | Reward = "outcome"
    max_attempts: int = 2
    failures: FailureThreshold = field(default_factory=FailureThreshold)
    close_timeout: float = 60.0
    on_event: OnEvent | None = None

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ConfigError("max_attempts: must be at least 1")
        reward_function(self.reward)
        check_stop_policy(self.stop_policy)
        RolloutOptions(self.limits, self.sampling, self.rules)

    def run(self, tasks: Iterable[Task | str], group_size: int = 8) -> TrajectoryRun:
        """Roll out `group_size` samples of each task; iterate over the result to start it.

        Trajectories come in the order in which they end. `break`, an exception or cancellation in the consumer stops
        the rest and frees its environments; `async with pipeline.run(...) as run` does so before the next statement
        runs. The iteration raises SkyEnvError, after everything that finished was yielded, when too large a share of
        trajectories fails (`failures`) or when `tasks` or `on_event` raises.
        """
        if group_size < 1:
            raise ConfigError("group_size: must be at least 1")
        return TrajectoryRun(self, tasks, group_size)

    async def run_groups(
        self, tasks: Iterable[Task | str], group_size: int = 8
    ) -> AsyncGenerator[TrajectoryGroup, None]:
        """As `run`, but yields the siblings of a task together, as soon as the last of them is back."""
        waiting: dict[int, list[Trajectory]] = {}
        async with self.run(tasks, group_size) as run:
            async for trajectory in run:
                siblings = waiting.setdefault(trajectory.group_id, [])
                siblings.append(trajectory)
                if len(siblings) == group_size:
                    del waiting[trajectory.group_id]
                    siblings.sort(key=lambda sibling: sibling.sample_index)
                    yield TrajectoryGroup(trajectory.task_id, trajectory.group_id, siblings)

    async def collect(self, tasks: Iterable[Task | str], group_size: int = 8) -> list[TrajectoryGroup]:
        """All groups, in the order of `tasks`. Raises as `run` does, and then nothing is returned."""
        groups = [group async for group in self.run_groups(tasks, group_size)]
        return sorted(groups, key=lambda group: group.group_id)


class TrajectoryRun:
    """One run of a pipeline: an asynchronous iterator of trajectories, and a context manager that stops it."""

    def __init__(self, pipeline: RolloutPipeline, tasks: Iterable[Task | str], group_size: int) -> None:
        # The generator knows the work and never this object: when a consumer breaks, its last reference goes and the
        # event loop closes it.
        self._work = _Work(pipeline, tasks, group_size)
        self._stream = _trajectories(self._work)

    @property
    def progress(self) -> Progress:
        """Where everything stands now."""
        return self._work.board.snapshot()

    def __aiter__(self) -> AsyncIterator[Trajectory]:
        return self._stream

    async def __anext__(self) -> Trajectory:
        return await anext(self._stream)

    async def aclose(self) -> None:
        """Stop what is under way and free its environments; idempotent, callable from any task."""
        await self._work.stop()
        if isinstance(self._stream, AsyncGeneratorType) and not self._stream.ag_running:
            await self._stream.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


async def _trajectories(work: _Work) -> AsyncGenerator[Trajectory, None]:
    sender, results = anyio.create_memory_object_stream[Trajectory](math.inf)
    with results:
        work.start(sender)
        try:
            async for trajectory in results:
                yield trajectory
        finally:
            await work.stop()
    if work.error is not None:
        raise work.error


class _Work:
    """The coroutines of one run, in a task of their own between `start` and `stop`."""

    def __init__(self, pipeline: RolloutPipeline, tasks: Iterable[Task | str], group_size: int) -> None:
        self.pipeline, self._tasks, self._group_size = pipeline, tasks, group_size
        total = len(tasks) * group_size if isinstance(tasks, Sized) else None
        self.board = Board(total, pipeline.on_event)
        self._options = RolloutOptions(pipeline.limits, pipeline.sampling, pipeline.rules)
        self._reward = reward_function(pipeline.reward)
        self._reasons: Counter[str] = Counter()
        self._background: Background | None = None
        widths = pipeline.widths
        self._limiters: dict[Stage, anyio.CapacityLimiter] = {
            "init": anyio.CapacityLimiter(widths.init),
            "run": anyio.CapacityLimiter(widths.run),
            "eval": anyio.CapacityLimiter(widths.eval),
        }
        self._live = anyio.CapacityLimiter(widths.live or widths.init + widths.run + widths.eval)

    @property
    def error(self) -> SkyEnvError | None:
        """What ended the run before its end."""
        return self._background.error if self._background is not None else None

    def start(self, results: MemoryObjectSendStream[Trajectory]) -> None:
        """Begin to put trajectories into `results`, which is closed at the end."""
        self.board.start()
        self._background = Background(lambda: self._main(results), "pipeline")
        self._background.start()

    async def stop(self) -> None:
        """Cancel what is under way and wait until it is cleaned up; idempotent."""
        if self._background is not None:
            await self._background.stop()

    def _items(self) -> Iterator[tuple[Item, Task | str]]:
        """Sibling after sibling, task after task."""
        for group_id, task in enumerate(self._tasks):
            task_id = task if isinstance(task, str) else task.task_id
            for sample_index in range(self._group_size):
                yield Item(task_id, group_id, sample_index), task

    async def _main(self, results: MemoryObjectSendStream[Trajectory]) -> None:
        async with results, anyio.create_task_group() as group:
            for item, task in self._items():
                await self._live.acquire_on_behalf_of(item)
                group.start_soon(self._one, item, task, results)

    async def _one(self, item: Item, task: Task | str, results: MemoryObjectSendStream[Trajectory]) -> None:
        """One requested sample, from admission to delivery."""
        self.board.admit(item)
        try:
            trajectory = await self._attempts(item, task)
        finally:
            self.board.leave(item)
            self._live.release_on_behalf_of(item)
        trajectory.seconds.update(item.seconds)
        if item.close_errors:
            trajectory.counters["close_errors"] = item.close_errors
        results.send_nowait(trajectory)
        self.board.deliver(item, trajectory)
        self._watch(trajectory)

    def _watch(self, trajectory: Trajectory) -> None:
        """End the run when too much fails."""
        if trajectory.failure is None:
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
            self.board.retry(item)
            await anyio.sleep(_pause(error))
        return trajectory

    async def _attempt(self, item: Item, task: Task | str, trajectory: Trajectory) -> SkyEnvError | None:
        """Init, run and eval of one environment; fills the trajectory and returns what went wrong."""
        stage: Stage = "init"
        limits = self.pipeline.limits
        try:
            async with self._env(item) as env:
                late: SkyEnvError = SandboxError(f"init did not end within {limits.init_timeout:g} s")
                await self._serve(item, stage, lambda: self._reset(env, item, task), limits.init_timeout, late)
                stage = "run"
                await self._serve(item, stage, lambda: self._play(env, trajectory), math.inf, late)
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
        self.board.enter(item, WAITING[stage])
        async with self._limiters[stage]:
            self.board.enter(item, stage)
            with anyio.move_on_after(timeout):
                return await work()
            raise late

    async def _reset(self, env: Env, item: Item, task: Task | str) -> None:
        seed = self.pipeline.sampling.seed
        if seed is not None:  # the same start for all siblings
            seed = zlib.crc32(f"{seed} {item.task_id}".encode()) >> 1
        with boundary(EnvError, "env.areset"):
            await env.areset(seed=seed, options={"task": task})

    async def _play(self, env: Env, trajectory: Trajectory) -> None:
        await rollout(env, self.pipeline.engine, self.pipeline.renderer, trajectory, self._options)

    async def _evaluate(self, env: Env, trajectory: Trajectory) -> None:
        """Grade, then reward, then what the stop policy makes of it."""
        with boundary(RewardError, "env.aevaluate"):
            reward, verdict = await env.aevaluate()
            trajectory.verdict = {**verdict, "reward": reward}
        with boundary(RewardError, "reward"):
            reward = self._reward(trajectory)
        trajectory.reward = settled(reward, trajectory.stop_reason, self.pipeline.stop_policy)

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


def _pause(error: SkyEnvError) -> float:
    """Seconds to wait before the next attempt: what the sandbox server asks for, within reason."""
    asked = error.retry_after if isinstance(error, SandboxUnavailable) else None
    return min(max(asked or 0.0, 0.0), LONGEST_PAUSE)
