"""Where an image comes from, behind one small interface: a manifest, a configuration and one blob a layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from skyenv.remote.images.manifests import Manifest

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Blob:
    """A layer on this machine: a part of a file. A temporary file is the reader's to delete."""

    path: Path
    offset: int
    size: int
    temporary: bool


class Source(Protocol):
    """One image. ConfigError when there is none, SandboxUnavailable when it cannot be had now."""

    async def manifest(self) -> Manifest:
        """What belongs to the image on this machine's architecture."""
        ...

    async def config(self) -> bytes:
        """Its configuration, checked against the manifest."""
        ...

    async def layer(self, index: int, target: Path, progress: Progress) -> Blob:
        """One layer; `target` is where it may be put. `progress` gets the bytes as they arrive."""
        ...
