"""The rollout pipeline: init | run | eval, every requested (task, sample) back exactly once.

A trajectory is one straight-line coroutine that owns its environment; the stages are bounded admission (a lane each),
and one more lane caps live environments. Invariants: siblings are admitted together and in order; nothing is admitted
beyond the live cap, so init never runs ahead of run; an environment is closed before its trajectory comes back, in a
shielded scope with its own deadline, whatever happened; one failure never ends a sibling and is never replaced by one;
every wait has a deadline; after the iteration ends, breaks or is cancelled no environment is left. Infrastructure
failures start over with a fresh environment up to `max_attempts`, then come back as a typed `Failure` without a reward.
Where an environment can share its beginning, siblings start from the first one's sandbox, so that init is paid once.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from types import AsyncGeneratorType, TracebackType
from typing import Self

import anyio

from skyenv.core import Engine, MakeEnv, Prefetches, Reward, SharesBeginning, Task
from skyenv.errors import ConfigError, EnvError, SkyEnvError, boundary
from skyenv.renderer import Renderer
from skyenv.rewards import reward_function
from skyenv.rollout import RolloutOptions, TurnRules, byte_renderer
from skyenv.types import Limits, SamplingParams, StopReason, Trajectory, TrajectoryGroup
from skyenv.vector.durations import Durations
from skyenv.vector.lanes import Stages, StageWidths
from skyenv.vector.metrics import Meter
from skyenv.vector.progress import OnEvent, Progress
from skyenv.vector.stopping import FailureThreshold, StopAction, check_attempts, check_stop_policy
from skyenv.vector.work import Numbering, Request, Work

__all__ = ["Durations", "RolloutPipeline", "StageWidths", "Stages", "TrajectoryRun"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RolloutPipeline:
    """What every run of a pipeline shares; immutable, holds nothing open.

    `make_env` makes a fresh environment for each attempt. `renderer` must be the engine's own tokenizer and format
    (the default, `byte_renderer`, fits engines that take text). `stop_policy` maps a stop reason to `keep` (the
    default), `mask`, `zero`, or a number that is taken off the reward; failures are always masked. `reward` is a
    function, a name or `package.module:function`. `on_event` is called on the event loop at every change and must not
    block. Each run has stages of its own with these `widths`, unless `stages` are given: runs that share them, of this
    or another pipeline, share slots and living environments, and those of higher `priority` go first. Each run
    is counted by a meter of its own unless a `meter` is given. Whoever stays in one state for `stall_after` seconds is
    named in the log and by an event. `attempts` says for classes of `skyenv.errors`, by name, how often to try in all
    instead of `max_attempts`. With `fork_groups`, first attempts of siblings share a beginning where the environment
    can. With `longest_first`, runs of a sequence of tasks start the groups that took longest so far first, and it
    learns from what comes back. Raises ConfigError for values that cannot work.
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
    attempts: Mapping[str, int] = field(default_factory=dict)
    fork_groups: bool = True
    longest_first: Durations | None = None
    failures: FailureThreshold = field(default_factory=FailureThreshold)
    close_timeout: float = 60.0
    stall_after: float = 900.0
    stages: Stages | None = None
    meter: Meter | None = None
    on_event: OnEvent | None = None

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ConfigError("max_attempts: must be at least 1")
        reward_function(self.reward)
        check_stop_policy(self.stop_policy)
        check_attempts(self.attempts)
        RolloutOptions(self.limits, self.sampling, self.rules)

    def run(
        self,
        tasks: Iterable[Task | str],
        group_size: int = 8,
        *,
        enough: int | None = None,
        priority: int = 0,
        first_group: int = 0,
    ) -> TrajectoryRun:
        """Roll out `group_size` samples of each task; iterate over the result to start it.

        Once `enough` siblings have a reward the others of their group are cancelled and come back as such (with a
        larger `group_size`: over-sampling against stragglers). `priority` orders runs that share `stages`, then the
        number of a group does, counted from `first_group`.
        Trajectories come in the order in which they end. `break`, an exception or cancellation in the consumer stops
        the rest and frees its environments; `async with pipeline.run(...) as run` does so before the next statement
        runs. The iteration raises SkyEnvError, after everything that finished was yielded, when too large a share of
        trajectories fails (`failures`) or when `tasks` or `on_event` raises.
        """
        if group_size < 1:
            raise ConfigError("group_size: must be at least 1")
        if enough is not None and not 1 <= enough <= group_size:
            raise ConfigError(f"enough: must be from 1 to group_size ({group_size})")
        numbering = Numbering(first_group, tuple(range(group_size)))
        return TrajectoryRun(self, Request(tasks, group_size, enough, priority, numbering))

    def run_part(
        self, task: Task | str, numbering: Numbering, *, enough: int | None = None, priority: int = 0
    ) -> TrajectoryRun:
        """As `run`, for these samples of one group that keep their numbers: a share of a larger run."""
        return TrajectoryRun(self, Request([task], len(numbering.samples), enough, priority, numbering))

    async def run_groups(
        self, tasks: Iterable[Task | str], group_size: int = 8, *, enough: int | None = None, priority: int = 0
    ) -> AsyncGenerator[TrajectoryGroup, None]:
        """As `run`, but yields the siblings of a task together, as soon as the last of them is back."""
        waiting: dict[int, list[Trajectory]] = {}
        async with self.run(tasks, group_size, enough=enough, priority=priority) as run:
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

    async def prefetch(self, tasks: Iterable[Task | str], group_size: int = 8) -> None:
        """Have ready what a `run` of these tasks needs first, while nothing else is to do: images, files, sandboxes.

        For as many tasks as may be alive at once, within `limits.init_timeout`. What fails is logged, and comes back
        in the run as what it is. Cancel it when the run begins; environments that cannot prefetch make it a no-op.
        """
        with boundary(EnvError, "make_env"):
            env = self.make_env()
        each = 1 if self.fork_groups and isinstance(env, SharesBeginning) else group_size
        chosen = list(itertools.islice(tasks, max(1, self.widths.most_live // each)))
        try:
            if isinstance(env, Prefetches):
                with boundary(EnvError, "env.aprefetch"), anyio.fail_after(self.limits.init_timeout):
                    await env.aprefetch(chosen, each)
        except SkyEnvError as error:
            logger.warning("prefetch of %d tasks: %s: %s", len(chosen), type(error).__name__, error)
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(self.close_timeout):
                await env.aclose()


class TrajectoryRun:
    """One run of a pipeline: an asynchronous iterator of trajectories, and a context manager that stops it."""

    def __init__(self, pipeline: RolloutPipeline, request: Request) -> None:
        # The generator knows the work and never this object: when a consumer breaks, its last reference goes and the
        # event loop closes it.
        self._work = Work(pipeline, request)
        self._stream = _trajectories(self._work)

    @property
    def progress(self) -> Progress:
        """Where everything stands now."""
        return self._work.board.snapshot()

    @property
    def numbers(self) -> dict[str, float]:
        """What it did so far, by the names of `skyenv.vector.metrics`; of all runs that share its meter."""
        return self._work.meter.numbers()

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


async def _trajectories(work: Work) -> AsyncGenerator[Trajectory, None]:
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
