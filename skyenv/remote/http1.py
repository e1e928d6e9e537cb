"""HTTP/1.1 with keep-alive and nothing else: what the client, the gateway and heartbeats send their requests with.

A `Pool` owns its connections. It has no bound of its own, and taking or returning one costs the same however many there
are. A request that fails says whether it was sent; nothing is repeated here. Bodies are streamed in both directions,
so what is slow to read is slow to come, and an exchange that is left before its end closes its connection.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import anyio
import anyio.streams.tls
import httptools
from anyio.abc import ByteStream, SocketAttribute

Header = tuple[bytes, bytes]
CHUNK = 1 << 18
IDLE_SECONDS = 30.0
MAX_ANSWER_HEAD = 4 << 20


class NotSent(OSError):
    """No connection could be made: the server saw nothing of the request."""


class Broken(OSError):
    """The connection ended, or fell silent, before the answer was complete: the server may have done what was asked."""


class Origin(NamedTuple):
    """Where a server is. `address` replaces the resolved `host`, which certificates and Host headers still name."""

    secure: bool
    host: str
    port: int
    address: str = ""

    @property
    def netloc(self) -> str:
        """As in a URL and the Host header."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Request:
    """One request; `target` is path and query as they are sent. A body of unknown length is sent in chunks."""

    method: bytes
    target: bytes
    headers: Iterable[Header]
    body: bytes | AsyncIterable[bytes] = b""


class Answer:
    """A status, headers, and a body that is read while it arrives. Valid inside `Pool.exchange`."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self.status = connection.status
        self.headers = connection.headers

    @property
    def arrived(self) -> bool:
        """Whether all of the body is here, so that `read` does not wait."""
        return self._connection.complete

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body. Raises Broken when it ends too early or nothing comes for `timeout` seconds."""
        connection = self._connection
        while True:
            while connection.parts:
                yield connection.parts.popleft()
            if connection.complete:
                return
            await connection.receive()

    async def read(self) -> bytes:
        """The whole body."""
        connection = self._connection
        while not connection.complete:
            await connection.receive()
        return b"".join(connection.parts)


class _Stream(Protocol):
    """Bytes in both directions, from `anyio` or straight from a socket. `receive` raises EndOfStream at the end."""

    async def send(self, item: bytes) -> None: ...

    async def receive(self, max_bytes: int = ..., /) -> bytes: ...

    async def aclose(self) -> None: ...


class _Socket:
    """A connected socket that is asked directly: half the cost of the event loop's own streams for small messages."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock

    async def send(self, item: bytes) -> None:
        view = memoryview(item)
        while view:
            try:
                view = view[self._sock.send(view) :]
            except BlockingIOError:
                await anyio.wait_writable(self._sock)

    async def receive(self, max_bytes: int = CHUNK, /) -> bytes:
        while True:
            await anyio.wait_readable(self._sock)
            try:
                data = self._sock.recv(max_bytes)
            except BlockingIOError:
                continue
            if not data:
                raise anyio.EndOfStream
            return data

    async def aclose(self) -> None:
        self._sock.close()


class _Connection:
    """One connection, one exchange at a time. Its methods `on_*` are the parser's."""

    def __init__(self, stream: _Stream, descriptor: int) -> None:
        self._stream = stream
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)
        self._parser = httptools.HttpResponseParser(self)
        self.idle_since = 0.0
        self.timeout = 0.0
        self._begin()

    def _begin(self) -> None:
        self.status = 0
        self.headers: list[Header] = []
        self.parts: deque[bytes] = deque()
        self.has_head = self.complete = self.reusable = False
        self._measured = False
        self._head_bytes = 0

    @property
    def stale(self) -> bool:
        """Whether the server closed it, or said something that nobody asked for."""
        return bool(self._poll.poll(0))

    async def start(self, origin: Origin, request: Request, timeout: float) -> None:
        """Send a request and wait for the head of its answer."""
        self._begin()
        self.timeout = timeout
        if isinstance(request.body, bytes):
            await self._send(_head(origin, request, len(request.body)) + request.body)
        else:
            await self._send(_head(origin, request, None))
            async for part in request.body:
                if part:
                    await self._send(b"%x\r\n%b\r\n" % (len(part), part))
            await self._send(b"0\r\n\r\n")
        while not self.has_head:
            await self.receive()

    async def _send(self, data: bytes) -> None:
        try:
            with anyio.fail_after(self.timeout):
                await self._stream.send(data)
        except TimeoutError:
            raise Broken(f"the server took nothing for {self.timeout} s") from None
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError) as error:
            raise Broken(f"the connection broke while sending: {error!r}") from error

    async def receive(self) -> None:
        """Feed the parser once more."""
        try:
            with anyio.fail_after(self.timeout):
                data = await self._stream.receive(CHUNK)
            self._parser.feed_data(data)
        except anyio.EndOfStream:
            if not self.has_head or self._measured:
                raise Broken("the server closed the connection before its answer was complete") from None
            self.complete = True
        except TimeoutError:
            raise Broken(f"no answer came for {self.timeout} s") from None
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError, httptools.HttpParserError) as error:
            raise Broken(f"the connection broke: {error!r}") from error

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_ANSWER_HEAD:
            raise ValueError("the answer's headers are too large")
        self._measured = self._measured or name in (b"content-length", b"transfer-encoding")
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self.has_head = self.status >= 200

    def on_body(self, body: bytes) -> None:
        self.parts.append(body)

    def on_message_complete(self) -> None:
        if self.has_head:
            self.complete, self.reusable = True, self._parser.should_keep_alive()
        else:
            self._begin()

    async def close(self) -> None:
        """Close it at once."""
        with anyio.CancelScope() as scope:
            scope.cancel()
            await self._stream.aclose()


