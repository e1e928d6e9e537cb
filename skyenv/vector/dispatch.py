"""Who gets which group: the bookkeeping of a sharded pipeline, without any waiting or I/O of its own.

A `Job` is one run: its tasks become groups one by one, as shards have room. A `Seat` is a shard that is up. A group is
in one place only: not yet taken from the tasks, waiting to run again, or on one seat under one number; what a seat
says under another number is not heard. So each (task, sample) comes back once, whoever died meanwhile. A group goes to
the seat with the most room, and none waits on a seat for longer than until one of its samples is admitted: fast shards
take more. All of it belongs to one event loop.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from skyenv.core import Task
from skyenv.errors import ConfigError, ShardLost, SkyEnvError, boundary
from skyenv.types import Failure, StopReason, Trajectory
from skyenv.vector.merged import Merged
from skyenv.vector.progress import OnEvent
from skyenv.vector.request import Request
from skyenv.vector.stopping import Failing, FailureThreshold
from skyenv.vector.timeline import LIFELINES_KEPT, Lifeline
from skyenv.vector.wire import Beat, End, Lived, Portion, Result, Word

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Group:
    """The samples of one task that have not come back."""

    job: Job
    task_id: str
    group_id: int
    missing: set[int]
    usable: int = 0
    losses: int = 0


@dataclass(frozen=True, slots=True)
class Cancel:
    """An order to a shard: this portion is no longer wanted."""

    number: int


@dataclass(frozen=True, slots=True)
class Announce:
    """An order to a shard: the engine samples from this policy version."""

    version: int


Order = Portion | Cancel | Announce


@dataclass(eq=False, slots=True)
class Seat:
    """A shard that is up: how many environments it may have alive, what it holds, and what it is to be told."""

    name: str
    live: int
    groups: dict[int, Group] = field(default_factory=dict)
    beat: Beat = field(default_factory=lambda: Beat({}, {}))
    orders: deque[Order] = field(default_factory=deque)
    ordered: anyio.Event = field(default_factory=anyio.Event)

    @property
    def samples(self) -> int:
        """How many samples it holds."""
        return sum(len(group.missing) for group in self.groups.values())

    def tell(self, order: Order) -> None:
        """Put an order where the sender finds it."""
        self.orders.append(order)
        self.ordered.set()


class Job:
    """One run: groups on their way, results that wait to be read."""

    def __init__(self, request: Request, failures: FailureThreshold, on_event: OnEvent | None) -> None:
        self.request = request
        self.board = Merged(request, on_event)
        self.results: MemoryObjectReceiveStream[Trajectory] | None = None
        self.error: SkyEnvError | None = None
        self.under_way = 0
        self.idle = anyio.Event()
        self.failing = Failing(failures)
        self.again: deque[Group] = deque()
        self.over = False
        self._sender: MemoryObjectSendStream[Trajectory] | None = None
        self._fresh: Iterator[tuple[int, Task | str]] | None = enumerate(request.tasks, request.numbering.group_id)

    def next_group(self) -> Group | None:
        """The next one to hand out: one that was lost before a fresh one; None when there is none left."""
        if self.over:
            return None
        if self.again:
            return self.again.popleft()
        if self._fresh is None:
            return None
        with boundary(SkyEnvError, "tasks"):
            found = next(self._fresh, None)
        if found is None:
            self._fresh = None
            return None
        group_id, task = found
        task_id = task if isinstance(task, str) else task.task_id
        return Group(self, task_id, group_id, set(range(self.request.group_size)))

    def start(self) -> MemoryObjectReceiveStream[Trajectory]:
        """The clock runs; what comes back can be read from the stream, which ends with the run."""
        self.board.start()
        self._sender, self.results = anyio.create_memory_object_stream[Trajectory](math.inf)
        return self.results

    @property
    def unread(self) -> int:
        """How many came back that the consumer has not taken."""
        return 0 if self.results is None else self.results.statistics().current_buffer_used

    def put(self, trajectory: Trajectory) -> None:
        """For the consumer, if there still is one."""
        if self._sender is not None and self._sender.statistics().open_receive_streams:
            self._sender.send_nowait(trajectory)

    def settle(self) -> None:
        """Close the results when nothing is left, and say when nothing is held on any seat."""
        if not self.under_way and (self.over or (self._fresh is None and not self.again)):
            self.over = True
            if self._sender is not None:
                self._sender.close()
            self.idle.set()


class Dispatcher:
    """Hands groups to seats and takes back what they say or leave behind."""

    def __init__(self, max_losses: int, most_unread: int) -> None:
        self.seats: list[Seat] = []
        self.jobs: list[Job] = []
        self._max_losses, self._most_unread = max_losses, most_unread
        self._numbers = itertools.count()
        self.origin = time.time()
        self.lifelines: deque[Lifeline] = deque(maxlen=LIFELINES_KEPT)

    def add(self, job: Job) -> None:
        """Begin a run."""
        self.jobs.append(job)
        self.pump()

    def end(self, job: Job, error: SkyEnvError | None = None) -> None:
        """No more groups of this run; those on seats are cancelled. Its `idle` is set once they are freed."""
        if job not in self.jobs:
            job.idle.set()
            return
        job.error = job.error or error
        job.over = True
        job.again.clear()
        for seat in self.seats:
            for number, group in seat.groups.items():
                if group.job is job:
                    seat.tell(Cancel(number))
        self._settle(job)

    def join(self, seat: Seat) -> None:
        """A shard is up."""
        self.seats.append(seat)
        self.pump()

    def leave(self, seat: Seat, reason: str) -> None:
        """A shard is gone: its groups run again elsewhere, or end as failures when that happened too often."""
        if seat not in self.seats:
            return
        self.seats.remove(seat)
        for number in list(seat.groups):
            self._lost(self._take_off(seat, number), f"{seat.name}: {reason}")
        self.pump()

    def pump(self) -> None:
        """Hand out groups for as long as a seat has room and a run has one."""
        while self.seats:
            seat = min(self.seats, key=lambda seat: seat.samples / seat.live)
            group = self._next_group() if seat.samples < seat.live else None
            if group is None:
                return
            request, number = group.job.request, next(self._numbers)
            enough = None if request.enough is None else max(1, request.enough - group.usable)
            seat.groups[number] = group
            group.job.under_way += 1
            samples = tuple(sorted(group.missing))
            seat.tell(Portion(number, group.task_id, group.group_id, samples, enough, request.priority))

    def hear(self, seat: Seat, word: Word) -> None:
        """Take what a shard said. Of a portion that it no longer holds, nothing."""
        if isinstance(word, Beat):
            seat.beat = word
        elif isinstance(word, Lived):
            self.lifelines += (line.later(word.origin - self.origin) for line in word.lifelines)
        elif word.number in seat.groups:
            if isinstance(word, Result):
                self._deliver(seat.groups[word.number], word.trajectory)
            else:
                self._ended(self._take_off(seat, word.number), word, seat.name)

    def _next_group(self) -> Group | None:
        """Of the run with the highest priority, then the oldest, that has one and whose consumer keeps up."""
        for job in sorted(self.jobs, key=lambda job: -job.request.priority):
            if job.unread >= self._most_unread:
                continue
            try:
                group = job.next_group()
            except SkyEnvError as error:
                self.end(job, error)
                continue
            if group is not None:
                return group
            self._settle(job)
        return None

    def _take_off(self, seat: Seat, number: int) -> Group:
        group = seat.groups.pop(number)
        group.job.under_way -= 1
        return group

    def _settle(self, job: Job) -> None:
        job.settle()
        if job.over and not job.under_way and job in self.jobs:
            self.jobs.remove(job)

    def _ended(self, group: Group, end: End, name: str) -> None:
        if end.error is not None and not group.job.over:
            self.end(group.job, ConfigError(end.error) if end.config else SkyEnvError(f"{name}: {end.error}"))
        elif group.missing and not group.job.over:
            self._lost(group, f"{name}: it ended with {len(group.missing)} samples missing")
        self._settle(group.job)

    def _lost(self, group: Group, reason: str) -> None:
        """Again, or a failure for each missing sample."""
        job, group.losses = group.job, group.losses + 1
        if not job.over and group.missing:
            logger.warning("group %d (%s) lost its shard: %s", group.group_id, group.task_id, reason)
            if group.losses <= self._max_losses:
                job.again.append(group)
                job.board.retry(group.task_id, sorted(group.missing))
            else:
                for sample in sorted(group.missing):
                    self._deliver(group, _given_up(group, sample, reason))
        self._settle(job)

    def _deliver(self, group: Group, trajectory: Trajectory) -> None:
        """Once for each sample; a run that is over wants no more."""
        sample, job = trajectory.sample_index, group.job
        if sample not in group.missing or job.over:
            return
        group.missing.remove(sample)
        group.usable += trajectory.reward is not None
        if group.losses:
            trajectory.counters["shards_lost"] = group.losses
        job.put(trajectory)
        job.board.deliver(trajectory)
        too_much = job.failing.too_much(trajectory, job.board.counts)
        if too_much is not None:
            self.end(job, too_much)


def _given_up(group: Group, sample: int, reason: str) -> Trajectory:
    message = f"lost {group.losses} shards, the last one being {reason}"
    return Trajectory(
        group.task_id,
        group.group_id,
        sample,
        stop_reason=StopReason.SANDBOX_ERROR,
        failure=Failure("run", ShardLost.__name__, message[:2000]),
        attempts=group.losses,
    )
