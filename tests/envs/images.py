"""Container images for tests of tasks that need one: by name, made from shell commands, kept as snapshots of a node.

Where the node has a backend for images, these would come from a registry; here a named snapshot stands in for one, and
everything else (sandboxes, files, processes) is real.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from skyenv.core import Sandbox, SandboxProvider
from skyenv.envs.swe.sources import TreeFile, default_cache, tree_to_tar
from skyenv.envs.swe.wheels import fetch_wheels


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


Build = Callable[[Sandbox], Awaitable[None]]


@asynccontextmanager
async def image_shelf(provider: SandboxProvider, images: Mapping[str, Build]) -> AsyncIterator[ImageShelf]:
    """Build images; they are gone when the block ends."""
    built: dict[str, str] = {}
    try:
        for name, build in images.items():
            async with provider.sandbox() as box:
                await build(box)
                await box.kill_processes()
                built[name] = await box.snapshot(shell=False)
        yield ImageShelf(provider, built)
    finally:
        for snapshot in built.values():
            await provider.delete_snapshot(snapshot)


async def run(box: Sandbox, command: str) -> str:
    """Run a command that has to succeed."""
    result = await box.exec(command, timeout=400.0)
    assert result.exit_code == 0, result.output
    return result.output


async def put(box: Sandbox, top: str, files: Mapping[str, str]) -> None:
    """Write files below a directory."""
    await box.upload(top, tree_to_tar({path: TreeFile(text.encode()) for path, text in files.items()}))


async def make_repository(box: Sandbox, path: str, files: Mapping[str, str], future: Mapping[str, str]) -> None:
    """A repository as images have it: a past, a future on a branch and behind a tag, a remote, a reflog."""
    await put(box, path, {"OLD": "once upon a time\n"})
    git = "git -c user.name=a -c user.email=a@b -c commit.gpgsign=false"
    await run(box, f"cd {path} && git init -q -b main && git add -A && {git} commit -qm past && rm OLD")
    await put(box, path, files)
    await run(box, "find . -type f -exec touch {} +")
    await run(box, f"git add -A && {git} commit -qm base")
    await put(box, path, future)
    await run(box, "find . -type f -exec touch {} +")  # equal sizes and times would look unchanged
    await run(box, f"git checkout -qb future && git add -A && {git} commit -qm 'the fix' && git tag v2")
    await run(box, "git remote add origin https://localhost/calc && git checkout -q main && git pack-refs --all; cd /")


async def install_pytest(box: Sandbox, venv: str) -> None:
    """A virtual environment with pytest in it, and a console script."""
    wheels = await fetch_wheels(["pytest==8.3.5"], cache=default_cache())
    for wheel in wheels:
        await box.write_file(f"/tmp/{wheel.name}", wheel.read_bytes())
    site = f"$({venv}/bin/python -c 'import sysconfig; print(sysconfig.get_paths()[\"purelib\"])')"
    await run(box, f"python3 -m venv --without-pip {venv}")
    await run(box, f"for wheel in /tmp/*.whl; do {venv}/bin/python -m zipfile -e $wheel {site}; done; rm /tmp/*.whl")
    script = f"#!{venv}/bin/python\nimport sys\nfrom pytest import console_main\nsys.exit(console_main())\n"
    await box.write_file(f"{venv}/bin/pytest", script.encode())
    await run(box, f"chmod +x {venv}/bin/pytest")
