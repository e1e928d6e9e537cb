"""What a run is doing right now: counts per stage, kept by the pipeline and handed out as immutable snapshots.

What it did so far, in numbers, is with its `skyenv.vector.metrics.Meter`, which hears of everything from here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

import anyio

from skyenv.errors import SkyEnvError
from skyenv.types import StopReason, Trajectory
from skyenv.vector.lanes import Stage, Stages

if TYPE_CHECKING:
    from skyenv.vector.metrics import Meter

State = Literal["init_wait", "init", "run_wait", "run", "eval_wait", "eval", "close"]
EventKind = Literal["stage", "retry", "stalled", "done"]
STAGE_OF: Mapping[State, Stage] = MappingProxyType(
    {"init_wait": "init", "init": "init", "run_wait": "run", "run": "run", "eval_wait": "eval", "eval": "eval"}
)
WAIT_OF: Mapping[Stage, State] = MappingProxyType({"init": "init_wait", "run": "run_wait", "eval": "eval_wait"})


@dataclass(frozen=True, slots=True)
class InFlight:
    """One trajectory that is under way: where it stands and for how many seconds since it was admitted."""

    task_id: str
    sample_index: int
    state: State
    seconds: float


@dataclass(frozen=True, slots=True)
class Progress:
    """Counts of trajectories. `total` and `queued` are None when the tasks come from a stream of unknown length.

    `init`, `run` and `eval` are being served, `*_wait` stand in front of that stage with their sandbox ready (none
    yet for `init_wait`), `close` are freeing it. `done` counts all that came back, `failed` those of them with a
    failure (cancelled ones are none), `retried` attempts that were repeated. `reward_mean` is over trajectories with
    a reward.
    """

    total: int | None
    queued: int | None
    init_wait: int
    init: int
    run_wait: int
    run: int
    eval_wait: int
    eval: int
    close: int
    done: int
    failed: int
    retried: int
    reward_mean: float | None
    oldest: InFlight | None
    seconds: float

    @property
    def live(self) -> int:
        """Trajectories that were admitted and have not come back."""
        return self.init_wait + self.init + self.run_wait + self.run + self.eval_wait + self.eval + self.close


@dataclass(frozen=True, slots=True)
class PipelineEvent:
    """Something happened to one trajectory: it entered a state, stalls in it, is tried again, or came back."""

    kind: EventKind
    task_id: str
    sample_index: int
    state: State | None
    progress: Progress


OnEvent = Callable[[PipelineEvent], None]


@dataclass(eq=False, slots=True)
class Item:
    """One requested (task, sample) on its way; `seconds` a state and `close_errors` add up over its attempts.

    `stage` is the last one it came to, `told` whether it was named as stalled in its present state. `spans` and
    `generations` are kept for a meter that draws timelines.
    """

    task_id: str
    group_id: int
    sample_index: int
    state: State = "init_wait"
    stage: Stage = "init"
    told: bool = False
    admitted: float = 0.0
    since: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    close_errors: int = 0
    spans: list[tuple[State, float, float]] = field(default_factory=list)
    generations: list[tuple[float, float]] = field(default_factory=list)


@dataclass(slots=True)
class Siblings:
    """One group on its way: when it began, when its first sample came back, and what came of its samples.

    `samples` leaves cancelled ones out; `judged`: some verdict says whether its task was resolved.
    """

    admitted: float
    first_back: float = 0.0
    back: int = 0
    samples: int = 0
    solved: int = 0
    judged: bool = False

    def add(self, trajectory: Trajectory, now: float) -> None:
        """One sample came back."""
        if not self.back:
            self.first_back = now
        self.back += 1
        self.samples += trajectory.stop_reason is not StopReason.CANCELLED
        self.solved += bool(trajectory.verdict.get("resolved"))
        self.judged |= "resolved" in trajectory.verdict


class Board:
    """Where every admitted item of a run stands. Called from one event loop only."""

    def __init__(self, total: int | None, on_event: OnEvent | None, meter: Meter, group_size: int) -> None:
        self._total, self._on_event, self._meter, self._group_size = total, on_event, meter, group_size
        self._started: float | None = None
        self._items: dict[Item, None] = {}  # insertion order: the first is the oldest
        self._groups: dict[int, Siblings] = {}
        self._states: Counter[State] = Counter()
        self._admitted = self._done = self._failed = self._retried = 0
        self._reward_sum, self._reward_count = 0.0, 0

    @contextmanager
    def running(self, stages: Stages) -> Iterator[None]:
        """The run is under way; before, `seconds` is 0."""
        self._started = anyio.current_time()
        self._meter.run_began(stages)
        try:
            yield
        finally:
            self._meter.run_ended(stages)

    def admit(self, item: Item) -> None:
        """The item holds a live slot from now on."""
        item.admitted = item.since = anyio.current_time()
        self._admitted += 1
        self._items[item] = None
        self._states[item.state] += 1
        self._groups.setdefault(item.group_id, Siblings(item.admitted))
        self._meter.moved(None, item.state, 0.0)

    def enter(self, item: Item, state: State) -> None:
        """Move the item to another state; the time in the old one is added to `item.seconds`."""
        if state != item.state:  # it waits for init from its admission on
            self._leave_state(item, state)
            self._states[state] += 1
        item.state, item.stage, item.told = state, STAGE_OF.get(state, item.stage), False
        if state != "close":  # cleanup must not depend on a caller's function
            self._tell("stage", item)

    def retry(self, item: Item, error: SkyEnvError) -> None:
        """The item starts over with a fresh environment."""
        self._retried += 1
        self._meter.retried(error)
        self._tell("retry", item)

    def leave(self, item: Item) -> None:
        """The item holds nothing any more, whether it came back or was cancelled."""
        del self._items[item]
        self._leave_state(item, None)

    def _leave_state(self, item: Item, new: State | None) -> None:
        now = anyio.current_time()
        spent = now - item.since
        item.seconds[item.state] = item.seconds.get(item.state, 0.0) + spent
        if self._meter.timeline:
            item.spans.append((item.state, item.since, now))
        item.since = now
        self._states[item.state] -= 1
        self._meter.moved(item.state, new, spent)

    def deliver(self, item: Item, trajectory: Trajectory) -> None:
        """The item came back with this trajectory."""
        self._done += 1
        self._failed += trajectory.failure is not None and trajectory.stop_reason is not StopReason.CANCELLED
        if trajectory.reward is not None:
            self._reward_sum += trajectory.reward
            self._reward_count += 1
        self._meter.delivered(item, trajectory)
        group = self._groups[item.group_id]
        group.add(trajectory, anyio.current_time())
        if group.back == self._group_size:
            self._meter.group_ended(self._groups.pop(item.group_id))
        self._tell("done", item)

    def next_stall(self, after: float) -> float:
        """Seconds until the next item will have been in its state for `after` seconds."""
        now = anyio.current_time()
        return min((item.since + after - now for item in self._items if not item.told), default=after)

    def stalled(self, after: float) -> Iterator[tuple[Item, float]]:
        """Items that have been in their state for `after` seconds, each once a visit, with their seconds."""
        now = anyio.current_time()
        for item in [item for item in self._items if not item.told and now - item.since >= after]:
            item.told = True
            self._tell("stalled", item)
            yield item, now - item.since

    @property
    def counts(self) -> tuple[int, int]:
        """How many came back, and how many of them failed."""
        return self._done, self._failed

    def snapshot(self) -> Progress:
        """The state of the run at this moment."""
        now = anyio.current_time()
        oldest = None
        if self._items:
            item = next(iter(self._items))
            oldest = InFlight(item.task_id, item.sample_index, item.state, now - item.admitted)
        states = self._states
        return Progress(
            total=self._total,
            queued=None if self._total is None else self._total - self._admitted,
            init_wait=states["init_wait"],
            init=states["init"],
            run_wait=states["run_wait"],
            run=states["run"],
            eval_wait=states["eval_wait"],
            eval=states["eval"],
            close=states["close"],
            done=self._done,
            failed=self._failed,
            retried=self._retried,
            reward_mean=self._reward_sum / self._reward_count if self._reward_count else None,
            oldest=oldest,
            seconds=0.0 if self._started is None else now - self._started,
        )

    def _tell(self, kind: EventKind, item: Item) -> None:
        if self._on_event is not None:
            state = None if kind == "done" else item.state
            self._on_event(PipelineEvent(kind, item.task_id, item.sample_index, state, self.snapshot()))
