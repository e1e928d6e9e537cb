"""What creates and destroys sandboxes. A backend knows nothing of shells, files or HTTP: it hands out a socket to an
init (`skyenv.remote.inside.init`), whatever that runs in.
"""

from __future__ import annotations

import socket
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from skyenv.errors import ConfigError
from skyenv.remote.protocol import CreateRequest


class Backend(Protocol):
    """Owns every resource of its sandboxes; all of them are gone when the block of `open` ends."""

    name: str

    def open(self) -> AbstractAsyncContextManager[None]:
        """Be ready to create sandboxes inside the block. ConfigError when this machine cannot."""
        ...

    def describe(self) -> dict[str, Any]:
        """Name, mode and active limits, for people and for `health`. Only inside `open`."""
        ...

    def environment(self, sandbox: str) -> dict[str, str]:
        """The variables that a sandbox starts with, before the request's own."""
        ...

    async def create(self, sandbox: str, request: CreateRequest) -> socket.socket:
        """Start a sandbox and return the socket to its init. SandboxUnavailable or ConfigError when it cannot."""
        ...

    async def destroy(self, sandbox: str) -> None:
        """End it and everything that runs in it at once; its files go soon after. Idempotent."""
        ...

    async def snapshot(self, sandbox: str) -> str:
        """Keep a copy of the files of a sandbox in which nothing moves."""
        ...

    async def delete_snapshot(self, snapshot: str) -> None:
        """Forget a snapshot. Idempotent."""
        ...


def get(name: str) -> Backend:
    """A backend by name. ConfigError naming the choices."""
    if name == "local":
        from skyenv.remote.backends.local import LocalBackend

        return LocalBackend()
    if name == "process":
        from skyenv.remote.backends.process import ProcessBackend

        return ProcessBackend()
    raise ConfigError(f"backend {name!r} is unknown; choose 'local' (isolated) or 'process' (isolates nothing)")
