"""The rollout pipeline over several processes: the same runs, sharded by whole groups.

`ShardedPipeline` keeps its shards up and hands them small portions; where they run is a transport's affair, such as
`skyenv.vector.ray`. Invariants: every requested (task, sample) comes back exactly once, with a reward or a typed
failure, whoever died meanwhile; a shard that falls silent is given up and started again; a run that ends, breaks or is
cancelled frees what it holds on every shard; leaving the pipeline's block ends the shards. Every wait has a deadline.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream

from skyenv.core import Task
from skyenv.errors import ConfigError, ShardLost, SkyEnvError, boundary
from skyenv.types import Trajectory
from skyenv.vector.background import Background
from skyenv.vector.dispatch import Announce, Cancel, Dispatcher, Job, Seat
from skyenv.vector.merged import merged_numbers
from skyenv.vector.progress import OnEvent, Progress
from skyenv.vector.request import Request
from skyenv.vector.run import TrajectoryRun
from skyenv.vector.stopping import FailureThreshold
from skyenv.vector.timeline import Lifeline
from skyenv.vector.wire import Portion, Word

logger = logging.getLogger(__name__)


class ShardLink(Protocol):
    """The near end of a running `skyenv.vector.shard.Shard`. Every method raises `ShardLost` when that is gone."""

    async def open(self) -> int:
        """See `Shard.open`."""
        ...

    async def submit(self, portion: Portion) -> None:
        """See `Shard.submit`."""
        ...

    async def cancel(self, number: int) -> None:
        """See `Shard.cancel`."""
        ...

    async def announce(self, version: int) -> None:
        """See `Shard.announce`."""
        ...

    async def step(self) -> Mapping[str, float]:
        """See `Shard.step`."""
        ...

    async def take(self, seconds: float) -> Sequence[Word]:
        """See `Shard.take`."""
        ...


StartShard = Callable[[int], AbstractAsyncContextManager[ShardLink]]
"""Starts the shard with this number; leaving the block closes it, or kills it after `ShardLost`, with a deadline."""


@dataclass(frozen=True, slots=True)
class ShardRules:
    """How many shards, and what becomes of lost ones. Seconds.

    A shard speaks at least every `beat` seconds and is lost after `silence`; it must be open within `start_timeout`.
    One that could not be started `max_starts` times in a row, `pause` apart, is given up. A group that loses its shard
    runs again on another at most `max_losses` times, then its missing samples come back as failures (`ShardLost`).
    A run ends when too many trajectories fail (`failures`), and waits for its consumer while `most_unread` trajectories
    have not been read. Cancelled groups must be freed within `cancel_timeout`.
    """

    shards: int = 2
    beat: float = 5.0
    silence: float = 60.0
    start_timeout: float = 600.0
    max_starts: int = 5
    pause: float = 2.0
    max_losses: int = 3
    cancel_timeout: float = 120.0
    most_unread: int = 1024
    failures: FailureThreshold = field(default_factory=FailureThreshold)

    def __post_init__(self) -> None:
        if min(self.shards, self.max_starts, self.most_unread) < 1 or self.max_losses < 0:
            raise ConfigError("shards, max_starts and most_unread must be at least 1, max_losses at least 0")
        if not 0 < self.beat < self.silence:
            raise ConfigError(f"beat ({self.beat:g} s) must be positive and below silence ({self.silence:g} s)")


class ShardedPipeline:
    """Use as `async with`: entering waits until the first shard is up, leaving ends all. Runs may be concurrent.

    `on_event` hears `done` and `retry`, on the event loop. Tasks travel by their id: the environments of the shards
    must know them. Entering raises ConfigError when a shard says that its configuration is wrong, and ShardLost when
    none could be started.
    """

    def __init__(self, start: StartShard, rules: ShardRules | None = None, on_event: OnEvent | None = None) -> None:
        self._start, self._rules, self._on_event = start, rules or ShardRules(), on_event
        self._dispatcher = Dispatcher(self._rules.max_losses, self._rules.most_unread)
        self._background: Background | None = None
        self._ready = anyio.Event()
        self._fatal: SkyEnvError | None = None
        self._left = self._rules.shards
        self._version: int | None = None
        self._links: dict[str, ShardLink] = {}

    async def __aenter__(self) -> Self:
        if self._background is not None:
            raise ConfigError("a sharded pipeline is entered once")
        self._background = Background(self._main, "shards")
        self._background.start()
        entered = False
        try:
            await self._ready.wait()
            if self._fatal is not None:
                raise self._fatal
            entered = True
        finally:
            if not entered:
                await self._background.stop()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._background is not None:
            self._fail(SkyEnvError("the sharded pipeline was closed"))
            await self._background.stop()

    def run(
        self,
        tasks: Iterable[Task | str],
        group_size: int = 8,
        *,
        enough: int | None = None,
        priority: int = 0,
        first_group: int = 0,
    ) -> TrajectoryRun:
        """As `skyenv.vector.pipeline.RolloutPipeline.run`, over the shards."""
        request = Request.of(tasks, group_size, enough, priority, first_group)
        return TrajectoryRun(_Share(self, Job(request, self._rules.failures, self._on_event)))

    @property
    def shards(self) -> tuple[str, ...]:
        """Names of the shards that are up."""
        return tuple(seat.name for seat in self._dispatcher.seats)

    def numbers(self) -> dict[str, float]:
        """Those of the shards that are up since each started, as they last said; merged, and `shards/up`."""
        seats = self._dispatcher.seats
        return {**merged_numbers([seat.beat.numbers for seat in seats]), "shards/up": float(len(seats))}

    async def step(self) -> dict[str, float]:
        """The same since the last call; a shard that does not answer within `beat` seconds is left out."""
        found: list[Mapping[str, float]] = []

        async def ask(name: str, link: ShardLink) -> None:
            try:
                with anyio.move_on_after(self._rules.beat):
                    found.append(await link.step())
            except ShardLost as error:
                logger.warning("%s told no numbers: %s", name, error)

        async with anyio.create_task_group() as group:
            for name, link in self._links.items():
                group.start_soon(ask, name, link)
        return {**merged_numbers(found), "shards/up": float(len(self._links))}

    @property
    def origin(self) -> float:
        """The moment from which its lifelines count, in seconds since 1970."""
        return self._dispatcher.origin

    def take_lifelines(self) -> list[Lifeline]:
        """Those of the trajectories that came back since the last call, where the meters of the shards keep a timeline.

        The last 65 536 are kept. The clocks of the shards' machines say what happened when.
        """
        taken = list(self._dispatcher.lifelines)
        self._dispatcher.lifelines.clear()
        return taken

    async def announce(self, version: int) -> None:
        """The engines sample from this policy version: every shard is told, also those that come up later."""
        self._version = version
        for seat in self._dispatcher.seats:
            seat.tell(Announce(version))

    async def _main(self) -> None:
        async with anyio.create_task_group() as group:
            for index in range(self._rules.shards):
                group.start_soon(self._keep, index)

    async def _keep(self, index: int) -> None:
        """Start the shard, again whenever it is lost, until that fails too often."""
        failed = 0
        while failed < self._rules.max_starts:
            seat = Seat(f"shard {index}", 0)
            try:
                with boundary(SkyEnvError, seat.name):
                    await self._serve(index, seat)
            except ShardLost as error:
                failed = 0 if seat.live else failed + 1
                reason: SkyEnvError = ShardLost(f"{seat.name}: {error}")
                logger.warning("%s", reason)
                await anyio.sleep(self._rules.pause)
            except SkyEnvError as error:
                self._fail(error)  # the configuration is wrong, or there is a bug: the others would say the same
                return
        self._left -= 1
        if not self._left:
            self._fail(ShardLost(f"no shard is left; {reason}"))

    def _fail(self, error: SkyEnvError) -> None:
        """Nothing runs from now on."""
        self._fatal = self._fatal or error
        for job in list(self._dispatcher.jobs):
            self._dispatcher.end(job, error)
        self._ready.set()

    async def _serve(self, index: int, seat: Seat) -> None:
        """One life of a shard. Raises what ended it."""
        reason = "it was closed"
        async with self._start(index) as link:
            try:
                seat.live = await self._open(link)
                if self._version is not None:
                    seat.tell(Announce(self._version))
                self._dispatcher.join(seat)
                self._links[seat.name] = link
                self._ready.set()
                with boundary(SkyEnvError, seat.name):
                    async with anyio.create_task_group() as group:
                        group.start_soon(self._tell, link, seat)
                        group.start_soon(self._hear, link, seat)
            except ShardLost as error:
                reason = str(error)
                raise
            finally:
                self._links.pop(seat.name, None)
                self._dispatcher.leave(seat, reason)

    async def _open(self, link: ShardLink) -> int:
        """Its live places. ConfigError is the user's; whatever else is wrong may be of that machine or moment."""
        try:
            with boundary(ShardLost, "opening"), anyio.move_on_after(self._rules.start_timeout):
                return await link.open()
        except (ConfigError, ShardLost):
            raise
        except SkyEnvError as error:
            raise ShardLost(f"{type(error).__name__}: {error}") from error
        raise ShardLost(f"it was not up within {self._rules.start_timeout:g} s")

    async def _tell(self, link: ShardLink, seat: Seat) -> None:
        while True:
            while seat.orders:
                order = seat.orders.popleft()
                with anyio.move_on_after(self._rules.silence) as wait:
                    match order:
                        case Portion():
                            await link.submit(order)
                        case Announce(version):
                            await link.announce(version)
                        case Cancel(number):
                            await link.cancel(number)
                if wait.cancelled_caught:
                    raise ShardLost(f"it took no order for {self._rules.silence:g} s")
            seat.ordered = anyio.Event()
            await seat.ordered.wait()

    async def _hear(self, link: ShardLink, seat: Seat) -> None:
        while True:
            with anyio.move_on_after(self._rules.silence) as wait:
                words = await link.take(self._rules.beat)
            if wait.cancelled_caught:
                raise ShardLost(f"it said nothing for {self._rules.silence:g} s")
            for word in words:
                self._dispatcher.hear(seat, word)
            self._dispatcher.pump()

    def _begin(self, job: Job) -> MemoryObjectReceiveStream[Trajectory]:
        if self._background is None or self._fatal is not None:
            self._dispatcher.end(job, self._fatal)
            raise self._fatal or ConfigError("use a sharded pipeline inside `async with`")
        results = job.start()
        self._dispatcher.add(job)
        return results

    async def _stop(self, job: Job) -> None:
        """Cancel what a run holds on the shards, and wait until they have freed it or are gone."""
        self._dispatcher.end(job)
        with anyio.move_on_after(self._rules.cancel_timeout, shield=True) as wait:
            await job.idle.wait()
        if wait.cancelled_caught:
            logger.warning("a cancelled run was not freed within %g s", self._rules.cancel_timeout)


class _Share:
    """One run over the shards, for its `TrajectoryRun`."""

    def __init__(self, pipeline: ShardedPipeline, job: Job) -> None:
        self._pipeline, self._job = pipeline, job

    @property
    def error(self) -> SkyEnvError | None:
        return self._job.error

    @property
    def progress(self) -> Progress:
        seats = self._pipeline._dispatcher.seats
        mine = [(seat, number) for seat in seats for number, group in seat.groups.items() if group.job is self._job]
        return self._job.board.snapshot(
            seat.beat.portions[number] for seat, number in mine if number in seat.beat.portions
        )

    @property
    def numbers(self) -> dict[str, float]:
        return self._job.board.numbers([seat.beat.numbers for seat in self._pipeline._dispatcher.seats])

    def start(self) -> MemoryObjectReceiveStream[Trajectory]:
        return self._pipeline._begin(self._job)

    def taken(self) -> None:
        self._pipeline._dispatcher.pump()

    async def stop(self) -> None:
        await self._pipeline._stop(self._job)