def _head(origin: Origin, request: Request, length: int | None) -> bytes:
    lines = [b"%b %b HTTP/1.1\r\nhost: %b\r\n" % (request.method, request.target, origin.netloc.encode())]
    lines += [b"%b: %b\r\n" % header for header in request.headers]
    lines.append(b"transfer-encoding: chunked\r\n\r\n" if length is None else b"content-length: %d\r\n\r\n" % length)
    return b"".join(lines)


class Pool:
    """Connections to any number of servers. `tls` checks the certificates of secure ones; None trusts none."""

    def __init__(self, tls: ssl.SSLContext | None = None, *, connect_timeout: float = 10.0) -> None:
        self._tls = tls
        self._connect_timeout = connect_timeout
        self._idle: dict[Origin, deque[_Connection]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_details: object) -> None:
        with anyio.CancelScope(shield=True):
            for origin in list(self._idle):
                await self.forget(origin)

    async def forget(self, origin: Origin) -> None:
        """Close the idle connections to one server."""
        for connection in self._idle.pop(origin, ()):
            await connection.close()

    @asynccontextmanager
    async def exchange(self, origin: Origin, request: Request, *, timeout: float) -> AsyncIterator[Answer]:
        """Send and wait for the head of the answer; its body is read inside the block.

        `timeout` bounds each wait for the server, in seconds. Raises NotSent or Broken. A connection whose answer was
        not read to its end is closed.
        """
        connection = await self._take(origin)
        try:
            await connection.start(origin, request, timeout)
            yield Answer(connection)
        finally:
            if connection.complete and connection.reusable:
                self._give(origin, connection)
            else:
                with anyio.CancelScope(shield=True):
                    await connection.close()

    async def _take(self, origin: Origin) -> _Connection:
        idle = self._idle.get(origin)
        oldest = anyio.current_time() - IDLE_SECONDS
        while idle:
            connection = idle.pop()
            if connection.idle_since >= oldest and not connection.stale:
                return connection
            await connection.close()
        return await self._connect(origin)

    def _give(self, origin: Origin, connection: _Connection) -> None:
        idle = self._idle.setdefault(origin, deque())
        connection.idle_since = anyio.current_time()
        idle.append(connection)

    async def _connect(self, origin: Origin) -> _Connection:
        host = origin.address or origin.host
        async with AsyncExitStack() as undo:
            try:
                with anyio.fail_after(self._connect_timeout):
                    stream: ByteStream = await anyio.connect_tcp(host, origin.port)
                    undo.push_async_callback(anyio.aclose_forcefully, stream)
                    sock = stream.extra(SocketAttribute.raw_socket)
                    if not origin.secure:
                        copy = socket.socket(fileno=os.dup(sock.fileno()))
                        return _Connection(_Socket(copy), copy.fileno())
                    else:
                        stream = await anyio.streams.tls.TLSStream.wrap(
                            stream, hostname=origin.host, ssl_context=self._tls, standard_compatible=False
                        )
            except ssl.SSLError as error:
                raise NotSent(f"TLS with {origin.netloc} failed: {error}") from error
            except (OSError, anyio.BrokenResourceError, anyio.EndOfStream) as error:
                raise NotSent(f"cannot connect to {origin.netloc}: {error or type(error).__name__}") from error
            undo.pop_all()
        return _Connection(stream, sock.fileno())
