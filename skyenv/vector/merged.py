"""Progress and statistics of a run over several shards, from its trajectories and the shards' signs of life.

Counts and times are this run's, exact for what came back; who is in which state is as old as the last sign of life.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence, Sized

import anyio

from skyenv.types import StopReason, Trajectory
from skyenv.vector.lanes import STAGES, Stage
from skyenv.vector.progress import KEPT_TIMES, WAIT_OF, EventKind, OnEvent, PipelineEvent, Progress, StageStats, Times
from skyenv.vector.wire import STATES, Beat
from skyenv.vector.work import Request


class Merged:
    """What came back of one run. Called from one event loop only."""

    def __init__(self, request: Request, on_event: OnEvent | None) -> None:
        tasks = request.tasks
        self._total = len(tasks) * request.group_size if isinstance(tasks, Sized) else None
        self._on_event = on_event
        self._started: float | None = None
        self._done = self._failed = self._retried = 0
        self._reward_sum, self._reward_count = 0.0, 0
        self._visits: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=KEPT_TIMES))
        self._counts: Counter[str] = Counter()
        self._spent: dict[str, float] = defaultdict(float)

    def start(self) -> None:
        """The clock of the run starts."""
        self._started = anyio.current_time()

    @property
    def counts(self) -> tuple[int, int]:
        """How many came back, and how many of them failed."""
        return self._done, self._failed

    def deliver(self, trajectory: Trajectory) -> None:
        """One came back."""
        self._done += 1
        self._failed += trajectory.failure is not None and trajectory.stop_reason is not StopReason.CANCELLED
        if trajectory.reward is not None:
            self._reward_sum += trajectory.reward
            self._reward_count += 1
        for state, seconds in trajectory.seconds.items():
            self._visits[state].append(seconds)
            self._counts[state] += 1
            self._spent[state] += seconds
        self._tell("done", trajectory.task_id, trajectory.sample_index)

    def retry(self, task_id: str, samples: Iterable[int]) -> None:
        """These samples start over on another shard."""
        for sample in samples:
            self._retried += 1
            self._tell("retry", task_id, sample)

    def snapshot(self, portions: Iterable[Sequence[int]] = ()) -> Progress:
        """The run at this moment; `portions` are the counts of its portions from the last signs of life."""
        states = dict.fromkeys(STATES, 0)
        for counts in portions:
            for state, count in zip(STATES, counts, strict=True):
                states[state] += count
        queued = None if self._total is None else max(0, self._total - self._done - sum(states.values()))
        mean = self._reward_sum / self._reward_count if self._reward_count else None
        return Progress(
            total=self._total,
            queued=queued,
            **states,
            done=self._done,
            failed=self._failed,
            retried=self._retried,
            reward_mean=mean,
            oldest=None,
            seconds=self._seconds,
        )

    def stats(self, beats: Sequence[Beat]) -> Mapping[Stage, StageStats]:
        """What each stage did. Queue and slots are of all runs on the shards, summed; times are this run's."""
        found: dict[Stage, StageStats] = {}
        for stage in STAGES:
            lanes = [beat.stages[stage] for beat in beats if stage in beat.stages]
            waiting, busy, width = (sum(lane[place] for lane in lanes) for place in range(3))
            slot_seconds = width * self._seconds
            used = self._spent[stage] / slot_seconds if slot_seconds else 0.0
            wait, service = self._times(WAIT_OF[stage]), self._times(stage)
            found[stage] = StageStats(waiting, busy, width, wait, service, min(1.0, used))
        return found

    @property
    def _seconds(self) -> float:
        return 0.0 if self._started is None else anyio.current_time() - self._started

    def _times(self, state: str) -> Times:
        ordered = sorted(self._visits[state])
        if not ordered:
            return Times()
        middle, late = (ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.95))
        return Times(self._counts[state], middle, late, ordered[-1])

    def _tell(self, kind: EventKind, task_id: str, sample: int) -> None:
        if self._on_event is not None:
            self._on_event(PipelineEvent(kind, task_id, sample, None, self.snapshot()))
