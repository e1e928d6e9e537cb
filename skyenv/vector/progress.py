"""What a run is doing right now: counts per stage, kept by the pipeline and handed out as immutable snapshots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import anyio

from skyenv.types import Trajectory

Stage = Literal["init", "run", "eval"]
State = Literal["init_wait", "init", "run_wait", "run", "eval_wait", "eval", "close"]
EventKind = Literal["stage", "retry", "done"]


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
    failure, `retried` attempts that were repeated. `reward_mean` is over trajectories with a reward.
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
    """Something happened to one trajectory: it entered a state, is tried again, or came back."""

    kind: EventKind
    task_id: str
    sample_index: int
    state: State | None
    progress: Progress


OnEvent = Callable[[PipelineEvent], None]


@dataclass(eq=False, slots=True)
class Item:
    """One requested (task, sample) on its way; `seconds` a state and `close_errors` add up over its attempts."""

    task_id: str
    group_id: int
    sample_index: int
    state: State = "init_wait"
    admitted: float = 0.0
    since: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    close_errors: int = 0


class Board:
    """Where every admitted item stands. Called from one event loop only."""

    def __init__(self, total: int | None, on_event: OnEvent | None) -> None:
        self._total, self._on_event = total, on_event
        self._started: float | None = None
        self._items: dict[Item, None] = {}  # insertion order: the first is the oldest
        self._states: Counter[State] = Counter()
        self._admitted = self._done = self._failed = self._retried = 0
        self._reward_sum, self._reward_count = 0.0, 0

    def start(self) -> None:
        """The clock of the run starts; before, `seconds` is 0."""
        self._started = anyio.current_time()

    def admit(self, item: Item) -> None:
        """The item holds a live slot from now on."""
        item.admitted = item.since = anyio.current_time()
        self._admitted += 1
        self._items[item] = None
        self._states[item.state] += 1

    def enter(self, item: Item, state: State) -> None:
        """Move the item to another state; the time in the old one is added to `item.seconds`."""
        self._leave_state(item)
        self._states[state] += 1
        item.state = state
        if state != "close":  # cleanup must not depend on a caller's function
            self._tell("stage", item)

    def retry(self, item: Item) -> None:
        """The item starts over with a fresh environment."""
        self._retried += 1
        self._tell("retry", item)

    def leave(self, item: Item) -> None:
        """The item holds nothing any more, whether it came back or was cancelled."""
        del self._items[item]
        self._leave_state(item)

    def _leave_state(self, item: Item) -> None:
        now = anyio.current_time()
        item.seconds[item.state] = item.seconds.get(item.state, 0.0) + now - item.since
        item.since = now
        self._states[item.state] -= 1

    def deliver(self, item: Item, trajectory: Trajectory) -> None:
        """The item came back with this trajectory."""
        self._done += 1
        self._failed += trajectory.failure is not None
        if trajectory.reward is not None:
            self._reward_sum += trajectory.reward
            self._reward_count += 1
        self._tell("done", item)

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
