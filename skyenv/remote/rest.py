"""Sandboxes that nobody uses and in which hardly anything moves are frozen, until something is asked of them.

A thousand idle sandboxes whose servers each wake up now and then would keep a machine busy. Work that was left in the
background goes on: what uses more than a twentieth of a processor is not idle. Where nothing counts that, a sandbox
with any process but its shell is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import anyio

from skyenv.errors import SandboxError
from skyenv.remote.backends import Backend
from skyenv.remote.session import Session

TICK = 0.5
BUSY = 0.05  # of one processor


class _Mark(NamedTuple):
    """What a sandbox had used at some moment of its idleness."""

    at: float
    cpu_seconds: float | None


async def freeze_idle(sessions: Callable[[], Iterable[Session]], backend: Backend) -> None:
    """Watch over the sandboxes until cancelled."""
    marks: dict[str, _Mark] = {}
    while True:
        await anyio.sleep(TICK)
        due = {session.sandbox: session for session in sessions() if _is_due(session)}
        marks = {sandbox: mark for sandbox, mark in marks.items() if sandbox in due}
        for sandbox, session in due.items():
            mark = marks.get(sandbox)
            try:
                if mark is None or mark.at < session.last_use or await _moves(session, backend, mark):
                    marks[sandbox] = _Mark(time.monotonic(), (await backend.stats(sandbox)).cpu_seconds)
                elif time.monotonic() - mark.at >= session.record["freeze_after"] / 2:
                    await session.freeze_when_idle()
            except SandboxError:
                continue  # it ended meanwhile, or something in it does not stop: perhaps next time


def _is_due(session: Session) -> bool:
    after: float | None = session.record["freeze_after"]
    return after is not None and not session.frozen and session.idle_seconds >= after / 2


async def _moves(session: Session, backend: Backend, mark: _Mark) -> bool:
    """Whether a command runs, or background work has used the processor since the mark."""
    if time.monotonic() - mark.at < session.record["freeze_after"] / 2:
        return False
    status = await session.status()
    used = (await backend.stats(session.sandbox)).cpu_seconds
    if used is None or mark.cpu_seconds is None:
        return bool(status["running"] or status["processes"])
    return bool(status["running"]) or used - mark.cpu_seconds > BUSY * (time.monotonic() - mark.at)
