"""Ranks that watch each other, so that none waits for ever for one that died, froze or gave up.

A collective waits for all ranks, and its own limit must be as long as the longest rollout. So every rank keeps a
connection to rank 0, over which both show a sign of life every few seconds, and say why when they end. What one rank
loses, rank 0 tells the others. A rank that hears of a loss is interrupted where it waits, and ended where even that
does not help.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from sky_trainer.supervise import interrupt_main_thread
from sky_trainer.sync.ranks import share
from skyenv.errors import SkyEnvError

GRACE = 20.0
"""Seconds that a rank has to end by itself, with its sandboxes and servers, once another is lost."""
LINE = 4096
WELL, BEAT = "well", b"beat\n"
_COLLECTIVE = re.compile(r"gloo|nccl|process ?group|tcpstore|connection (closed|reset)|broken pipe", re.IGNORECASE)


class RankLost(SkyEnvError):
    """Another process of the run died, froze or gave up; the message says which and, where it is known, why."""

    def __init__(self, cause: str) -> None:
        super().__init__(f"{cause}; start the run again, it goes on from its newest checkpoint")


@contextmanager
def watched_ranks(timeout: float) -> Iterator[None]:
    """Collective. A rank without a sign of life for `timeout` seconds ends the block on all others; 0: none is watched.

    Raises RankLost then, and in place of what collectives raise when their other end is gone.
    """
    import torch.distributed as dist

    if not timeout or not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        yield
        return
    watch = Watch(dist.get_rank(), dist.get_world_size(), timeout)
    with ExitStack() as stack:
        watch.start()
        stack.push(watch.left)
        yield


def _said(error: BaseException | None) -> str:
    if error is None:
        return WELL
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@dataclass(slots=True, eq=False)
class _Line:
    """A connection to another rank, -1 until it has said which it is. `heard`: when it last showed life."""

    connection: socket.socket
    rank: int
    heard: float = field(default_factory=time.monotonic)
    unread: bytes = b""


class Watch:
    """Signs of life of a rank, and its look at the others. Made on every rank at once; `start`, then `end`."""

    def __init__(self, rank: int, ranks: int, timeout: float) -> None:
        self._rank, self._timeout = rank, timeout
        self._missing = set(range(1, ranks)) if rank == 0 else set()
        self._begun = time.monotonic()
        self._lines: list[_Line] = []
        self._selector = selectors.DefaultSelector()
        self._leaving, self._ended, self._reason = threading.Event(), threading.Event(), WELL
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        self._listener, self._secret = self._meet()
        self.lost = ""

    def _meet(self) -> tuple[socket.socket | None, str]:
        """Rank 0 listens where the ranks met, the others connect. Collective."""
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        if self._rank == 0:
            listener, secret = _listening(host), secrets.token_hex(16)
            share((listener.getsockname()[1], secret))
            self._selector.register(listener, selectors.EVENT_READ)
            return listener, secret
        port, secret = share((0, ""))
        connection = socket.create_connection((host, port), self._timeout)
        connection.sendall(f"rank {self._rank} {secret}\n".encode())
        self._add(_Line(connection, 0))
        return None, secret

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def cause_of(self, error: BaseException) -> str:
        """Which loss an error of this rank comes from, if from any. The watch interrupts nobody from here on."""
        self._leaving.set()
        if not isinstance(error, RuntimeError | KeyboardInterrupt):
            return ""
        broken = isinstance(error, RuntimeError) and _COLLECTIVE.search(str(error)) is not None
        if broken and not self.lost:
            self._thread.join(min(self._timeout, 5.0))  # until it knows why
        return self.lost or ("another rank is gone" if broken else "")

    def left(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Of the watched block: as `__exit__`. Raises RankLost in place of what a loss led to."""
        cause = "" if error is None else self.cause_of(error)
        self.end(cause or _said(error))
        if cause:
            raise RankLost(cause) from error

    def end(self, reason: str) -> None:
        """Tell the others why, and close."""
        self._leaving.set()
        self._reason = reason
        self._ended.set()
        self._thread.join()
        for line in self._lines:
            _farewell(line.connection, reason)
        if self._listener is not None:
            self._listener.close()
        self._selector.close()

    def _run(self) -> None:
        every = min(5.0, self._timeout / 5)
        beat = 0.0
        while not self._ended.is_set() and not self.lost:
            for key, _ in self._selector.select(min(every, 0.2)):
                self._ready(key.data)
            now = time.monotonic()
            if now - beat >= every:
                beat = now
                for line in self._lines:
                    _send(line.connection, BEAT)
            self._look(now)
        if self.lost:
            self._interrupt()

    def _look(self, now: float) -> None:
        """Who has been silent for too long."""
        for line in self._lines:
            if now - line.heard > self._timeout:
                self.lost = self.lost or f"rank {line.rank} gave no sign of life for {self._timeout:g} s"
        if self._missing and now - self._begun > self._timeout:
            self.lost = self.lost or f"rank {min(self._missing)} did not come within {self._timeout:g} s"

    def _ready(self, line: _Line | None) -> None:
        if line is None:
            assert self._listener is not None
            self._add(_Line(self._listener.accept()[0], -1))
            return
        try:
            read = line.connection.recv(LINE)
        except OSError:
            read = b""
        line.heard = time.monotonic()
        *whole, line.unread = (line.unread + read).split(b"\n")
        for text in whole:
            self._heard(line, text.decode(errors="replace"))
        if (not read or len(line.unread) > LINE) and line in self._lines:
            self._drop(line)
            if line.rank >= 0:
                self.lost = self.lost or f"rank {line.rank} died"

    def _heard(self, line: _Line, text: str) -> None:
        if line.rank < 0:
            _, number, secret = [*text.split(" "), "", ""][:3]
            if number.isdigit() and hmac.compare_digest(secret.encode(), self._secret.encode()):
                line.rank = int(number)
                self._missing.discard(line.rank)
            else:
                self._drop(line)
        elif text.startswith("end "):
            self._drop(line)
            reason = text.removeprefix("end ")
            if reason != WELL:
                relayed = reason.startswith("rank ")  # of another rank, which rank 0 lost
                self.lost = self.lost or (reason if relayed else f"rank {line.rank} ended with {reason}")

    def _add(self, line: _Line) -> None:
        line.connection.setblocking(False)
        self._lines.append(line)
        self._selector.register(line.connection, selectors.EVENT_READ, line)

    def _drop(self, line: _Line) -> None:
        self._lines.remove(line)
        self._selector.unregister(line.connection)
        line.connection.close()

    def _interrupt(self) -> None:
        """End the main thread, which may be on its way already, or sit in a collective where nothing reaches it."""
        if self._leaving.wait(1.0):
            return
        interrupt_main_thread()
        if not self._leaving.wait(GRACE):
            for line in self._lines:
                _farewell(line.connection, self.lost)
            sys.stderr.write(f"sky_trainer: {RankLost(self.lost)}\n")
            sys.stderr.flush()
            os._exit(1)


def _listening(host: str) -> socket.socket:
    """On a free port of this address; of all where it is a name for this machine that it does not have itself."""
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    try:
        return socket.create_server((host, 0), family=family)
    except OSError:
        return socket.create_server(("", 0), family=family)


def _send(connection: socket.socket, data: bytes) -> None:
    """What cannot be sent is no sign of life; the other end notices."""
    try:
        connection.send(data)
    except OSError:
        return


def _farewell(connection: socket.socket, reason: str) -> None:
    """Say why and close; what is unread is read first, or the words would be lost with it."""
    _send(connection, f"end {' '.join(reason.split())[: LINE // 2]}\n".encode())
    try:
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(1.0)
        while connection.recv(LINE):
            pass
    except OSError:
        pass
    connection.close()
