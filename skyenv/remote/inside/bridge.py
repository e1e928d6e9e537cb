"""Unix sockets, and the descriptors passed over them, carried over any two-way stream of bytes.

Both ends run the same class: one beside the node, one beside an init whose namespaces nobody can enter. A descriptor
that arrives on a socket here becomes a pipe over there: bytes follow it under a credit, so a large file neither fills
memory nor holds up a request. The stream may break at any time. What it carries is numbered and kept until the other
side has it, so two ends that meet again on a new stream go on where they were, and nothing is lost or said twice.

An end owns its sockets, its pipes and its epoll; whoever drives it owns the stream.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence

HEADER = struct.Struct("!BII")
COUNT = struct.Struct("!Q")
HELLO, ACK, PING, BYTES, OPEN, DATA, END, STOP, MORE = range(1, 10)
_NUMBERED = frozenset((BYTES, OPEN, DATA, END, STOP, MORE))
WINDOW = 1 << 20
CHUNK = 1 << 16
MAX_MESSAGE = 1 << 20
KEPT = 4 << 20


class StreamError(ValueError):
    """The other side sent something that no end of ours sends."""


class _Port:
    """One local descriptor. `credit` is how much may still be read from it, None for a socket (never limited)."""

    __slots__ = ("credit", "ending", "events", "fd", "pending", "reads", "sock", "waiting_bytes", "waiting_fds")

    def __init__(self, fd: int, *, reads: bool, credit: int | None = None, sock: socket.socket | None = None) -> None:
        self.fd, self.reads, self.credit, self.sock = fd, reads, credit, sock
        self.pending: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self.waiting_bytes = 0
        self.waiting_fds: list[int] = []
        self.ending = False
        self.events = -1


class Messages:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._in = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, int, bytes]]:
        """Kind, port and payload of each message that is complete now. StreamError for nonsense."""
        self._in += data
        start = 0
        while len(self._in) - start >= HEADER.size:
            kind, number, size = HEADER.unpack_from(self._in, start)
            if size > MAX_MESSAGE:
                raise StreamError(f"a message of {size} bytes")
            end = start + HEADER.size + size
            if len(self._in) < end:
                break
            yield kind, number, bytes(self._in[start + HEADER.size : end])
            start = end
        del self._in[:start]


def message(kind: int, number: int = 0, payload: bytes = b"") -> bytes:
    """One message as it travels."""
    return HEADER.pack(kind, number, len(payload)) + payload


class Bridge:
    """One end. `passes` is true where descriptors come from (beside the node), false where they go to; what the
    other kind sends is never obeyed.

    Call `turn` when `fileno` is readable, `received` with what the stream brought (not while `overfull`), and send
    what `to_send` returns.
    """

    def __init__(self, sockets: Sequence[socket.socket], *, passes: bool) -> None:
        self._passes = passes
        self._epoll = select.epoll()
        self._ports: dict[int, _Port] = {}
        self._next = len(sockets)
        self._out = bytearray()
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self._counts = {"received": 0, "acknowledged": 0, "forgotten": 0}
        self.connected = False
        for number, sock in enumerate(sockets):
            sock.setblocking(False)
            self._add(number, _Port(sock.fileno(), reads=True, sock=sock))

    def fileno(self) -> int:
        """A descriptor that is readable whenever `turn` has something to do."""
        return self._epoll.fileno()

    @property
    def received_count(self) -> int:
        """How many numbered messages came so far; the other side is told on meeting again."""
        return self._counts["received"]

    @property
    def ended(self) -> bool:
        """Whether the first socket is gone on either side."""
        return 0 not in self._ports

    @property
    def overfull(self) -> bool:
        """Whether so much waits for local sockets that nothing more should be received before `turn`."""
        return any(port.sock is not None and port.waiting_bytes > KEPT for port in self._ports.values())

    # The stream.

    def resume(self, count: int) -> None:
        """A stream is there again and the other side has had `count` messages: send the rest once more."""
        self._forget(count)
        self.connected = True
        self._out = bytearray(b"".join(self._kept))
        self._refresh_all()

    def pause(self) -> None:
        """The stream broke; local reads go on until enough is kept."""
        self.connected = False
        self._out.clear()

    def to_send(self) -> bytes:
        """What the stream should carry next; perhaps nothing."""
        if not self.connected:
            return b""
        if self._counts["received"] != self._counts["acknowledged"]:
            self._counts["acknowledged"] = self._counts["received"]
            self._out += message(ACK, payload=COUNT.pack(self._counts["received"]))
        data = bytes(self._out)
        self._out.clear()
        return data

    def ping(self) -> None:
        """Say that this side lives."""
        if self.connected:
            self._out += message(PING)

    def received(self, kind: int, number: int, payload: bytes) -> None:
        """Take one message of the stream. StreamError for nonsense."""
        if kind in _NUMBERED:
            self._counts["received"] += 1
            self._accept(kind, number, payload)
        elif kind == ACK:
            self._forget(COUNT.unpack(payload)[0])
        elif kind != PING:
            raise StreamError(f"message of kind {kind}")

    def _forget(self, count: int) -> None:
        if not 0 <= count - self._counts["forgotten"] <= len(self._kept):
            raise StreamError(f"{count} messages are said to have arrived")
        full = self._full
        while self._counts["forgotten"] < count:
            self._kept_bytes -= len(self._kept.popleft())
            self._counts["forgotten"] += 1
        if full and not self._full:
            self._refresh_all()

    @property
    def _full(self) -> bool:
        return self._kept_bytes > KEPT

    def _send(self, kind: int, number: int, payload: bytes = b"") -> None:
        was_full = self._full
        data = message(kind, number, payload)
        self._kept.append(data)
        self._kept_bytes += len(data)
        if self.connected:
            self._out += data
        if self._full and not was_full:
            self._refresh_all()

    def _accept(self, kind: int, number: int, payload: bytes) -> None:
        if kind == OPEN:
            self._open(number, payload)
            return
        port = self._ports.get(number)
        if port is None:
            return
        if kind in (BYTES, DATA):
            fds, port.waiting_fds = tuple(port.waiting_fds), []
            port.pending.append((payload, fds))
            port.waiting_bytes += len(payload)
            if port.sock is None and port.waiting_bytes > WINDOW:
                raise StreamError(f"pipe {number} brings more than was granted")
            self._flush(number, port)
        elif kind == END:
            port.ending = True
            self._flush(number, port)
        elif kind == STOP:
            self._drop(number)
        elif port.credit is not None:
            port.credit += COUNT.unpack(payload)[0]
            self._refresh(port)

    def _open(self, number: int, payload: bytes) -> None:
        """The other side got a descriptor: make a pipe, keep one end, pass the other on with the next bytes."""
        over, reads = payload[0], payload[1:] == b"r"
        carrier = self._ports.get(over)
        if self._passes or number in self._ports or carrier is None or carrier.sock is None:
            raise StreamError(f"pipe {number} cannot be opened")
        reader, writer = os.pipe()
        carrier.waiting_fds.append(reader if reads else writer)
        kept = writer if reads else reader
        os.set_blocking(kept, False)
        self._add(number, _Port(kept, reads=not reads, credit=WINDOW))

    # The local side.

    def turn(self) -> None:
        """Move what the local descriptors have or take now."""
        by_fd = {port.fd: number for number, port in self._ports.items()}
        for fd, events in self._epoll.poll(0):
            number = by_fd.get(fd, -1)
            port = self._ports.get(number)
            if port is not None and port.fd == fd:
                self._ready(number, port, events)

    def _ready(self, number: int, port: _Port, events: int) -> None:
        if events & select.EPOLLOUT:
            self._flush(number, port)
        if number not in self._ports:
            return
        if port.sock is not None and events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
            self._read_socket(number, port)
        elif port.reads and events & (select.EPOLLIN | select.EPOLLHUP):
            self._read_pipe(number, port)
        elif events & select.EPOLLERR:
            self._send(STOP, number)
            self._drop(number)

    def _read_socket(self, number: int, port: _Port) -> None:
        if port.sock is None:
            return
        try:
            data, fds, _flags, _address = socket.recv_fds(port.sock, CHUNK, 8)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        for fd in fds:
            self._adopt(number, fd)
        if data:
            self._send(BYTES, number, data)
        else:
            self._send(END, number)
            self._drop(number)

    def _adopt(self, over: int, fd: int) -> None:
        """A descriptor came over a local socket: tell the other side and follow it."""
        if not self._passes:
            os.close(fd)
            return
        reads = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        os.set_blocking(fd, False)
        number, self._next = self._next, self._next + 1
        self._send(OPEN, number, bytes((over,)) + (b"r" if reads else b"w"))
        self._add(number, _Port(fd, reads=reads, credit=WINDOW))

    def _read_pipe(self, number: int, port: _Port) -> None:
        try:
            data = os.read(port.fd, min(CHUNK, port.credit or 0))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            port.credit = (port.credit or 0) - len(data)
            self._send(DATA, number, data)
            self._refresh(port)
        else:
            self._send(END, number)
            self._drop(number)

    def _flush(self, number: int, port: _Port) -> None:
        """Write what waits for a local descriptor, as far as it takes it; grant as much again."""
        done = 0
        try:
            while port.pending:
                data, fds = port.pending[0]
                sent = self._write(port, data, fds)
                for fd in fds:
                    os.close(fd)
                done += sent
                port.waiting_bytes -= sent
                if sent == len(data):
                    port.pending.popleft()
                else:
                    port.pending[0] = (data[sent:], ())
        except BlockingIOError:
            pass
        except OSError:
            self._send(STOP if port.sock is None else END, number)
            self._drop(number)
            return
        if done and port.sock is None:
            self._send(MORE, number, COUNT.pack(done))
        if port.ending and not port.pending:
            self._drop(number)
        else:
            self._refresh(port)

    def _write(self, port: _Port, data: bytes, fds: tuple[int, ...]) -> int:
        if port.sock is None:
            return os.write(port.fd, data)
        return socket.send_fds(port.sock, [data], list(fds)) if fds else port.sock.send(data)

    def _add(self, number: int, port: _Port) -> None:
        self._ports[number] = port
        self._refresh(port)

    def _refresh(self, port: _Port) -> None:
        """Wait for exactly what can be used: a reader without credit is not watched at all."""
        events = select.EPOLLOUT if port.pending else 0
        if port.reads and not self._full and (port.credit is None or port.credit > 0):
            events |= select.EPOLLIN
        if port.reads and not events:
            events = -1
        if events == port.events:
            return
        if port.events == -1:
            self._epoll.register(port.fd, events)
        elif events == -1:
            self._epoll.unregister(port.fd)
        else:
            self._epoll.modify(port.fd, events)
        port.events = events

    def _refresh_all(self) -> None:
        for port in self._ports.values():
            self._refresh(port)

    def _drop(self, number: int) -> None:
        port = self._ports.pop(number)
        if port.events != -1:
            self._epoll.unregister(port.fd)
        for fd in (*port.waiting_fds, *(fd for _data, fds in port.pending for fd in fds)):
            with contextlib.suppress(OSError):
                os.close(fd)
        if port.sock is not None:
            port.sock.close()
        else:
            os.close(port.fd)

    def close(self) -> None:
        """Close every descriptor. Idempotent."""
        for number in list(self._ports):
            self._drop(number)
        self._epoll.close()
