"""Snapshots of live sandboxes, as the node takes them: what must not move, and what must not get lost.

While one is taken nothing new is asked of the sandbox. One in which only an idle shell lives need not even be frozen,
and its backend may exchange the files below it; then the shell is told to find its directory again.
"""

from __future__ import annotations

from skyenv.errors import NotCarried
from skyenv.remote.backends import Backend
from skyenv.remote.protocol import SnapshotParameters
from skyenv.remote.session import Session


async def take(session: Session, backend: Backend, wanted: SnapshotParameters) -> str:
    """Take a snapshot and return its id. NotCarried when something would be left behind that may not be dropped."""
    async with session.alone():
        saved = await session.save_state(wanted.shell)
        if wanted.shell and not wanted.drop and (saved.moving or saved.lost):
            raise NotCarried([*saved.moving, *saved.lost])
        if saved.moving:
            async with session.stopped():
                return await backend.snapshot(session.sandbox, saved.state)
        try:
            return await backend.snapshot(session.sandbox, saved.state, idle=True)
        finally:
            await session.settle()


async def refuse_to_end(session: Session, drop: bool) -> None:
    """NotCarried when something lives in a sandbox that is about to be replaced, unless it may be dropped."""
    moving = (await session.save_state(False)).moving
    if moving and not drop:
        raise NotCarried(moving)
