"""Warm pools: sandboxes that are ready before anybody asks, one pool for each kind that was asked for in advance.

A pool never has more than its count, made and being made together, however often making one fails: a failure is tried
again later and later. One is made at a time and only while the node has room to spare, so that nobody who waits for a
sandbox waits for a pool. What is claimed belongs to who claimed it and is never handed out twice; a pool that nobody
asked for during its `keep` seconds ends with everything in it.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import anyio

from skyenv.errors import SkyEnvError
from skyenv.remote.protocol import CreateRequest
from skyenv.remote.session import Session

LOG = logging.getLogger(__name__)
TICK = 0.25
FIRST_PAUSE = 0.5
LONGEST_PAUSE = 60.0
LEASE = 5.0


def kind_of(request: CreateRequest) -> str:
    """Which requests a warm sandbox can serve: all that differ in nothing but their lease."""
    return json.dumps(request.model_dump(mode="json", exclude={"spec": {"ttl"}}), sort_keys=True)


def unclaimed(request: CreateRequest) -> CreateRequest:
    """As a warm sandbox is made: once its node is gone it ends soon, and until then it is not frozen."""
    return request.model_copy(update={"spec": request.spec.model_copy(update={"ttl": LEASE, "freeze_after": None})})


@dataclass(slots=True)
class Pool:
    """Warm sandboxes of one kind. `ready` are the oldest first."""

    request: CreateRequest
    count: int
    keep: float
    asked: float = field(default_factory=time.monotonic)
    ready: deque[Session] = field(default_factory=deque)
    failures: int = 0
    not_before: float = 0.0

    @property
    def expired(self) -> bool:
        """Whether nobody asked for so long that it ends."""
        return time.monotonic() - self.asked > self.keep

    @property
    def wants_more(self) -> bool:
        """Whether one should be made now."""
        return len(self.ready) < self.count and time.monotonic() >= self.not_before


class Pools:
    """All warm sandboxes of a node; `run` fills the pools.

    `start` makes a sandbox of a kind, `end` ends one, `room` says whether one may be made now at nobody's cost.
    """

    def __init__(
        self,
        start: Callable[[CreateRequest], Awaitable[Session]],
        end: Callable[[Session], Awaitable[None]],
        room: Callable[[], bool],
    ) -> None:
        self._start = start
        self._end = end
        self._room = room
        self._pools: dict[str, Pool] = {}
        self._wake = anyio.Event()

    def want(self, request: CreateRequest, count: int, keep: float) -> None:
        """Have so many of this kind ready from now on, until nobody asked for `keep` seconds. 0 ends the pool."""
        kind = kind_of(request)
        pool = self._pools.setdefault(kind, Pool(request, count, keep))
        pool.count, pool.keep, pool.asked, pool.not_before = count, keep, time.monotonic(), 0.0
        self._wake.set()

    def claim(self, request: CreateRequest) -> Session | None:
        """A ready sandbox for this request, or None; it is the caller's from now on."""
        pool = self._pools.get(kind_of(request)) if self._pools else None
        if pool is None:
            return None
        pool.asked = time.monotonic()
        self._wake.set()
        while pool.ready:
            session = pool.ready.popleft()
            if not session.channel.lost.is_set():
                return session
        return None

    async def make_room(self) -> None:
        """End the warm sandbox of the pool that was asked for longest ago: somebody needs its place."""
        for pool in sorted(self._pools.values(), key=lambda each: each.asked):
            if pool.ready:
                await self._end(pool.ready.popleft())
                return

    @property
    def ready(self) -> int:
        """How many are warm; their places can be had."""
        return sum(len(pool.ready) for pool in self._pools.values())

    def describe(self) -> list[dict[str, Any]]:
        """For people: what is asked for, how many are wanted and ready, how often making one failed in a row."""
        return [
            {
                "image": pool.request.image,
                "snapshot": pool.request.snapshot,
                "count": pool.count,
                "ready": len(pool.ready),
                "failures": pool.failures,
            }
            for pool in self._pools.values()
        ]

    async def run(self) -> None:
        """Fill, prune and end pools until cancelled."""
        while True:
            with anyio.move_on_after(TICK):
                await self._wake.wait()
            self._wake = anyio.Event()
            await self._prune()
            while (pool := self._neediest()) is not None and self._room():
                await self._fill(pool)

    def _neediest(self) -> Pool | None:
        wanting = [pool for pool in self._pools.values() if pool.wants_more]
        return min(wanting, key=lambda pool: len(pool.ready) / pool.count, default=None)

    async def _fill(self, pool: Pool) -> None:
        try:
            session = await self._start(unclaimed(pool.request))
        except SkyEnvError as error:
            pool.failures += 1
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(pool.failures, 16))
            pool.not_before = time.monotonic() + pause
            LOG.warning("a warm sandbox could not be made, next try in %.1f s: %s", pause, error)
            return
        pool.failures = 0
        pool.ready.append(session)

    async def _prune(self) -> None:
        for kind, pool in list(self._pools.items()):
            if pool.expired:
                pool.count = 0
            dead = [session for session in pool.ready if session.channel.lost.is_set()]
            while len(pool.ready) - len(dead) > pool.count:
                dead.append(next(session for session in pool.ready if session not in dead))
            for session in dead:
                if session in pool.ready:
                    pool.ready.remove(session)
                    await self._end(session)
            if not pool.count and not pool.ready:
                del self._pools[kind]
