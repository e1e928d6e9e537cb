"""Frames on a stream socket: a JSON header, raw bytes, and file descriptors beside them.

Used on all three legs (node to launcher, node to init, launcher to init), so there is one codec. A `Connection` never
blocks: the owner waits until the socket is readable or writable and then calls `receive` or `flush`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

LENGTHS = struct.Struct("!II")
CHUNK = 1 << 18
MAX_FRAME = 1 << 28


class Frame(NamedTuple):
    """One message: its JSON header and its payload."""

    header: dict[str, Any]
    payload: bytes


class Connection:
    """Framed messages over a non-blocking unix stream socket that it owns.

    `receive` raises EOFError once the other side is gone. Descriptors arrive in the order in which they were sent and
    are taken with `take_fd` by whoever handles the frame that announced them.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._in = bytearray()
        self._out: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._fds: deque[int] = deque()

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self.sock.fileno()

    @property
    def pending(self) -> bool:
        """Whether `flush` has something left to send."""
        return bool(self._out)

    def queue(self, header: dict[str, Any], payload: bytes = b"", fds: tuple[int, ...] = ()) -> None:
        """Append a frame to the send queue; descriptors are duplicated here and closed once sent."""
        head = json.dumps(header).encode()
        data = b"".join((LENGTHS.pack(len(head), len(payload)), head, payload))
        self._out.append((memoryview(data), tuple(os.dup(fd) for fd in fds)))

    def flush(self) -> bool:
        """Send what the socket takes now; True when nothing is left. OSError when the other side is gone."""
        while self._out:
            view, fds = self._out[0]
            try:
                sent = socket.send_fds(self.sock, [view], list(fds)) if fds else self.sock.send(view)
            except BlockingIOError:
                return False
            for fd in fds:
                os.close(fd)
            if sent == len(view):
                self._out.popleft()
            else:
                self._out[0] = (view[sent:], ())
        return True

    def receive(self) -> list[Frame]:
        """Read once and return the frames that are complete now, perhaps none."""
        try:
            data, fds, _flags, _address = socket.recv_fds(self.sock, CHUNK, 8)
        except BlockingIOError:
            return []
        except ConnectionError:
            data, fds = b"", []
        self._fds.extend(fds)
        if not data:
            raise EOFError
        self._in += data
        return list(self._split())

    def _split(self) -> Iterator[Frame]:
        start, size = 0, len(self._in)
        while size - start >= LENGTHS.size:
            head, body = LENGTHS.unpack_from(self._in, start)
            if head + body > MAX_FRAME:
                raise EOFError
            middle = start + LENGTHS.size + head
            if size < middle + body:
                break
            header = json.loads(bytes(self._in[start + LENGTHS.size : middle]))
            if not isinstance(header, dict):
                raise EOFError
            yield Frame(header, bytes(self._in[middle : middle + body]))
            start = middle + body
        del self._in[:start]

    def take_fd(self) -> int:
        """The oldest received descriptor that nobody took yet; the caller closes it. EOFError when none came."""
        if not self._fds:
            raise EOFError
        return self._fds.popleft()

    def close(self) -> None:
        """Close the socket and every descriptor that is still queued."""
        for _view, fds in self._out:
            self._fds.extend(fds)
        while self._fds:
            with contextlib.suppress(OSError):
                os.close(self._fds.popleft())
        self._out.clear()
        self.sock.close()
