"""A running command: what it printed and was not returned yet, and where it is on its way to an end."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

from . import processes

INTERRUPT_GRACE = 2.0
SHELL_GRACE = 0.2
KILL_GRACE = 0.3
SWEEP = 0.05
Reply = Callable[[dict[str, Any], bytes], None]


class Capture:
    """What was printed and not returned yet: the first and the last half of at most `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.clear()

    def clear(self) -> None:
        """Forget what was returned."""
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self.total = 0

    def add(self, chunk: bytes) -> None:
        """Take in more output."""
        self.total += len(chunk)
        room = self.limit - self.limit // 2 - len(self._head)
        if room > 0:
            self._head += chunk[:room]
            chunk = chunk[room:]
        if chunk:
            self._tail.append(chunk)
            self._tail_size += len(chunk)
            while self._tail_size - len(self._tail[0]) >= self.limit // 2:
                self._tail_size -= len(self._tail.popleft())
                if not self._tail:
                    break

    def take(self) -> tuple[int, bytes]:
        """Length of the head, and head plus tail; then start anew."""
        head = len(self._head)
        kept = self.limit // 2
        tail = b"".join(self._tail)[-kept:] if kept else b""
        data = bytes(self._head) + tail
        self.clear()
        return head, data


class Running:
    """The command that the shell works on, and where it is on its way to an end."""

    def __init__(self, request: dict[str, Any], reply: Reply) -> None:
        now = time.monotonic()
        self.waiters: list[Reply] = [reply]
        self.capture = Capture(request["max_output_bytes"])
        self.started = self.printed = now
        self.deadline = now + request["timeout"]
        self.soft: float | None = request["soft_timeout"]
        self.flush: float | None = request["flush"]
        self.unsent = now  # since when there has been output that was not returned
        self.phase = "run"
        self.phase_until = 0.0
        self.timed_out = False
        self.next_sweep = 0.0
        self.interrupted: set[int] = set()
        self.known: set[int] = set()
        self.reader = self.writer = -1
        self.pid = 0  # of the command's own shell when it has a terminal

    def moments(self) -> list[float]:
        """When whoever waits is to be told that the command goes on: it fell silent, or its output waited enough."""
        found = [] if self.soft is None else [self.printed + self.soft]
        return [*found, self.unsent + self.flush] if self.flush is not None and self.capture.total else found

    def shift(self, seconds: float) -> None:
        """Everything lies so much later."""
        self.started += seconds
        self.printed += seconds
        self.unsent += seconds
        self.deadline += seconds
        self.phase_until += seconds
        self.next_sweep += seconds

    def end(self, shell: int, spared: Collection[int]) -> None:
        """Begin to end it; `sweep` goes on with that."""
        self.phase, self.phase_until = "interrupt", time.monotonic() + INTERRUPT_GRACE
        self.sweep(shell, spared)

    def sweep(self, shell: int, spared: Collection[int]) -> None:
        """Interrupt what the command started, later kill it, at last kill the shell that still waits for it."""
        now = time.monotonic()
        if self.phase == "interrupt" and now >= self.phase_until:
            self.phase, self.phase_until = "kill", now + KILL_GRACE
        if self.phase == "interrupt":
            started = processes.started_since(self.known, spared, processes.scan())
            processes.send(started - self.interrupted, signal.SIGINT)
            self.interrupted |= started
            if not started:
                self.phase_until = min(self.phase_until, now + SHELL_GRACE)
        else:
            processes.kill_all(spared, self.known)
            if shell and now >= self.phase_until:
                processes.send((shell,), signal.SIGKILL)
        self.next_sweep = now + SWEEP
