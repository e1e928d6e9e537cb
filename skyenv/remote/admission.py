"""Who may start a sandbox now: places, a bounded queue in order of arrival, and the reasons for saying no.

An `Admission` belongs to one node. A place is held from `enter` to `leave`, whatever state the sandbox is in.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from skyenv.errors import SandboxLost, SandboxUnavailable

FULL_RETRY = 1.0
QUEUE_RETRY = 5.0
DISK_RETRY = 15.0
DRAINING_RETRY = 1.0


@dataclass(slots=True)
class _Waiter:
    name: str
    turn: anyio.Event = field(default_factory=anyio.Event)


@dataclass(slots=True)
class Admission:
    """`slots` places; at most `queue` creations wait, each for `timeout` seconds.

    Creations are refused while the file system of `disk` is more than `disk_limit` full (a share; None: never asked).
    """

    slots: int = 512
    queue: int = 1024
    timeout: float = 300.0
    disk: Path | None = None
    disk_limit: float = 0.95
    draining: bool = False
    _places: set[str] = field(default_factory=set)
    _waiters: deque[_Waiter] = field(default_factory=deque)
    _empty: anyio.Event = field(default_factory=anyio.Event)

    @property
    def used(self) -> int:
        """How many places are taken."""
        return len(self._places)

    @property
    def waiting(self) -> int:
        """How many creations wait for a place."""
        return len(self._waiters)

    async def enter(self, name: str, *, wait: bool = True) -> None:
        """Take a place, in order of arrival. SandboxUnavailable, with the reason, when there is none to be had."""
        self._refuse()
        if len(self._places) < self.slots and not self._waiters:
            self._places.add(name)
            return
        if not wait:
            raise SandboxUnavailable(f"all {self.slots} places of this node are taken", FULL_RETRY, reason="full")
        if len(self._waiters) >= self.queue:
            message = f"all {self.slots} places are taken and {self.queue} creations wait already"
            raise SandboxUnavailable(message, QUEUE_RETRY, reason="queue_full")
        await self._wait(_Waiter(name))

    async def _wait(self, waiter: _Waiter) -> None:
        self._waiters.append(waiter)
        try:
            with anyio.fail_after(self.timeout):
                await waiter.turn.wait()
        except TimeoutError:
            message = f"no place became free within {self.timeout:g} s"
            raise SandboxUnavailable(message, QUEUE_RETRY, reason="queue_timeout") from None
        except anyio.get_cancelled_exc_class():
            self.leave(waiter.name)
            raise
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
        if waiter.name not in self._places:
            self._refuse()
            raise SandboxLost(f"sandbox {waiter.name}: deleted", reason="deleted")

    def _refuse(self) -> None:
        if self.draining:
            raise SandboxUnavailable("the node is draining", DRAINING_RETRY, reason="draining")
        if self.disk is not None and _share_used(self.disk) > self.disk_limit:
            message = f"the disk of {self.disk} is more than {self.disk_limit:.0%} full"
            raise SandboxUnavailable(message, DISK_RETRY, reason="disk_full")

    def adopt(self, name: str) -> None:
        """A sandbox that was there before has a place, even if there are too many."""
        self._places.add(name)

    def pass_on(self, former: str, name: str) -> None:
        """Let a place go on under another name."""
        self._places.remove(former)
        self._places.add(name)

    def leave(self, name: str) -> None:
        """Give a place back; whoever waits longest has it now. Idempotent."""
        if name not in self._places:
            return
        self._places.remove(name)
        if self._waiters and len(self._places) < self.slots:
            waiter = self._waiters.popleft()
            self._places.add(waiter.name)
            waiter.turn.set()
        if not self._places:
            self._empty.set()
            self._empty = anyio.Event()

    def withdraw(self, name: str) -> None:
        """Who waits under this name does not want a place any more."""
        for waiter in [waiter for waiter in self._waiters if waiter.name == name]:
            self._waiters.remove(waiter)
            waiter.turn.set()

    def drain(self) -> None:
        """Let nobody in any more; who waits is told. Idempotent."""
        self.draining = True
        while self._waiters:
            self._waiters.popleft().turn.set()

    async def emptied(self, timeout: float) -> bool:
        """Wait until no place is taken; False when that takes longer than `timeout` seconds."""
        with anyio.move_on_after(timeout):
            while self._places:
                await self._empty.wait()
        return not self._places


def _share_used(path: Path) -> float:
    try:
        status = os.statvfs(path)
    except OSError:
        return 0.0  # not made yet
    used = status.f_blocks - status.f_bfree
    return used / max(1, used + status.f_bavail)
