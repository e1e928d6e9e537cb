"""Keyed calls: whoever asks with the same key waits for the same call, so nothing runs twice.

A call runs in a task of the node's. The last finished ones are kept (64 of them, 4 MiB in all), so that a lost answer
can be fetched again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import anyio
from anyio.abc import TaskGroup

from skyenv.errors import SandboxError, SandboxLost, SandboxProtocolError, SandboxUnavailable, SkyEnvError, boundary
from skyenv.remote.protocol import State

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
    """One keyed call. `done` is set once `result` or `error` is; until then `state` says how far it is."""

    done: anyio.Event = field(default_factory=anyio.Event)
    result: Result | None = None
    error: SkyEnvError | None = None
    state: State = "running"
    _changed: anyio.Event = field(default_factory=anyio.Event)

    def enter(self, state: State) -> None:
        """It came to another state; whoever waits for that is told."""
        self.state = state
        self._changed.set()
        self._changed = anyio.Event()

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
            self._changed.set()

    @property
    def was_refused(self) -> bool:
        """Whether it was refused for now or never made: asking again with its key is then a new try."""
        return isinstance(self.error, (SandboxUnavailable, SandboxProtocolError))

    async def wait(self, seconds: float, known: str = "") -> Result | None:
        """Its result, or None when it goes on for longer than `seconds`. Raises the call's error.

        With `known`, a state, None comes as soon as it is in another.
        """
        with anyio.move_on_after(seconds):
            while not self.done.is_set() and known in ("", self.state):
                await self._changed.wait()
        if self.error is not None:
            raise self.error
        return self.result


class CallLog:
    """Keyed calls, running ones and the last finished ones. Every operation costs the same however many there are."""

    def __init__(self, group: TaskGroup) -> None:
        self._group = group
        self._calls: dict[str, Call] = {}
        self._finished: dict[str, int] = {}  # sizes, the oldest first
        self._kept_bytes = 0

    def start(self, key: str, work: Work) -> Call:
        """The call with this key; started now if there was none, or if that was refused for now."""
        call = self._calls.get(key)
        if call is None or call.was_refused:
            self.drop(key)
            call = self._calls[key] = Call()
            self._group.start_soon(self._run, key, call, work)
        return call

    async def _run(self, key: str, call: Call, work: Work) -> None:
        await call.run(key, work)
        if self._calls.get(key) is not call:
            return  # it was refused, and somebody asked again before this task went on
        self._finished[key] = size = len(call.result.body) if call.result else 0
        self._kept_bytes += size
        while len(self._finished) > KEPT_CALLS or (self._kept_bytes > KEPT_BYTES and len(self._finished) > 1):
            self._forget(next(iter(self._finished)))

    def find(self, key: str) -> Call | None:
        """The call with this key, if it is known."""
        return self._calls.get(key)

    def drop(self, key: str) -> None:
        """Let a finished call go: its client has the answer."""
        if key in self._finished:
            self._forget(key)

    @property
    def busy(self) -> bool:
        """Whether any call is running."""
        return len(self._calls) > len(self._finished)

    def _forget(self, key: str) -> None:
        self._kept_bytes -= self._finished.pop(key)
        del self._calls[key]
