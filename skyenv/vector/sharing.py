"""What the siblings of a group share of their init: one prepares, the others start from a snapshot of its sandbox.

Invariants: at most one prepares for the others at a time, and it is admitted already, so nobody waits for who waits
for him; who waits holds no slot of the init stage and waits no longer than it is told to; whoever prepares and fails
hands the task on; what was offered is freed once, by `aclose`, which the run awaits when the group is through.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio

Free = Callable[[], Awaitable[None]]


class SharedInit:
    """Of one group, on one event loop."""

    def __init__(self) -> None:
        self.snapshot: str | None = None
        self._free: Free | None = None
        self._settled = self._led = False
        self._changed = anyio.Event()

    @asynccontextmanager
    async def beginning(self, patience: float) -> AsyncIterator[SharedBeginning]:
        """One sibling's init: waits at most `patience` seconds for whoever prepares, who holds the block until then."""
        with anyio.move_on_after(patience):
            while self._led and not self._settled:
                await self._changed.wait()
        leads = not self._led and not self._settled
        self._led = self._led or leads
        try:
            yield SharedBeginning(self, leads)
        finally:
            if leads:
                self._led = False
                self._tell()

    def settle(self, snapshot: str | None, free: Free | None) -> None:
        """From now on siblings start from `snapshot`, or each alone; what was offered before stays to be freed."""
        self.snapshot, self._settled = snapshot, True
        self._free = free or self._free
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def aclose(self) -> None:
        """Free what was offered; idempotent. Raises what freeing raises."""
        free, self._free = self._free, None
        if free is not None:
            await free()


class SharedBeginning:
    """A `core.Beginning` among siblings."""

    def __init__(self, shared: SharedInit, leads: bool) -> None:
        self._shared = shared
        self._leads = leads

    @property
    def snapshot(self) -> str | None:
        """See `core.Beginning.snapshot`."""
        return self._shared.snapshot

    @property
    def wanted(self) -> bool:
        """See `core.Beginning.wanted`."""
        return self._leads

    def offer(self, snapshot: str, free: Free) -> None:
        """See `core.Beginning.offer`."""
        if not self._leads:
            raise ValueError("offer: only where it is wanted, and once")
        self._leads = False
        self._shared.settle(snapshot, free)

    def decline(self) -> None:
        """See `core.Beginning.decline`."""
        self._leads = False
        self._shared.settle(None, None)
