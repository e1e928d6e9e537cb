"""A task beside its caller, for iterators: the one place that leaves structured concurrency, and why.

An async generator must not hold a task group or a deadline open across a `yield`: the scope would belong to whichever
task calls next, and a consumer's `break` would never close it. So the work of an iterator runs in a task of its own,
and the generator only waits for its results and stops it in `finally`. The event loop calls that `finally` when a
consumer breaks, and cancels the task when the loop ends, so the work never outlives the loop. anyio has no such task;
this module asks asyncio or trio for one and hands it nothing but a cancel scope.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anyio

from skyenv.errors import SkyEnvError, boundary


class Background:
    """Runs `work` until it returns or `stop` is awaited. Start it once; whoever started it awaits `stop`."""

    def __init__(self, work: Callable[[], Awaitable[None]], what: str) -> None:
        self.error: SkyEnvError | None = None
        self._work, self._what = work, what
        self._scope = anyio.CancelScope()
        self._ended = anyio.Event()
        self._task: Any = None

    def start(self) -> None:
        """Begin; must be called inside an event loop."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            import trio

            self._task = trio.lowlevel.spawn_system_task(self._main)
        else:
            self._task = loop.create_task(self._main())

    async def stop(self) -> None:
        """Cancel the work and wait until its cleanup is done, even while the caller itself is being cancelled."""
        if self._task is None:
            return
        self._scope.cancel()
        with anyio.CancelScope(shield=True):
            await self._ended.wait()

    async def _main(self) -> None:
        try:
            with self._scope, boundary(SkyEnvError, self._what):
                await self._work()
        except SkyEnvError as error:
            self.error = error
        finally:
            self._ended.set()
