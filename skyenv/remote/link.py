"""The node's end of the line to a sandbox whose namespaces cannot be joined.

A `Link` offers what a backend must hand out, a socket to the sandbox's init, while the init is reached over a stream
that may break: a held exec. It opens the stream, opens it again when it breaks, and keeps everything that the other
side has not had yet. Who opens the stream and what tells a broken line from a dead sandbox is the backend's business.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import anyio
from anyio.abc import ByteStream

from skyenv.errors import SandboxError, SandboxLost, SandboxUnavailable, boundary
from skyenv.remote.channel import Channel
from skyenv.remote.inside.bridge import COUNT, HELLO, Bridge, Messages, StreamError, message
from skyenv.remote.inside.keeper import EPOCH_BYTES, PING_EVERY, SILENCE
from skyenv.remote.inside.wire import Connection
from skyenv.remote.tasks import background_tasks

RETRY_FIRST, RETRY_MOST = 0.2, 5.0

OpenStream = Callable[[], AbstractAsyncContextManager[ByteStream]]
Verdict = Callable[[], Awaitable[str | None]]


@dataclass(frozen=True, slots=True)
class Line:
    """How to reach a sandbox: `open` a stream to its relay; `verdict` says why there will never be one, or None.

    `key` (32 bytes) makes a node the sandbox's node; `patience` is how many seconds the sandbox lives without one.
    """

    open: OpenStream
    verdict: Verdict
    key: bytes
    patience: float


@dataclass(slots=True)
class _Wakers:
    """Set when the bridge may have something to send."""

    event: anyio.Event = field(default_factory=anyio.Event)

    def wake(self) -> None:
        self.event.set()

    async def wait(self) -> None:
        await self.event.wait()
        self.event = anyio.Event()


class Link:
    """One sandbox's line; `run` keeps it in a task of the owner's. `socket` is for whoever asks the init."""

    def __init__(self, line: Line) -> None:
        self._line, self._epoch = line, secrets.token_bytes(EPOCH_BYTES)
        self._scope = anyio.CancelScope()
        self.socket, ours = socket.socketpair()
        self._last_words = ours.dup()
        asked, answers = socket.socketpair()
        self.service = Channel(asked)
        self._bridge = Bridge([ours, answers], passes=True)
        self._wakers = _Wakers()
        self._met = anyio.Event()
        self._trouble = "it was not reached"
        self.lost: str | None = None

    async def meet(self, timeout: float) -> None:
        """Wait for the first answer. SandboxUnavailable when there is none, SandboxLost when there will be none."""
        with anyio.move_on_after(timeout):
            await self._met.wait()
        if self.lost is not None:
            raise SandboxLost(self.lost)
        if not self._met.is_set():
            raise SandboxUnavailable(f"the sandbox did not answer within {timeout} s: {self._trouble}", 1.0)

    def close(self, reason: str) -> None:
        """End the line; whoever waits at either socket is told the reason. Idempotent."""
        self.lost = self.lost or reason
        self._scope.cancel()

    async def ask(self, op: str, fds: tuple[int, ...] = (), *, timeout: float = 30.0) -> dict[str, Any]:
        """Ask the keeper. SandboxLost when it is gone, SandboxUnavailable with its reason when it cannot."""
        frame = await self.service.request({"op": op}, fds=fds, timeout=timeout)
        if error := frame.header.get("error"):
            raise SandboxUnavailable(f"{op}: {error}")
        return frame.header

    async def run(self) -> None:
        """Keep the line until the sandbox is gone or `close` is called."""
        try:
            with self._scope:
                async with background_tasks() as group:
                    group.start_soon(self.service.serve)
                    await self._keep()
        finally:
            self._hang_up()

    async def _keep(self) -> None:
        pause, since = RETRY_FIRST, anyio.current_time()
        while self.lost is None and not self._bridge.ended:
            try:
                with boundary(SandboxUnavailable, "the line broke"):
                    async with self._line.open() as stream:
                        await self._converse(stream)
            except SandboxError as error:
                self._trouble = str(error)
            else:
                self._trouble = "the stream ended"
            if self._bridge.connected:
                pause, since = RETRY_FIRST, anyio.current_time()
            self._bridge.pause()
            self.lost = await self._line.verdict()
            if self.lost is None and anyio.current_time() - since > self._line.patience + SILENCE:
                self.lost = f"the sandbox could not be reached any more: {self._trouble}"
            await anyio.sleep(0.0 if self.lost else pause)
            pause = min(RETRY_MOST, pause * 2)

    def _hang_up(self) -> None:
        """Tell whoever holds the init's socket why it ends."""
        self.lost = self.lost or "the sandbox's first process ended"
        self._bridge.close()
        words = Connection(self._last_words)
        words.queue({"id": 0, "error": self.lost})
        try:
            words.flush()
        except OSError:
            pass
        finally:
            words.close()
        self.service.close(self.lost)
        self._met.set()

    async def _converse(self, stream: ByteStream) -> None:
        counts = COUNT.pack(self._bridge.received_count) + COUNT.pack(max(1, round(self._line.patience)))
        await stream.send(message(HELLO, 0, self._line.key + self._epoch + counts))
        async with background_tasks() as group:
            group.start_soon(self._send, stream)
            group.start_soon(self._turn)
            group.start_soon(self._ping)
            await self._receive(stream)

    async def _receive(self, stream: ByteStream) -> None:
        messages = Messages()
        while not self._bridge.ended:
            with anyio.fail_after(SILENCE):
                data = await stream.receive()
            for kind, number, payload in messages.feed(data):
                if kind == HELLO:
                    self._welcome(payload)
                else:
                    self._bridge.received(kind, number, payload)
            self._wakers.wake()
            while self._bridge.overfull:
                await anyio.wait_readable(self._bridge.fileno())
                self._bridge.turn()

    def _welcome(self, hello: bytes) -> None:
        if len(hello) != EPOCH_BYTES + COUNT.size or hello[:EPOCH_BYTES] != self._epoch:
            raise StreamError("the sandbox answered somebody else")
        self._bridge.resume(COUNT.unpack_from(hello, EPOCH_BYTES)[0])
        self._met.set()

    async def _turn(self) -> None:
        while True:
            await anyio.wait_readable(self._bridge.fileno())
            self._bridge.turn()
            self._wakers.wake()

    async def _send(self, stream: ByteStream) -> None:
        while True:
            if data := self._bridge.to_send():
                await stream.send(data)
            else:
                await self._wakers.wait()

    async def _ping(self) -> None:
        while True:
            await anyio.sleep(PING_EVERY)
            self._bridge.ping()
            self._wakers.wake()
