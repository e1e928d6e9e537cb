"""Keyed calls: whoever asks with the same key waits for the same call, so nothing runs twice.

A call runs in a task of the node's. The last finished ones are kept (64 of them, 4 MiB in all), so that a lost answer
can be fetched again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import anyio
from anyio.abc import TaskGroup

from skyenv.errors import SandboxError, SandboxLost, SandboxProtocolError, SandboxUnavailable, SkyEnvError, boundary

KEPT_CALLS = 64
KEPT_BYTES = 4 << 20


class Result(NamedTuple):
    """What a call came to: small fields and raw bytes."""

    meta: dict[str, Any]
    body: bytes = b""


Work = Callable[[str], Awaitable[Result]]
"""What a call does, given its key."""


@dataclass(slots=True)
class Call:
    """One keyed call. `done` is set once `result` or `error` is."""

    done: anyio.Event = field(default_factory=anyio.Event)
    result: Result | None = None
    error: SkyEnvError | None = None

    async def run(self, key: str, work: Work) -> None:
        """Do the work and keep what it came to; never raises but on cancellation."""
        try:
            with boundary(SandboxError, "the node failed"):
                self.result = await work(key)
        except SkyEnvError as error:
            self.error = error
        finally:
            if self.result is None and self.error is None:
                self.error = SandboxLost("the node is closing")
            self.done.set()

    @property
    def was_refused(self) -> bool:
        """Whether it was refused for now or never made: asking again with its key is then a new try."""
        return isinstance(self.error, (SandboxUnavailable, SandboxProtocolError))

    async def wait(self, seconds: float) -> Result | None:
        """Its result, or None when it goes on for longer than `seconds`. Raises the call's error."""
        with anyio.move_on_after(seconds):
            await self.done.wait()
        if self.error is not None:
            raise self.error
        return self.result


class CallLog:
    """Keyed calls, running ones and the last finished ones."""

    def __init__(self, group: TaskGroup) -> None:
        self._group = group
        self._calls: OrderedDict[str, Call] = OrderedDict()

    def start(self, key: str, work: Work) -> Call:
        """The call with this key; started now if there was none."""
        call = self._calls.get(key)
        if call is None or call.was_refused:
            call = self._calls[key] = Call()
            self._calls.move_to_end(key)
            self._group.start_soon(call.run, key, work)
            self._forget()
        return call

    def find(self, key: str) -> Call | None:
        """The call with this key, if it is known."""
        return self._calls.get(key)

    def drop(self, key: str) -> None:
        """Let a finished call go: its client has the answer."""
        call = self._calls.get(key)
        if call is not None and call.done.is_set():
            del self._calls[key]

    @property
    def busy(self) -> bool:
        """Whether any call is running."""
        return any(not call.done.is_set() for call in self._calls.values())

    def _forget(self) -> None:
        count, size = 0, 0
        for key, call in reversed(list(self._calls.items())):
            if call.done.is_set():
                count, size = count + 1, size + (len(call.result.body) if call.result else 0)
                if count > KEPT_CALLS or (size > KEPT_BYTES and count > 1):
                    del self._calls[key]
