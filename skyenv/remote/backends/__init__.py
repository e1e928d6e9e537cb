"""What creates and destroys sandboxes. A backend knows nothing of shells, files or HTTP: it hands out a socket to an
init (`skyenv.remote.inside.init`), whatever that runs in.

A sandbox has two names. Clients know the node's; a backend knows the `sandbox` it was given at `create`, which the
node may move behind another public name (a warm sandbox that is claimed, a rollback).
"""

from __future__ import annotations

import socket
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from skyenv.errors import ConfigError
from skyenv.remote.protocol import CreateRequest
from skyenv.types import SandboxStats as Stats

__all__ = ["Backend", "Held", "Record", "Stats", "get"]

CHOICES = "choose 'local', 'oci', 'docker', 'kubernetes' or 'process' (which isolates nothing)"
Record = dict[str, Any]


class Held(NamedTuple):
    """A sandbox that outlived the node server which made it, and the record that was kept with it."""

    sandbox: str
    record: Record


class Backend(Protocol):
    """Owns every resource of its sandboxes; all of them are gone when the block of `open` ends."""

    name: str

    def open(self) -> AbstractAsyncContextManager[None]:
        """Be ready to create sandboxes inside the block. ConfigError when this machine cannot."""
        ...

    def held(self) -> list[Held]:
        """Sandboxes of a former node server with the same state directory that still live; `attach` reaches them."""
        ...

    def describe(self) -> dict[str, Any]:
        """Name, mode and active limits, for people and for `health`. Only inside `open`."""
        ...

    def environment(self, sandbox: str) -> dict[str, str]:
        """The variables that a sandbox starts with, before the request's own."""
        ...

    def images(self) -> list[str]:
        """The images from which a sandbox starts without any pull."""
        ...

    async def pull(self, image: str) -> None:
        """Make an image ready, once however many ask. ConfigError when there is none, SandboxUnavailable for now."""
        ...

    async def create(self, sandbox: str, request: CreateRequest, record: Record) -> socket.socket:
        """Start a sandbox and return the socket to its init. SandboxUnavailable or ConfigError when it cannot."""
        ...

    async def attach(self, sandbox: str) -> socket.socket:
        """A fresh socket to the init of a living sandbox; an earlier one ends. SandboxLost when there is none."""
        ...

    async def note(self, sandbox: str, record: Record) -> None:
        """Replace the record that `held` would return after a restart."""
        ...

    async def stats(self, sandbox: str) -> Stats:
        """What it uses now."""
        ...

    async def freeze(self, sandbox: str) -> None:
        """Let nothing in it run, its init included, until `thaw`. Idempotent."""
        ...

    async def thaw(self, sandbox: str) -> None:
        """Let it go on. Idempotent."""
        ...

    async def snapshot(self, sandbox: str, shell: bytes, *, idle: bool = False) -> str:
        """Keep the files of a sandbox in which nothing moves, and `shell`, an opaque state, with them.

        `idle`: it is not frozen, but only its init and an idle shell live in it, and nobody asks anything of them; the
        shell finds its directory again afterwards, so that the root below it may be exchanged.
        """
        ...

    def shell_state(self, snapshot: str) -> bytes:
        """The `shell` of a snapshot; empty when it has none or is unknown."""
        ...

    async def delete_snapshot(self, snapshot: str) -> None:
        """Forget a snapshot. Idempotent."""
        ...

    async def destroy(self, sandbox: str) -> None:
        """End it and everything that runs in it at once; its files go soon after. Idempotent."""
        ...


def get(name: str, *, image: str | None = None, state: Path | None = None, **options: Any) -> Backend:
    """A backend by name. ConfigError naming the choices.

    `image` is what sandboxes get whose request names none. With `state`, a directory, sandboxes outlive a node server
    that was killed, for the next one that has the same. `options` are the backend's own.
    """
    from skyenv.remote.backends.launching import Home

    if name == "kubernetes":
        from skyenv.remote.backends.kubernetes import KubernetesBackend
        from skyenv.remote.backends.pods import read_options

        kept = {"state": str(state / "snapshots")} if state is not None else {}
        return KubernetesBackend(read_options({"default_image": image} | kept | options))
    if options and name != "oci" and set(options) - ({"runtime"} if name == "docker" else set()):
        raise ConfigError(f"backend {name!r} has no options, but {', '.join(sorted(options))} was given")
    home = Home(state) if state is not None else None
    if name == "local":
        from skyenv.remote.backends.local import LocalBackend

        return LocalBackend(home=home)
    if name == "process":
        from skyenv.remote.backends.process import ProcessBackend

        return ProcessBackend(home)
    if name == "docker":
        from skyenv.remote.backends.docker import DockerBackend

        return DockerBackend(image, home=home, **options)
    if name == "oci":
        from skyenv.remote.backends.oci import OciBackend
        from skyenv.remote.images.settings import read_settings

        return OciBackend(image, options.pop("runtime", None), read_settings(options), home=home)
    raise ConfigError(f"backend {name!r} is unknown; {CHOICES}")
