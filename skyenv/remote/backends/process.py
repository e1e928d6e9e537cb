"""Plain processes, for machines without namespaces. It isolates nothing: commands run as the current user and see and
change the whole machine. It must be asked for by name.

Same init, same shell protocol, same limits where control groups allow; each sandbox starts in a directory of its own,
and what it started is killed with it. There are no snapshots, because files are not the sandbox's own.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio.to_thread

from skyenv.errors import ConfigError
from skyenv.remote.backends import Record, launching
from skyenv.remote.backends.local import DEFAULT_ENV, spec_config
from skyenv.remote.backends.probe import grouped_by, own_config, state_bases
from skyenv.remote.inside import cgroups
from skyenv.remote.protocol import CreateRequest

NOTHING_KEPT = "backend 'process' has neither images nor snapshots; use 'local'"
WARNING = "isolates nothing: commands run as the current user and can change the whole machine"


class ProcessBackend(launching.LauncherBackend):
    """See the module."""

    name = "process"

    def __init__(self, home: launching.Home | None = None) -> None:
        self._home = home
        self._state = Path()
        self._hierarchies: list[cgroups.Hierarchy] = []
        self._numbers = itertools.count()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Run a launcher."""
        async with launching.launch(self.name, self._prepare, self._home) as launcher:
            self._launcher, self._state = launcher, Path(launcher.config["state"])
            self._hierarchies = [cgroups.Hierarchy(*each) for each in launcher.config["cgroups"]]
            yield

    async def _prepare(self) -> dict[str, Any]:
        base = state_bases(self._home.path if self._home else None)[0]
        return {
            "isolated": False,
            "state": str(await anyio.to_thread.run_sync(launching.make_state, base, None)),
            "base_uid": None,
            "run_as": None,
            "cgroups": await anyio.to_thread.run_sync(cgroups.find),
        }

    def environment(self, sandbox: str) -> dict[str, str]:
        """The search path of this process and the usual defaults, nothing else of this process's environment."""
        user = os.environ.get("USER", "root")
        own = {"PATH": os.environ.get("PATH", os.defpath), "USER": user, "LOGNAME": user}
        return {**DEFAULT_ENV, **own, "HOME": str(self._state / sandbox / "upper")}

    def describe(self) -> dict[str, Any]:
        """That nothing is isolated, and which limits hold."""
        fallback = {"memory": "rlimit", "pids": "not limited", "cpu": "affinity only", "file_size": "rlimit"}
        fallback["freezer"] = "signals"
        return {
            "backend": self.name,
            "isolated": False,
            "mode": None,
            "overlay": False,
            "limits": fallback | grouped_by(self._hierarchies),
            "notes": [WARNING],
        }

    def images(self) -> list[str]:
        """None: every sandbox shows this machine."""
        return []

    async def pull(self, image: str) -> None:
        """Not possible: ConfigError."""
        raise ConfigError(NOTHING_KEPT)

    async def create(self, sandbox: str, request: CreateRequest, record: Record) -> socket.socket:
        """Fork an init. ConfigError for an image or a snapshot."""
        if request.image is not None or request.snapshot is not None:
            raise ConfigError(NOTHING_KEPT)
        if request.spec.disk_bytes is not None:
            raise ConfigError("disk_bytes: backend 'process' cannot limit it; leave it out")
        top = self._state / sandbox
        config = own_config(self._state, sandbox, False) | spec_config(request.spec)
        config |= {"number": next(self._numbers), "home": f"{top}/upper", "run_dir": f"{top}/work"}
        return await self._running.create(config, record)

    async def destroy(self, sandbox: str) -> None:
        """Kill it with everything that it started."""
        await self._running.ask({"op": "destroy", "name": sandbox})

    async def snapshot(self, sandbox: str, shell: bytes, *, idle: bool = False) -> str:
        """Not possible: ConfigError."""
        raise ConfigError(NOTHING_KEPT)

    def shell_state(self, snapshot: str) -> bytes:
        """There is none."""
        return b""

    async def delete_snapshot(self, snapshot: str) -> None:
        """Nothing to forget."""
