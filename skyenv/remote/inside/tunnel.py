"""The way out of a sandbox that a node may open: a port of the loopback whose connections the node leads elsewhere.

The node asks for the next connection of a port and hands over two pipes with that request; two forked children copy
between them and the connection. Nothing here knows where it leads, and a port without a request leads nowhere.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from . import kernel
from .command import Reply
from .files import write_all

CHUNK = 1 << 16
BACKLOG = 64


class Tunnels:
    """Listening sockets by port, and who waits for their next connections. Owns both; the pipes until they are used."""

    def __init__(self, poller: select.poll, readers: dict[int, Callable[[], None]]) -> None:
        self._poller = poller
        self._readers = readers
        self._listeners: dict[int, socket.socket] = {}
        self._waiting: dict[int, deque[tuple[Reply, int, int]]] = {}

    def listen(self, port: int) -> int:
        """Listen on a port of the loopback, 0 for a free one; which one it is. Idempotent."""
        if port in self._listeners:
            return port
        listener = socket.create_server(("127.0.0.1", port), backlog=BACKLOG)
        listener.setblocking(False)
        port = listener.getsockname()[1]
        self._listeners[port], self._waiting[port] = listener, deque()
        return port

    def accept(self, port: int, reply: Reply, source: int, sink: int) -> None:
        """Reply once somebody has connected to `port`; `source` then feeds it, `sink` takes what it says."""
        waiting = self._waiting[port]
        if not waiting:
            fd = self._listeners[port].fileno()
            self._readers[fd] = partial(self._connected, port)
            self._poller.register(fd, select.POLLIN)
        waiting.append((reply, source, sink))

    def _connected(self, port: int) -> None:
        listener, waiting = self._listeners[port], self._waiting[port]
        try:
            connection, _address = listener.accept()
        except OSError:
            return
        reply, source, sink = waiting.popleft()
        if not waiting:
            self._rest(listener.fileno())
        with connection:
            _start(connection, source, sink)
        reply({}, b"")

    def _rest(self, fd: int) -> None:
        self._poller.unregister(fd)
        del self._readers[fd]

    def forget(self) -> None:
        """The node is gone: nobody waits any more."""
        for port, waiting in self._waiting.items():
            if waiting:
                self._rest(self._listeners[port].fileno())
            while waiting:
                _reply, source, sink = waiting.popleft()
                os.close(source)
                os.close(sink)


def _start(connection: socket.socket, source: int, sink: int) -> None:
    """Two children, one a direction, so that neither waits for the other."""
    fd = connection.fileno()
    try:
        for reader, writer in ((source, fd), (fd, sink)):
            if not os.fork():
                _copy_and_exit(reader, writer, connection if writer == fd else None)
    finally:
        os.close(source)
        os.close(sink)


def _copy_and_exit(reader: int, writer: int, connection: socket.socket | None) -> NoReturn:
    try:
        signal.set_wakeup_fd(-1)
        kernel.close_all_but(reader, writer)
        with contextlib.suppress(OSError):
            while data := os.read(reader, CHUNK):
                write_all(writer, data)
            if connection is not None:
                connection.shutdown(socket.SHUT_WR)
    finally:
        os._exit(0)
