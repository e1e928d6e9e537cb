"""Images in a container engine on this machine: exported through its socket, as an archive.

Docker's API serves for podman too. DOCKER_HOST may name another Unix socket.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import anyio
import anyio.to_thread
import httpx

from skyenv.errors import ConfigError, SandboxUnavailable
from skyenv.remote.images.files import ArchiveSource
from skyenv.remote.images.manifests import Manifest
from skyenv.remote.images.references import Reference
from skyenv.remote.images.sources import Blob, Progress

CHUNK = 1 << 20


def sockets(transport: str) -> list[Path]:
    """Where an engine may listen."""
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}")
    if transport == "podman":
        return [Path("/run/podman/podman.sock"), runtime / "podman" / "podman.sock"]
    chosen = os.environ.get("DOCKER_HOST", "")
    if chosen.startswith("unix://"):
        return [Path(chosen.removeprefix("unix://"))]
    return [Path("/var/run/docker.sock"), runtime / "docker.sock"]


class EngineSource:
    """`docker-daemon:name` and `podman:name`. The export lies in `scratch`, which belongs to whoever made this."""

    def __init__(self, reference: Reference, scratch: Path, places: Sequence[Path] | None = None) -> None:
        self._what, self._name, self._scratch = str(reference), reference.path, scratch
        self._places = list(places) if places is not None else sockets(reference.transport)
        self._archive = ArchiveSource(self._what, scratch, self._name)

    async def manifest(self) -> Manifest:
        """Export the image and look into what came."""
        await self._export(await self._socket())
        return await self._archive.manifest()

    async def _socket(self) -> Path:
        for path in self._places:
            if await anyio.to_thread.run_sync(path.is_socket):
                return path
        raise ConfigError(f"image {self._what}: no engine listens at {' or '.join(map(str, self._places))}")

    async def _export(self, socket: Path) -> None:
        transport = httpx.AsyncHTTPTransport(uds=str(socket))
        try:
            async with httpx.AsyncClient(transport=transport, timeout=60.0) as http:
                async with http.stream("GET", f"http://engine/images/{self._name}/get") as response:
                    if response.status_code != 200:
                        text = (await response.aread()).decode(errors="replace")[:200]
                        raise ConfigError(f"image {self._what}: the engine answered {response.status_code}: {text}")
                    async with await anyio.open_file(self._scratch, "wb") as file:
                        async for data in response.aiter_raw(CHUNK):
                            await file.write(data)
        except httpx.TransportError as error:
            text = f"image {self._what}: the engine does not answer: {type(error).__name__}: {error}"
            raise SandboxUnavailable(text, retry_after=5.0, reason="registry") from error

    async def config(self) -> bytes:
        """What the export holds."""
        return await self._archive.config()

    async def layer(self, index: int, target: Path, progress: Progress) -> Blob:
        """Where it lies in the export."""
        return await self._archive.layer(index, target, progress)
