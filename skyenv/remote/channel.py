"""Requests and replies over a framed socket, from the node's side: to the launcher and to each sandbox's init.

A `Channel` owns its socket. `serve` reads until the other side goes away and must run in a task of the owner's for as
long as `request` is used; what is still waiting then gets `SandboxLost`.
"""

from __future__ import annotations

import itertools
import socket
from dataclasses import dataclass, field
from typing import Any

import anyio

from skyenv.errors import SandboxLost
from skyenv.remote.inside.wire import Connection, Frame


@dataclass(slots=True)
class _Waiter:
    done: anyio.Event = field(default_factory=anyio.Event)
    frame: Frame | None = None


class Channel:
    """One side of a socket on which the other side answers numbered requests, in any order.

    The other side may be hostile: a frame that makes no sense ends the channel and nothing else.
    """

    def __init__(self, sock: socket.socket, ended: str = "the process on the other side ended") -> None:
        self._ended = ended
        self._connection = Connection(sock)
        self._waiters: dict[int, _Waiter] = {}
        self._numbers = itertools.count(1)
        self._sending = anyio.Lock()
        self._reason: str | None = None
        self.last_words = ""
        self.lost = anyio.Event()

    async def serve(self) -> None:
        """Hand replies to whoever waits for them, until the other side is gone or `close` is called."""
        try:
            while self._reason is None:
                await anyio.wait_readable(self._connection)
                for frame in self._connection.receive():
                    self._accept(frame)
        except (EOFError, OSError, ValueError, RecursionError, anyio.ClosedResourceError):
            pass
        finally:
            self.close(self._ended)

    def _accept(self, frame: Frame) -> None:
        number = frame.header.get("id")
        if number == 0:
            self._reason = self.last_words = str(frame.header.get("error"))
        waiter = self._waiters.pop(number, None) if isinstance(number, int) else None
        if waiter is not None:
            waiter.frame = frame
            waiter.done.set()

    async def request(
        self,
        header: dict[str, Any],
        payload: bytes = b"",
        fds: tuple[int, ...] = (),
        *,
        timeout: float | None = 30.0,
    ) -> Frame:
        """Send a request and wait for its reply. SandboxLost when none comes within `timeout` seconds or ever."""
        number, waiter = next(self._numbers), _Waiter()
        self._waiters[number] = waiter
        try:
            with anyio.fail_after(timeout):
                await self._send({"id": number, "fds": len(fds), **header}, payload, fds)
                await waiter.done.wait()
        except TimeoutError:
            raise SandboxLost(f"no answer to {header['op']!r} within {timeout} s") from None
        except OSError:
            raise SandboxLost(self._reason or self._ended) from None
        finally:
            self._waiters.pop(number, None)
        if waiter.frame is None:
            raise SandboxLost(self._reason or "the connection was closed")
        return waiter.frame

    async def _send(self, header: dict[str, Any], payload: bytes, fds: tuple[int, ...]) -> None:
        if self._reason is not None:
            raise SandboxLost(self._reason)
        self._connection.queue(header, payload, fds)
        async with self._sending:
            while not self._connection.flush():
                await anyio.wait_writable(self._connection)

    def close(self, reason: str) -> None:
        """Close the socket, which ends the other side; everybody who waits gets `reason`. Idempotent."""
        if self._reason is None:
            self._reason = reason
        if self.lost.is_set():
            return
        self.lost.set()
        anyio.notify_closing(self._connection)
        self._connection.close()
        for waiter in self._waiters.values():
            waiter.done.set()
