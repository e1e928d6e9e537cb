"""What the runs of a pipeline cost and what came of them: one flat mapping from name to number.

A `Meter` hears of every change of a trajectory and of every generation, and keeps sums, integrals over time and the
last `KEPT` durations of each kind, so its memory does not grow with a run. `numbers` are those since its start, `step`
those since the previous `step`; both count only the time in which some run was under way. All of it belongs to one
event loop. The names, each with what it is (seconds where nothing else is said):

- `stage/{init,run,eval}/` `queue_mean` `queue_max` trajectories waiting for the stage; `wait_p50` `wait_p95`
  `wait_max` how long they did; `service_p50` `service_p95` `service_max` how long the stage took; `width` its slots,
  mean over time; `utilisation` share of slot-seconds in use; in `numbers` also `queue` and `busy`, of this moment
- `sandboxes/` `live_mean` `live_max`, in `numbers` also `live`: environments from the start of init until closed
- `engine/` `requests_mean` `requests_max` under way; `latency_p50` `latency_p95` `latency_max` of a generation;
  `idle` share of its slots unused, or, where the meter was not told how many there are, of time without a request;
  `prompt_tokens_per_second` `sampled_tokens_per_second`; `cached` share of prompt tokens, where servers tell it
- `trajectories/` `done` `failed` `cancelled` `retried` counts, `per_hour` those done; `failures/KIND` failed ones by
  error, `retries/KIND` attempts that were repeated, by error
- `group/` `seconds_p50` `seconds_p95` `seconds_max` from the admission of the first sibling to the return of the last,
  `spread_p50` `spread_p95` `spread_max` from the first to return to the last; `pass@K` of whole groups whose verdicts
  say `resolved`
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import anyio

from skyenv.core import Engine
from skyenv.errors import SkyEnvError
from skyenv.types import Completion, Message, SamplingParams, StopReason, Trajectory
from skyenv.vector.lanes import STAGES, Stage, Stages
from skyenv.vector.progress import WAIT_OF, Item, Siblings, State
from skyenv.vector.timeline import LIFELINES_KEPT, Lifeline

KEPT = 2048
HOLDING: frozenset[State] = frozenset({"init", "run_wait", "run", "eval_wait", "eval", "close"})


class Level:
    """A number that goes up and down: its integral over time and its peak, in all and since the last `mark`."""

    def __init__(self) -> None:
        self.value = 0.0
        self._since = self._area = self._before = 0.0
        self._peaks = [0.0, 0.0]

    def set(self, now: float, value: float) -> None:
        """It is `value` from now on."""
        self._area += self.value * (now - self._since)
        self._since, self.value = now, value
        self._peaks = [max(peak, value) for peak in self._peaks]

    def add(self, now: float, change: float) -> None:
        """It goes up or down from now on."""
        self.set(now, self.value + change)

    def area(self, now: float, whole: bool) -> float:
        """The integral, of all or since the mark."""
        return self._area + self.value * (now - self._since) - (0.0 if whole else self._before)

    def peak(self, whole: bool) -> float:
        """The maximum, of all or since the mark."""
        return self._peaks[0 if whole else 1]

    def mark(self, now: float) -> None:
        """Begin anew."""
        self._before, self._peaks[1] = self.area(now, True), self.value


class Series:
    """Durations: how many, and the last `KEPT` of them, in all and since the last `mark`."""

    def __init__(self) -> None:
        self.count = self._before = 0
        self._kept: deque[float] = deque(maxlen=KEPT)

    def add(self, seconds: float) -> None:
        """One more."""
        self.count += 1
        self._kept.append(seconds)

    def mark(self) -> None:
        """Begin anew."""
        self._before = self.count

    def spread(self, whole: bool) -> dict[str, float]:
        """Median, p95 and maximum of those that are kept; nothing when there are none."""
        new = len(self._kept) if whole else min(len(self._kept), self.count - self._before)
        if not new:
            return {}
        ordered = sorted(list(self._kept)[-new:])
        return {name: ordered[min(new - 1, int(share * new))] for name, share in QUANTILES.items()}


QUANTILES = {"p50": 0.5, "p95": 0.95, "max": 1.0}


@dataclass(slots=True)
class _Counts:
    """Everything that only grows."""

    counts: Counter[str] = field(default_factory=Counter)
    groups: Counter[tuple[int, int]] = field(default_factory=Counter)

    def __sub__(self, before: _Counts) -> _Counts:
        return _Counts(self.counts - before.counts, self.groups - before.groups)

    def copy(self) -> _Counts:
        return _Counts(self.counts.copy(), self.groups.copy())


class Meter:
    """Give one to a pipeline (`meter=`), or to several that should be counted together; holds nothing open.

    `engine_slots` is how many requests the engines serve at once, if that is known. With `timeline` every trajectory
    that comes back leaves a `Lifeline`, which its owner takes with `take_lifelines` (the last 65 536 are kept).
    """

    def __init__(self, *, engine_slots: int | None = None, timeline: bool = False) -> None:
        self.engine_slots, self.timeline = engine_slots, timeline
        self.origin = time.time()
        self._origin: float | None = None
        self._stages: Counter[Stages] = Counter()
        self._active, self._live, self._requests, self._served = Level(), Level(), Level(), Level()
        self._widths = {stage: Level() for stage in STAGES}
        self._states: dict[State, Level] = {}
        self._visits: dict[str, Series] = {}
        self._all, self._marked = _Counts(), _Counts()
        self._lifelines: deque[Lifeline] = deque(maxlen=LIFELINES_KEPT)

    # What runs tell.

    def run_began(self, stages: Stages) -> None:
        """A run with these stages is under way."""
        now = anyio.current_time()
        if self._origin is None:
            self._origin, self.origin = now, time.time()
        self._stages[stages] += 1
        self._active.set(now, 1.0)
        self._measure_widths(now)

    def run_ended(self, stages: Stages) -> None:
        """It is over."""
        now = anyio.current_time()
        self._stages -= Counter([stages])
        self._active.set(now, float(bool(self._stages)))
        self._measure_widths(now)

    def moved(self, old: State | None, new: State | None, spent: float) -> None:
        """A trajectory left a state after so many seconds for another one; None before the first, after the last."""
        now = anyio.current_time()
        if old is not None:
            self._state(old).add(now, -1.0)
            self._series(old).add(spent)
        if new is not None:
            self._state(new).add(now, 1.0)
        held = (new in HOLDING) - (old in HOLDING)
        if held:
            self._live.add(now, held)
        self._measure_widths(now)

    def retried(self, error: SkyEnvError) -> None:
        """An attempt failed and is repeated."""
        self._all.counts["trajectories/retried"] += 1
        self._all.counts[f"retries/{type(error).__name__}"] += 1

    def delivered(self, item: Item, trajectory: Trajectory) -> None:
        """A trajectory came back."""
        counts = self._all.counts
        counts["trajectories/done"] += 1
        if trajectory.stop_reason is StopReason.CANCELLED:
            counts["trajectories/cancelled"] += 1
        elif trajectory.failure is not None:
            counts["trajectories/failed"] += 1
            counts[f"failures/{trajectory.failure.kind}"] += 1
        if self.timeline:
            self._lifelines.append(_lifeline(item, trajectory, self._origin or 0.0))

    def group_ended(self, group: Siblings) -> None:
        """All siblings are back."""
        now = anyio.current_time()
        self._series("group_seconds").add(now - group.admitted)
        self._series("group_spread").add(now - group.first_back)
        if group.judged:
            self._all.groups[group.samples, group.solved] += 1

    # What generations tell.

    def asked(self) -> None:
        """A request goes to the engine."""
        self._set_requests(self._requests.value + 1)

    def answered(self, seconds: float, prompt: int, completion: Completion | None) -> None:
        """It is over; None when it failed or was cancelled."""
        self._set_requests(self._requests.value - 1)
        if completion is None:
            return
        self._series("generation").add(seconds)
        counts = self._all.counts
        counts["prompt_tokens"] += prompt
        counts["sampled_tokens"] += len(completion.token_ids)
        if completion.cached_tokens is not None:
            counts["known_tokens"] += prompt
            counts["cached_tokens"] += completion.cached_tokens

    # What readers ask.

    def numbers(self) -> dict[str, float]:
        """All numbers since the start, and those of this moment. Call it on the event loop."""
        found = self._collect(True)
        for stage in STAGES:
            found[f"stage/{stage}/queue"] = self._state(WAIT_OF[stage]).value
            found[f"stage/{stage}/busy"] = self._state(stage).value
        return {**found, "sandboxes/live": self._live.value, "engine/requests": self._requests.value}

    def step(self) -> dict[str, float]:
        """The numbers since the last `step`, and a new one begins. Call it on the event loop."""
        found, now = self._collect(False), anyio.current_time()
        levels = (self._active, self._live, self._requests, self._served, *self._widths.values())
        for level in (*levels, *self._states.values()):
            level.mark(now)
        for series in self._visits.values():
            series.mark()
        self._marked = self._all.copy()
        return found

    def take_lifelines(self) -> list[Lifeline]:
        """Those of the trajectories that came back since the last call."""
        taken = list(self._lifelines)
        self._lifelines.clear()
        return taken

    def _collect(self, whole: bool) -> dict[str, float]:
        now = anyio.current_time()
        seconds = self._active.area(now, whole)
        counts = self._all if whole else self._all - self._marked
        if not seconds:
            return {}
        found = {f"trajectories/{name}": 0.0 for name in ("done", "failed", "cancelled", "retried")}
        found |= {name: float(count) for name, count in counts.counts.items() if "/" in name}
        found["trajectories/per_hour"] = 3600 * counts.counts["trajectories/done"] / seconds
        for stage in STAGES:
            found |= {f"stage/{stage}/{name}": value for name, value in self._stage(stage, now, seconds, whole)}
        found |= _mean_and_max("sandboxes/live", self._live, now, seconds, whole)
        found |= self._engine(counts.counts, now, seconds, whole)
        for name, key in (("seconds", "group_seconds"), ("spread", "group_spread")):
            found |= {f"group/{name}_{at}": value for at, value in self._series(key).spread(whole).items()}
        return found | passes(counts.groups)

    def _stage(self, stage: Stage, now: float, seconds: float, whole: bool) -> Iterator[tuple[str, float]]:
        waiting: State = WAIT_OF[stage]
        yield from _mean_and_max("queue", self._state(waiting), now, seconds, whole).items()
        states: tuple[tuple[str, State], ...] = (("wait", waiting), ("service", stage))
        for name, state in states:
            yield from ((f"{name}_{at}", value) for at, value in self._series(state).spread(whole).items())
        slots = self._widths[stage].area(now, whole)
        yield "width", slots / seconds
        yield "utilisation", min(1.0, self._state(stage).area(now, whole) / slots) if slots else 0.0

    def _engine(self, counts: Counter[str], now: float, seconds: float, whole: bool) -> dict[str, float]:
        found = _mean_and_max("engine/requests", self._requests, now, seconds, whole)
        found |= {f"engine/latency_{at}": value for at, value in self._series("generation").spread(whole).items()}
        found["engine/idle"] = max(0.0, 1.0 - self._served.area(now, whole) / (seconds * (self.engine_slots or 1)))
        for name in ("prompt_tokens", "sampled_tokens"):
            found[f"engine/{name}_per_second"] = counts[name] / seconds
        if counts["known_tokens"]:
            found["engine/cached"] = counts["cached_tokens"] / counts["known_tokens"]
        return found

    def _set_requests(self, requests: float) -> None:
        now = anyio.current_time()
        self._requests.set(now, requests)
        self._served.set(now, min(requests, self.engine_slots or 1))

    def _measure_widths(self, now: float) -> None:
        for stage, level in self._widths.items():
            width = sum(stages.lanes[stage].width for stages in self._stages)
            if width != level.value:
                level.set(now, width)

    def _state(self, state: State) -> Level:
        return self._states.setdefault(state, Level())

    def _series(self, name: str) -> Series:
        return self._visits.setdefault(name, Series())


class MeteredEngine:
    """The engine of one trajectory as its meter sees it."""

    def __init__(self, engine: Engine, meter: Meter, item: Item) -> None:
        self._engine, self._meter, self._item = engine, meter, item

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        messages: Sequence[Message] = (),
        session_id: str = "",
    ) -> Completion:
        """The engine's own answer, or error."""
        started = anyio.current_time()
        self._meter.asked()
        completion: Completion | None = None
        try:
            completion = await self._engine.generate(prompt_ids, sampling, messages=messages, session_id=session_id)
            return completion
        finally:
            ended = anyio.current_time()
            self._meter.answered(ended - started, len(prompt_ids), completion)
            if self._meter.timeline:
                self._item.generations.append((started, ended))


