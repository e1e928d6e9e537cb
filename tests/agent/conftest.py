"""Two file systems behind one interface: in memory for speed, a real directory for truth."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

import skyenv
from skyenv.core import SandboxProvider
from skyenv.errors import SandboxConflict, SandboxPathError
from skyenv.types import FileInfo


def refuse(code: int, path: str) -> SandboxPathError:
    return SandboxPathError(code, os.strerror(code), path)


class MemoryFiles:
    """Files as a dictionary: bytes are files, None is a directory, a string names a special kind."""

    real = False

    def __init__(self) -> None:
        self.nodes: dict[str, bytes | str | None] = {"/": None}

    def node(self, path: str) -> bytes | str | None:
        if any(len(part.encode("utf-8", "surrogateescape")) > 255 for part in path.split("/")):
            raise refuse(errno.ENAMETOOLONG, path)
        parts = path.strip("/").split("/")
        for depth in range(1, len(parts)):
            parent = "/" + "/".join(parts[:depth])
            if parent not in self.nodes:
                raise refuse(errno.ENOENT, path)
            if self.nodes[parent] is not None:
                raise refuse(errno.ENOTDIR, path)
        if path not in self.nodes:
            raise refuse(errno.ENOENT, path)
        return self.nodes[path]

    async def stat(self, path: str) -> FileInfo:
        node = self.node(path)
        kind = "dir" if node is None else "file" if isinstance(node, bytes) else "other"
        return FileInfo(path, kind, len(node or b""), 0o644)

    async def read_file(self, path: str, *, offset: int = 0, max_bytes: int | None = None) -> bytes:
        node = self.node(path)
        if node is None:
            raise refuse(errno.EISDIR, path)
        if isinstance(node, str):
            raise refuse(errno.EINVAL, path)
        return node[offset:] if max_bytes is None else node[offset : offset + max_bytes]

    async def write_file(self, path: str, data: bytes, *, expected: bytes | None = None) -> None:
        if expected is not None and self.nodes.get(path) != expected:
            raise SandboxConflict(errno.EAGAIN, "changed", path)
        self.mkdir(os.path.dirname(path))
        self.nodes[path] = bytes(data)

    async def list_dir(self, path: str, *, depth: int = 1) -> list[FileInfo]:
        if self.node(path) is not None:
            raise refuse(errno.ENOTDIR, path)
        prefix = path.rstrip("/") + "/"
        inside = [n for n in self.nodes if n.startswith(prefix) and n != path and n[len(prefix) :].count("/") < depth]
        return [await self.stat(name) for name in sorted(inside, key=os.fsencode)]

    async def remove(self, path: str) -> None:
        self.node(path)
        del self.nodes[path]

    def mkdir(self, path: str) -> None:
        parts = path.strip("/").split("/")
        for depth in range(1, len(parts) + 1 if path != "/" else 1):
            if self.nodes.setdefault("/" + "/".join(parts[:depth]), None) is not None:
                raise refuse(errno.ENOTDIR, path)

    # What a test does behind the tool's back.
    def put(self, path: str, data: bytes) -> None:
        self.mkdir(os.path.dirname(path))
        self.nodes[path] = data

    def get(self, path: str) -> bytes | None:
        node = self.nodes.get(path)
        return node if isinstance(node, bytes) else None

    def fifo(self, path: str) -> None:
        self.mkdir(os.path.dirname(path))
        self.nodes[path] = "fifo"


class DirectoryFiles:
    """Files of a real directory, as a sandbox would show them under `/`."""

    real = True

    def __init__(self, root: Path) -> None:
        self.root = root

    def host(self, path: str) -> str:
        return str(self.root) + path

    async def stat(self, path: str) -> FileInfo:
        try:
            found = os.stat(self.host(path))
        except OSError as error:
            raise refuse(error.errno or 0, path) from error
        return self.info(path, found)

    @staticmethod
    def info(path: str, found: os.stat_result) -> FileInfo:
        mode = found.st_mode
        kind = "dir" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "other"
        return FileInfo(path, "link" if stat.S_ISLNK(mode) else kind, found.st_size, mode & 0o7777)

    async def read_file(self, path: str, *, offset: int = 0, max_bytes: int | None = None) -> bytes:
        if (await self.stat(path)).kind != "file":
            raise refuse(errno.EINVAL, path)
        with open(self.host(path), "rb") as file:
            file.seek(offset)
            return file.read(-1 if max_bytes is None else max_bytes)

    async def write_file(self, path: str, data: bytes, *, expected: bytes | None = None) -> None:
        if expected is not None and await self.read_file(path) != expected:
            raise SandboxConflict(errno.EAGAIN, "changed", path)
        try:
            os.makedirs(os.path.dirname(self.host(path)), exist_ok=True)
            with open(self.host(path), "wb") as file:
                file.write(data)
        except OSError as error:
            raise refuse(errno.ENOTDIR if error.errno == errno.EEXIST else error.errno or 0, path) from error

    async def list_dir(self, path: str, *, depth: int = 1) -> list[FileInfo]:
        found: list[FileInfo] = []
        for entry in os.scandir(self.host(path)):
            name = path.rstrip("/") + "/" + entry.name
            found.append(self.info(name, entry.stat(follow_symlinks=False)))
            if depth > 1 and found[-1].kind == "dir":
                found += await self.list_dir(name, depth=depth - 1)
        return sorted(found, key=lambda info: os.fsencode(info.path))

    async def remove(self, path: str) -> None:
        os.unlink(self.host(path))

    def put(self, path: str, data: bytes) -> None:
        os.makedirs(os.path.dirname(self.host(path)), exist_ok=True)
        Path(self.host(path)).write_bytes(data)

    def get(self, path: str) -> bytes | None:
        file = Path(self.host(path))
        return file.read_bytes() if file.is_file() else None

    def mkdir(self, path: str) -> None:
        os.makedirs(self.host(path), exist_ok=True)

    def fifo(self, path: str) -> None:
        os.makedirs(os.path.dirname(self.host(path)), exist_ok=True)
        os.mkfifo(self.host(path))


@pytest.fixture(params=["memory", "directory"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> MemoryFiles | DirectoryFiles:
    return MemoryFiles() if request.param == "memory" else DirectoryFiles(tmp_path)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[SandboxProvider]:
    """One node for a module; the task that opens the client also closes it, as structured concurrency wants."""
    opened: asyncio.Future[SandboxProvider] = asyncio.get_running_loop().create_future()
    done = asyncio.Event()

    async def hold() -> None:
        async with skyenv.connect() as client:
            opened.set_result(client)
            await done.wait()

    holder = asyncio.create_task(hold())
    await asyncio.wait([holder, opened], return_when=asyncio.FIRST_COMPLETED)
    if holder.done():
        holder.result()
    yield opened.result()
    done.set()
    await holder
