"""One version on every server: pause, deliver, resume, look whether it arrived.

A server that fails in the middle leaves the pool, and what ran on it goes to another one; the run goes on while at
least one lives. It gets work again only after it has taken the version of the day. Every update has one deadline. An
update that a server took and does not sample from is never passed over: WeightsNotVisible ends the push.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
from anyio.from_thread import BlockingPortal

from sky_trainer.rollouts import call
from sky_trainer.sync.delivery import Delivery, Server
from sky_trainer.sync.probe import Probe, Reading
from sky_trainer.sync.ranks import is_main, share
from sky_trainer.weights import WeightSyncFailed
from skyenv.engines.control import PauseMode
from skyenv.engines.openai import OpenAIEngine
from skyenv.engines.pool import EnginePool
from skyenv.errors import EngineError, EngineUnavailable, SkyEnvError, boundary

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What the last push came to. Seconds; `gap` in nats is the probe's largest, None where nothing was compared."""

    version: int
    prepare_seconds: float
    give_seconds: float
    check_seconds: float
    servers: int
    lost: int
    gap: float | None

    @property
    def seconds(self) -> float:
        """The whole push."""
        return self.prepare_seconds + self.give_seconds + self.check_seconds


@dataclass(frozen=True, slots=True)
class UpdateRules:
    """What becomes of requests under way, and the seconds that one server may take for one version."""

    pause: PauseMode = "abort"
    timeout: float = 600.0


class ServerWeights:
    """`WeightSync` over the servers of a pool; all of them are open and stay the caller's to close.

    `probe` None compares nothing. Where several ranks train, each makes one and each pushes.
    """

    def __init__(
        self,
        portal: BlockingPortal,
        pool: EnginePool,
        servers: Sequence[Server],
        delivery: Delivery,
        *,
        rules: UpdateRules | None = None,
        probe: Probe | None = None,
    ) -> None:
        self._portal, self._pool, self._servers = portal, pool, {server.url: server for server in servers}
        self._delivery, self._rules, self._probe = delivery, rules or UpdateRules(), probe
        self._version: int | None = None
        self._waiting: set[str] = set()
        self._lock = anyio.Lock()
        self.last: SyncReport | None = None
        pool.admit = self.admit

    @property
    def version(self) -> int:
        """Version of the last push; 0 before any."""
        return self._version or 0

    def push(self, version: int) -> None:
        """Bring every living server to the trainer's weights. Collective over ranks.

        WeightSyncFailed when none took them, WeightsNotVisible when one took them in vain, EngineError when they could
        not even be written; ValueError when the version goes back.
        """
        if self._version is not None and version < self._version:
            raise ValueError(f"policy version {version} after {self._version}")
        started = time.monotonic()
        failure: SkyEnvError | None = None
        readings: list[Reading] = []
        lost = 0
        try:
            self._delivery.prepare(version)
        except EngineError as error:
            failure = error
        prepared = time.monotonic()
        if is_main() and failure is None:
            try:
                readings, lost = call(self._portal, self._update, version)
            except SkyEnvError as error:
                failure = error
        readings, lost, failure = share((readings, lost, failure))
        if failure is not None:
            raise failure
        self._version = version
        given = time.monotonic()
        gap = self._probe.compare(readings, version) if self._probe is not None else None
        self._delivery.settle()
        ended = time.monotonic()
        living = len(self._servers) - lost
        self.last = SyncReport(version, prepared - started, given - prepared, ended - given, living, lost, gap)
        logger.info("version %d is on %d servers after %.2f s", version, living, self.last.seconds)

    async def admit(self, engine: OpenAIEngine) -> None:
        """Bring a server that was out to the version of the day before it gets work; EngineError keeps it out."""
        async with self._lock:
            server = self._servers.get(engine.url)
            if server is None or self._version is None:
                return
            if not self._delivery.late and server.control.version != self._version:
                self._waiting.add(server.url)
                raise EngineUnavailable(f"{server.url} gets its weights with the next update")
            if self._delivery.late:
                reading = await self._give(server, self._version)
                if reading is not None and self._probe is not None:
                    self._probe.check_again(reading, self._version)

    async def _update(self, version: int) -> tuple[list[Reading], int]:
        """Give the version to every server that is up, all at once; readings, and how many were lost or out."""
        async with self._lock:
            up = [server for url, server in self._servers.items() if self._pool.is_up(url) or url in self._waiting]
            chosen = up or list(self._servers.values())
            self._waiting.clear()
            failures: dict[str, EngineError] = {}
            readings: list[Reading] = []

            async def one(server: Server) -> None:
                try:
                    reading = await self._give(server, version)
                except EngineError as error:
                    failures[server.url] = error
                    self._pool.put_out(server.url, error)
                else:
                    readings.extend([reading] if reading is not None else [])

            async with anyio.create_task_group() as group:
                for server in chosen:
                    group.start_soon(one, server)
            if len(failures) == len(chosen):
                causes = "; ".join(f"{url}: {error}" for url, error in failures.items())
                raise WeightSyncFailed(f"no engine took version {version}: {causes}")
            self._pool.policy_version = version
            return readings, len(self._servers) - len(chosen) + len(failures)

    async def _give(self, server: Server, version: int) -> Reading | None:
        """One server takes the version and is read. EngineError of any kind: what it holds is unknown."""
        timeout = self._rules.timeout
        try:
            with anyio.fail_after(timeout), boundary(EngineError, f"{server.url} did not take version {version}"):
                async with self._held(server):
                    await self._delivery.give(server, version)
                return await self._probe.read(server) if self._probe is not None else None
        except TimeoutError as error:
            raise EngineUnavailable(f"{server.url} did not take version {version} within {timeout:g} s") from error

    @asynccontextmanager
    async def _held(self, server: Server) -> AsyncIterator[None]:
        """Generation is held during the block, and after it too when the block fails: nobody knows the weights then."""
        if self._delivery.pauses:
            await server.control.pause(self._rules.pause)
        yield
        if self._delivery.pauses:
            await server.control.resume()
