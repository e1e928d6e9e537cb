"""Progress and numbers of a run over several shards, from its trajectories and the shards' signs of life.

Counts under `trajectories/` and `failures/` are this run's, exact. The other numbers are those of the meters of the
shards that are up, as old as their last sign of life: levels and rates are added (so a merged `*_max` of a level is an
upper bound), longest durations are the longest of all, a utilisation is weighted by the slots, and every other median
or share by what the shards did.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import anyio

from skyenv.types import StopReason, Trajectory
from skyenv.vector.progress import EventKind, OnEvent, PipelineEvent, Progress
from skyenv.vector.request import Request
from skyenv.vector.wire import STATES

Numbers = Mapping[str, float]

ADDED = (
    *("queue_mean", "queue_max", "queue", "busy", "width", "live_mean", "live_max", "live"),
    *("requests_mean", "requests_max", "_per_second", "per_hour"),
)
DONE = "trajectories/done"


class Merged:
    """What came back of one run. Called from one event loop only."""

    def __init__(self, request: Request, on_event: OnEvent | None) -> None:
        self._total = request.total
        self._on_event = on_event
        self._started: float | None = None
        self._counts: Counter[str] = Counter()
        self._reward_sum, self._reward_count = 0.0, 0

    def start(self) -> None:
        """The clock of the run starts."""
        self._started = anyio.current_time()

    @property
    def counts(self) -> tuple[int, int]:
        """How many came back, and how many of them failed."""
        return self._counts[DONE], self._counts["trajectories/failed"]

    def deliver(self, trajectory: Trajectory) -> None:
        """One came back."""
        self._counts[DONE] += 1
        if trajectory.stop_reason is StopReason.CANCELLED:
            self._counts["trajectories/cancelled"] += 1
        elif trajectory.failure is not None:
            self._counts["trajectories/failed"] += 1
            self._counts[f"failures/{trajectory.failure.kind}"] += 1
        if trajectory.reward is not None:
            self._reward_sum += trajectory.reward
            self._reward_count += 1
        self._tell("done", trajectory.task_id, trajectory.sample_index)

    def retry(self, task_id: str, samples: Iterable[int]) -> None:
        """These samples start over on another shard."""
        for sample in samples:
            self._counts["trajectories/retried"] += 1
            self._tell("retry", task_id, sample)

    def snapshot(self, portions: Iterable[Sequence[int]] = ()) -> Progress:
        """The run at this moment; `portions` are the counts of its portions from the last signs of life."""
        states = dict.fromkeys(STATES, 0)
        for counts in portions:
            for state, count in zip(STATES, counts, strict=True):
                states[state] += count
        done, failed = self.counts
        queued = None if self._total is None else max(0, self._total - done - sum(states.values()))
        return Progress(
            total=self._total,
            queued=queued,
            **states,
            done=done,
            failed=failed,
            retried=self._counts["trajectories/retried"],
            reward_mean=self._reward_sum / self._reward_count if self._reward_count else None,
            oldest=None,
            seconds=0.0 if self._started is None else anyio.current_time() - self._started,
        )

    def numbers(self, shards: Sequence[Numbers]) -> dict[str, float]:
        """By the names of `skyenv.vector.metrics`."""
        own = {f"trajectories/{name}": 0.0 for name in ("done", "failed", "cancelled", "retried")}
        own |= {name: float(count) for name, count in self._counts.items()}
        return merged_numbers(shards) | own

    def _tell(self, kind: EventKind, task_id: str, sample: int) -> None:
        if self._on_event is not None:
            self._on_event(PipelineEvent(kind, task_id, sample, None, self.snapshot()))


def merged_numbers(shards: Sequence[Numbers]) -> dict[str, float]:
    """The numbers of several meters as those of one; nothing of a shard that did nothing yet."""
    names = dict.fromkeys(name for numbers in shards for name in numbers)
    return {name: _merged(name, [numbers for numbers in shards if name in numbers]) for name in names}


def _merged(name: str, shards: Sequence[Numbers]) -> float:
    values = [numbers[name] for numbers in shards]
    area, _, leaf = name.rpartition("/")
    if area in ("trajectories", "failures", "retries") or leaf.endswith(ADDED):
        return sum(values)
    if leaf.endswith("_max"):
        return max(values)
    weighing = f"{area}/width" if leaf == "utilisation" else DONE
    weights = [numbers.get(weighing, 0.0) for numbers in shards]
    total = sum(weights)
    if not total:
        return sum(values) / len(values)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / total
