"""Where the next node finds a launcher whose node went away: a socket in a directory that only its owner may enter.

One node at a time: while one is there, another is told so and nothing else happens. The launcher ends a while after
the last node left, each sandbox when its own lease ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from typing import Any

from .wire import Connection

NAME = "launcher.sock"
VERSION = 1  # of what a node, a launcher and an init say to each other; a node takes over only what speaks its own
GUESTS = 16


class Doorstep:
    """The listening socket in `folder`, and who came and has not said yet what it wants."""

    def __init__(self, folder: str, patience: float, poller: select.poll) -> None:
        self.patience = patience
        self.left_at = time.monotonic()
        self._poller = poller
        self._guests: dict[int, Connection] = {}
        self._path = f"{folder}/{NAME}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        where = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(NAME, dir_fd=where)
            mask = os.umask(0o177)
            self._listener.bind(f"/proc/self/fd/{where}/{NAME}")  # the address of a socket is at most 107 bytes long
            os.umask(mask)
        finally:
            os.close(where)
        self._listener.listen(GUESTS)
        poller.register(self._listener, select.POLLIN)

    @property
    def expired(self) -> bool:
        """Whether the launcher has waited long enough for another node."""
        return time.monotonic() > self.left_at + self.patience

    def close(self) -> None:
        """Nobody can come any more."""
        self._listener.close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        for guest in self._guests.values():
            guest.close()

    def wishes(self, ready: dict[int, int]) -> list[tuple[Connection, dict[str, Any]]]:
        """Let in who knocks; returns what guests ask for. Whoever asks is a guest no longer."""
        if self._listener.fileno() in ready:
            self._welcome()
        asked = []
        for fd in [fd for fd in ready if fd in self._guests]:
            guest = self._guests[fd]
            try:
                frames = guest.receive()
            except (EOFError, ValueError, RecursionError):
                self._dismiss(fd).close()
                continue
            if frames:
                asked.append((self._dismiss(fd), frames[0].header))
        return asked

    def _welcome(self) -> None:
        with contextlib.suppress(OSError):
            sock, _address = self._listener.accept()
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            _pid, uid, _gid = struct.unpack("iII", credentials)
            if uid not in (0, os.getuid()) or len(self._guests) >= GUESTS:
                sock.close()
                return
            self._guests[sock.fileno()] = Connection(sock)
            self._poller.register(sock, select.POLLIN)

    def _dismiss(self, fd: int) -> Connection:
        self._poller.unregister(fd)
        return self._guests.pop(fd)


def objection(wish: dict[str, Any], config: dict[str, Any]) -> str:
    """Why a node cannot take over what the launcher with this configuration holds; empty when it can."""
    if wish.get("version") != VERSION:
        return "it holds sandboxes of another version of skyenv, which end within a minute or so; then start again"
    if wish.get("backend") != config["backend"]:
        return f"it holds sandboxes of backend {config['backend']!r}; use that or another directory"
    return ""
