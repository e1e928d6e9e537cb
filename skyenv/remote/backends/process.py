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
from skyenv.remote.backends import launching
from skyenv.remote.backends.local import DEFAULT_ENV, spec_config
from skyenv.remote.backends.probe import own_config, state_bases
from skyenv.remote.inside import cgroups
from skyenv.remote.protocol import CreateRequest

WARNING = "isolates nothing: commands run as the current user and can change the whole machine"


class ProcessBackend:
    """See the module."""

    name = "process"

    def __init__(self) -> None:
        self._launcher: launching.Launcher | None = None
        self._state = Path()
        self._hierarchies: list[cgroups.Hierarchy] = []
        self._numbers = itertools.count()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Run a launcher."""
        self._hierarchies = await anyio.to_thread.run_sync(cgroups.find)
        self._state = await anyio.to_thread.run_sync(launching.make_state, state_bases()[0], None)
        config = {
            "isolated": False,
            "state": str(self._state),
            "base_uid": None,
            "run_as": None,
            "cgroups": self._hierarchies,
        }
        async with launching.launch(config) as self._launcher:
            yield

    def environment(self, sandbox: str) -> dict[str, str]:
        """The search path of this process and the usual defaults, nothing else of this process's environment."""
        user = os.environ.get("USER", "root")
        own = {"PATH": os.environ.get("PATH", os.defpath), "USER": user, "LOGNAME": user}
        return {**DEFAULT_ENV, **own, "HOME": str(self._state / sandbox / "upper")}

    def describe(self) -> dict[str, Any]:
        """That nothing is isolated, and which limits hold."""
        grouped = {name: f"cgroup v{each.version}" for each in self._hierarchies for name in each.controllers}
        fallback = {"memory": "rlimit", "pids": "not limited", "cpu": "affinity only", "file_size": "rlimit"}
        return {
            "backend": self.name,
            "isolated": False,
            "mode": None,
            "overlay": False,
            "limits": {**fallback, **grouped},
            "notes": [WARNING],
        }

    def _running(self) -> launching.Launcher:
        if self._launcher is None:
            raise ConfigError("the backend is not open")
        return self._launcher

    async def create(self, sandbox: str, request: CreateRequest) -> socket.socket:
        """Fork an init. ConfigError for an image or a snapshot."""
        if request.image is not None or request.snapshot is not None:
            raise ConfigError("backend 'process' has neither images nor snapshots; use 'local'")
        if request.spec.disk_bytes is not None:
            raise ConfigError("disk_bytes: backend 'process' cannot limit it; leave it out")
        top = self._state / sandbox
        config = own_config(self._state, sandbox, False) | spec_config(request.spec)
        config |= {"number": next(self._numbers), "home": f"{top}/upper", "run_dir": f"{top}/work"}
        return await self._running().create(config)

    async def destroy(self, sandbox: str) -> None:
        """Kill it with everything that it started."""
        await self._running().ask({"op": "destroy", "name": sandbox})

    async def snapshot(self, sandbox: str) -> str:
        """Not possible: ConfigError."""
        raise ConfigError("backend 'process' keeps no snapshots; use 'local'")

    async def delete_snapshot(self, snapshot: str) -> None:
        """Nothing to forget."""
