"""The rollout pipeline: init | run | eval, every requested (task, sample) back exactly once.

A trajectory is one straight-line coroutine that owns its environment; the stages are bounded admission (a lane each),
and one more lane caps live environments. Invariants: siblings are admitted together and in order; nothing is admitted
beyond the live cap, so init never runs ahead of run; an environment is closed before its trajectory comes back, in a
shielded scope with its own deadline, whatever happened; one failure never ends a sibling and is never replaced by one;
every wait has a deadline (below); after the iteration ends, breaks or is cancelled no environment is left.
Infrastructure failures start over with a fresh environment up to `max_attempts`, then come back as a typed `Failure`
without a reward. Where an environment can share its beginning, siblings start from the first one's sandbox, so that
init is paid once.

What ends each wait, by its name in `Limits` where nothing else is said: for a place among the living environments
`admission_timeout`; for a slot of a stage `queue_timeout`; for a sibling that prepares, half of `init_timeout`; in init
`init_timeout`, in a turn (the engine's answer and its tool) `turn_timeout`, in all turns `wall_clock`, in an evaluation
`eval_timeout`; before another attempt 30 s; all of these together, from admission on, `trajectory_timeout`; for
closing, and for freeing what siblings share, `close_timeout`; for a prefetch `init_timeout`. What is opened ahead of an
evaluation waits no longer than the turns last. A consumer that does not read holds back admission alone: nothing is
held for it, and what ends that wait is its reading or its leaving.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import dataclass, field

import anyio

from skyenv.core import Engine, MakeEnv, Prefetches, Reward, SharesBeginning, Task
from skyenv.errors import ConfigError, EnvError, SkyEnvError, boundary
from skyenv.renderer import Renderer
from skyenv.rewards import reward_function
from skyenv.rollout import RolloutOptions, TurnRules, byte_renderer
from skyenv.types import Limits, SamplingParams, StopReason, Trajectory, TrajectoryGroup
from skyenv.vector.closing import close
from skyenv.vector.durations import Durations
from skyenv.vector.lanes import Stages, StageWidths
from skyenv.vector.metrics import Meter
from skyenv.vector.progress import OnEvent
from skyenv.vector.request import Numbering, Request
from skyenv.vector.run import TrajectoryRun
from skyenv.vector.stopping import FailureThreshold, StopAction, check_attempts, check_stop_policy
from skyenv.vector.work import Work

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
    learns from what comes back. Nothing is admitted while the consumer of a run has left `most_unread` trajectories
    unread. Raises ConfigError for values that cannot work.
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
    most_unread: int = 1024
    stages: Stages | None = None
    meter: Meter | None = None
    on_event: OnEvent | None = None

    def __post_init__(self) -> None:
        if min(self.max_attempts, self.most_unread) < 1:
            raise ConfigError("max_attempts and most_unread: must be at least 1")
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
        return TrajectoryRun(Work(self, Request.of(tasks, group_size, enough, priority, first_group)))

    def run_part(
        self, task: Task | str, numbering: Numbering, *, enough: int | None = None, priority: int = 0
    ) -> TrajectoryRun:
        """As `run`, for these samples of one group that keep their numbers: a share of a larger run."""
        return TrajectoryRun(Work(self, Request([task], numbering, enough, priority)))

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
        except SkyEnvError as failed:
            logger.warning("prefetch of %d tasks: %s: %s", len(chosen), type(failed).__name__, failed)
        finally:
            error = await close(env, self.close_timeout)
            if error is not None:
                logger.warning("prefetch: not closed: %s", error)