def _lifeline(item: Item, trajectory: Trajectory, origin: float) -> Lifeline:
    """What the item went through, on the meter's clock."""
    failure = trajectory.failure
    return Lifeline(
        item.task_id,
        item.group_id,
        item.sample_index,
        failure.kind if failure is not None else str(trajectory.verdict.get("status", "done")),
        trajectory.reward,
        tuple((state, start - origin, end - origin) for state, start, end in item.spans),
        tuple((start - origin, end - origin) for start, end in item.generations),
    )


def one_of(samples: int, solved: int, k: int) -> float:
    """The unbiased estimate of Chen et al. 2021 of the chance that one of `k` samples solves a task."""
    return 1.0 - math.comb(samples - solved, k) / math.comb(samples, k)


def pass_sizes(samples: int) -> list[int]:
    """1, 2, 4, ... and `samples` itself."""
    return [*(1 << n for n in range(samples.bit_length()) if 1 << n < samples), samples]


def passes(groups: Counter[tuple[int, int]]) -> dict[str, float]:
    """`pass@K` from how many groups there are by (samples, solved); those with fewer samples than K are left out."""
    most = max((samples for samples, _solved in groups), default=0)
    found = {}
    for k in pass_sizes(most) if most else ():
        chances = [one_of(n, c, k) for (n, c), times in groups.items() if n >= k for _ in range(times)]
        found[f"pass@{k}"] = fmean(chances)
    return found


def _mean_and_max(name: str, level: Level, now: float, seconds: float, whole: bool) -> dict[str, float]:
    return {f"{name}_mean": level.area(now, whole) / seconds, f"{name}_max": level.peak(whole)}
