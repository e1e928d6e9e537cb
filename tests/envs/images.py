"""Container images for tests of tasks that need one: by name, made from shell commands, kept as snapshots of a node.

Where the node has a backend for images, these would come from a registry; here a named snapshot stands in for one, and
everything else (sandboxes, files, processes) is real.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from skyenv.core import Sandbox, SandboxProvider


class ImageShelf:
    """A provider that knows images by name. Made by `image_shelf`, which owns the snapshots."""

    def __init__(self, provider: SandboxProvider, images: Mapping[str, str]) -> None:
        self._provider, self._images = provider, images
        self.started: list[str | None] = []

    @asynccontextmanager
    async def sandbox(
        self,
        image: str | None = None,
        *,
        snapshot: str | None = None,
        env: Mapping[str, str] | None = None,
        **spec: Any,
    ) -> AsyncIterator[Sandbox]:
        self.started.append(image)
        source = snapshot if snapshot is not None or image is None else self._images[image]
        async with self._provider.sandbox(snapshot=source, env=env, **spec) as box:
            yield box

    async def delete_snapshot(self, snapshot: str) -> None:
        await self._provider.delete_snapshot(snapshot)


@asynccontextmanager
async def image_shelf(provider: SandboxProvider, images: Mapping[str, str]) -> AsyncIterator[ImageShelf]:
    """Build images from the commands that make them; they are gone when the block ends."""
    built: dict[str, str] = {}
    try:
        for name, commands in images.items():
            async with provider.sandbox() as box:
                result = await box.exec(commands, timeout=120.0)
                assert result.exit_code == 0, result.output
                await box.kill_processes()
                built[name] = await box.snapshot(shell=False)
        yield ImageShelf(provider, built)
    finally:
        for snapshot in built.values():
            await provider.delete_snapshot(snapshot)
