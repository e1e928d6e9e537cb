"""Isolated sandboxes from nothing but the kernel: namespaces, an overlay, control groups. No engine, no image.

A sandbox's root is the node's skeleton, then the layers of the snapshot that it was started from, then its own
directory; the host's system directories are visible read-only. As root, snapshots are stacked as read-only layers;
rootless overlays cannot rename directories of lower layers, so there a snapshot is copied into the new sandbox
instead. A layer lives as long as a snapshot or a sandbox needs it.
"""

from __future__ import annotations

import itertools
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio.to_thread

from skyenv.errors import ConfigError
from skyenv.remote.backends import Record, launching, skeleton
from skyenv.remote.backends.probe import BASE_UID, Probe, own_config, probe, shared_config
from skyenv.remote.inside.stacks import FOLDER
from skyenv.remote.protocol import CreateRequest, Spec

__all__ = ["LocalBackend", "Probe", "probe"]

DEFAULT_ENV = {
    "HOME": "/root",
    "USER": "root",
    "LOGNAME": "root",
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "MANPAGER": "cat",
    "GIT_EDITOR": "true",
    "EDITOR": "true",
    "GIT_TERMINAL_PROMPT": "0",
    "DEBIAN_FRONTEND": "noninteractive",
    "PYTHONUNBUFFERED": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_NO_INPUT": "1",
}
NO_IMAGES = "image: backend 'local' has no images, it shows the host's system; leave image out"
SHELLS = {"bash": ["/bin/bash", "/usr/bin/bash"], "sh": ["/bin/sh"]}


def spec_config(spec: Spec) -> dict[str, Any]:
    """A spec as the launcher wants it."""
    return {
        "memory_bytes": spec.memory_bytes,
        "pids": spec.pids,
        "cpus": spec.cpus,
        "file_bytes": spec.file_bytes,
        "disk_bytes": spec.disk_bytes,
        "tmpfs_bytes": spec.tmpfs_bytes,
        "network": spec.network,
        "shells": SHELLS[spec.shell],
    }


class LocalBackend(launching.LauncherBackend):
    """See the module.

    `run_as` makes the launcher give up root for this user id first (rootless mode). With `home`, sandboxes outlive a
    node server that was killed, for the next one that has the same.
    """

    name = "local"

    def __init__(self, run_as: int | None = None, home: launching.Home | None = None) -> None:
        self._run_as = run_as
        self._home = home
        self._probe: Probe | None = None
        self._state = Path()
        self._binds: list[str] = []
        self._numbers = itertools.count()
        self._shells: dict[str, bytes] = {}

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Probe the machine and run a launcher. ConfigError with reasons when sandboxes cannot be isolated here."""
        async with launching.launch(self.name, self._prepare, self._home) as launcher:
            config = launcher.config
            self._launcher, self._state, self._binds = launcher, Path(config["state"]), config["binds"]
            self._probe = Probe.restore(config["probe"])
            await self._find_snapshots()
            yield

    async def _prepare(self) -> dict[str, Any]:
        found = await anyio.to_thread.run_sync(probe, self._run_as, self._home.path if self._home else None)
        if found.mode is None:
            raise ConfigError("this machine cannot isolate sandboxes:\n  " + "\n  ".join(found.reasons))
        owner = BASE_UID if found.mode == "root" else self._run_as
        binds = skeleton.system_binds(owner, mounted_by_root=found.mode == "root")
        state = await anyio.to_thread.run_sync(launching.make_state, found.base, self._run_as)
        await anyio.to_thread.run_sync(skeleton.build, state / "skeleton", binds, owner)
        config = shared_config(state, found.mode, found.overlay, binds, self._run_as)
        return {**config, "cgroups": [list(entry) for entry in found.cgroups], "probe": found.save()}

    async def _find_snapshots(self) -> None:
        """Those of a former node server with the same state directory."""
        for name in (await self._running.ask({"op": "snapshots"})).header["snapshots"]:
            self._shells[name] = (await self._running.ask({"op": "state", "snapshot": name})).payload

    def environment(self, sandbox: str) -> dict[str, str]:
        """What every sandbox finds in its environment."""
        return {**DEFAULT_ENV, "PATH": skeleton.search_path(self._binds)}

    def describe(self) -> dict[str, Any]:
        """Mode, limits and what is missing."""
        found = self._opened()
        return {
            "backend": self.name,
            "isolated": True,
            "mode": found.mode,
            "overlay": found.overlay,
            "limits": found.limits,
            "notes": list(found.reasons),
        }

    def _opened(self) -> Probe:
        if self._probe is None:
            raise ConfigError("the backend is not open")
        return self._probe

    @property
    def _stacked(self) -> bool:
        """Whether snapshots are stacked as layers, not copied."""
        return self._opened().mode == "root"

    def images(self) -> list[str]:
        """None: every sandbox shows the host's system."""
        return []

    async def pull(self, image: str) -> None:
        """Not possible: ConfigError."""
        raise ConfigError(NO_IMAGES)

    async def create(self, sandbox: str, request: CreateRequest, record: Record) -> socket.socket:
        """Fork a sandbox. ConfigError for an image or an unknown snapshot."""
        if request.image is not None:
            raise ConfigError(NO_IMAGES)
        return await self._fork(sandbox, request, record, {"lower": self._lower(sandbox)})

    async def _fork(self, sandbox: str, request: CreateRequest, record: Record, own: dict[str, Any]) -> socket.socket:
        """`own` is what this kind of sandbox adds to the launcher's request."""
        if request.spec.disk_bytes is not None and not self._stacked:
            raise ConfigError("disk_bytes: only a node that runs as root can limit it; leave it out")
        if request.snapshot is not None and request.snapshot not in self._shells:
            raise ConfigError(f"snapshot {request.snapshot!r} does not exist on this node")
        config = own_config(self._state, sandbox, self._opened().overlay) | spec_config(request.spec)
        config |= {"number": next(self._numbers), "snapshot": request.snapshot, **own}
        if request.snapshot is not None and not self._stacked:
            await self._copy(str(self._state / FOLDER / request.snapshot), config["upper"])
        elif not config["lower"]:
            await self._copy(str(self._state / "skeleton"), config["upper"])
        return await self._running.create(config, record)

    async def _copy(self, source: str, target: str) -> None:
        await self._running.ask({"op": "copy", "source": source, "target": target}, timeout=600.0)

    async def destroy(self, sandbox: str) -> None:
        """Kill it and let go of its layers."""
        await self._running.ask({"op": "destroy", "name": sandbox})

    def _lower(self, sandbox: str) -> list[str]:
        """What a sandbox stands on, below the layers of its snapshot."""
        lower: list[str] = own_config(self._state, sandbox, self._opened().overlay)["lower"]
        return lower

    async def snapshot(self, sandbox: str, shell: bytes, *, idle: bool = False) -> str:
        """Turn the sandbox's own directory into a layer when it is idle, else copy it into one."""
        name = secrets.token_hex(16)
        header = {"op": "snapshot", "name": sandbox, "snapshot": name, "idle": idle, "lower": self._lower(sandbox)}
        await self._running.ask(header, payload=shell, timeout=600.0)
        self._shells[name] = shell
        return name

    def shell_state(self, snapshot: str) -> bytes:
        """What `snapshot` was given."""
        return self._shells.get(snapshot, b"")

    async def delete_snapshot(self, snapshot: str) -> None:
        """Forget a snapshot; its layers go once no sandbox needs them."""
        if self._shells.pop(snapshot, None) is not None:
            await self._running.ask({"op": "forget", "snapshot": snapshot})
