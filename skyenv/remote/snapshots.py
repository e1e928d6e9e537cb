"""Snapshots of live sandboxes, as the node takes them: what must not move, and what must not get lost.

While one is taken nothing new is asked of the sandbox. One in which only an idle shell lives need not even be frozen,
and its backend may exchange the files below it; then the shell is told to find its directory again. Of a sandbox that
nobody asked anything since, another snapshot is the same one under another name, so a group of forks pays for one.
"""

from __future__ import annotations

import itertools

from skyenv.errors import ConfigError, NotCarried
from skyenv.remote.backends import Backend
from skyenv.remote.protocol import CreateRequest, SnapshotParameters
from skyenv.remote.session import Kept, Session


class Snapshots:
    """The snapshots of a node's sandboxes by the names that clients have; each name is deleted for itself."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._names: dict[str, set[str]] = {}
        self._numbers = itertools.count(1)

    async def take(self, session: Session, wanted: SnapshotParameters) -> str:
        """Take a snapshot and name it. NotCarried when something would be left behind that may not be dropped."""
        async with session.alone():
            kept = session.kept
            if kept is not None and kept.shell == wanted.shell and kept.snapshot in self._names:
                name = f"{kept.snapshot}-{next(self._numbers)}"
                self._names[kept.snapshot].add(name)
                return name
            saved = await session.save_state(wanted.shell)
            if wanted.shell and not wanted.drop and (saved.moving or saved.lost):
                raise NotCarried([*saved.moving, *saved.lost])
            if saved.moving:
                async with session.stopped():
                    snapshot = await self._backend.snapshot(session.sandbox, saved.state)
            else:
                try:
                    snapshot = await self._backend.snapshot(session.sandbox, saved.state, idle=True)
                finally:
                    await session.settle()
                if not saved.lost:
                    session.kept = Kept(snapshot, wanted.shell)
            self._names[snapshot] = {snapshot}
            return snapshot

    def find(self, name: str) -> str:
        """The backend's name of a snapshot. ConfigError when this one was deleted."""
        snapshot = name.partition("-")[0]
        if name not in self._names.get(snapshot, {name}):
            raise ConfigError(f"snapshot {name!r} does not exist on this node")
        return snapshot

    def resolved(self, request: CreateRequest) -> CreateRequest:
        """A creation with the backend's name of its snapshot. ConfigError when that was deleted."""
        if request.snapshot is None:
            return request
        return request.model_copy(update={"snapshot": self.find(request.snapshot)})

    async def forget(self, name: str) -> None:
        """Delete one name, and the snapshot with its last one. Idempotent."""
        snapshot = name.partition("-")[0]
        names = self._names.get(snapshot, set())
        names.discard(name)
        if not names:
            self._names.pop(snapshot, None)
            await self._backend.delete_snapshot(snapshot)


async def refuse_to_end(session: Session, drop: bool) -> None:
    """NotCarried when something lives in a sandbox that is about to be replaced, unless it may be dropped."""
    moving = (await session.save_state(False)).moving
    if moving and not drop:
        raise NotCarried(moving)
