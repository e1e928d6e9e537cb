"""Our editors on the conformance rows: over any files, and over those of a sandbox."""

from __future__ import annotations

import shlex
from typing import Any

from skyenv.core import FileOps, Sandbox, Tool
from skyenv.errors import SandboxPathError
from skyenv.testing.editor_rows import Answer, Row, Step
from skyenv.tools import check_arguments
from skyenv.types import FileInfo


class EditorDesk:
    """A `Desk` of one editor tool, below `root` of some files. Arguments are checked first, as an environment does."""

    def __init__(self, tool: Tool, files: FileOps, root: str) -> None:
        self._tool = tool
        self._files = files
        self._root = root

    async def call(self, step: Step) -> Answer:
        """Make one call, or write what the step says."""
        path = step.path if step.raw else place(self._root, step.path)
        if step.write is not None:
            await self._files.write_file(path, step.write)
            return Answer("", False)
        files = self._files if step.race is None else _Raced(self._files, path, step.race)
        arguments = {"command": step.command, "path": path, **step.arguments}
        checked = check_arguments(self._tool.spec, arguments)
        if isinstance(checked, str):
            return Answer(checked, True)
        text = await self._tool.run(checked, files)  # type: ignore[arg-type]
        return Answer(text, text.startswith("ERROR"))

    async def get(self, path: str) -> bytes | None:
        """Bytes of a file; None when there is none."""
        try:
            return await self._files.read_file(place(self._root, path))
        except SandboxPathError:
            return None

    async def mode(self, path: str) -> int | None:
        """Mode bits of a file."""
        return (await self._files.stat(place(self._root, path))).mode & 0o7777


class _Raced:
    """Files that somebody else writes to as soon as they were read once."""

    def __init__(self, files: FileOps, path: str, data: bytes) -> None:
        self._files, self._path, self._data = files, path, data

    async def read_file(self, path: str, **options: Any) -> bytes:
        found = await self._files.read_file(path, **options)
        await self._files.write_file(self._path, self._data)
        return found

    async def stat(self, path: str) -> FileInfo:
        return await self._files.stat(path)

    async def write_file(self, path: str, data: bytes, *, expected: bytes | None = None) -> None:
        await self._files.write_file(path, data, expected=expected)


def place(root: str, path: str) -> str:
    """Where a row's path lies below the work directory."""
    return root if path == "." else f"{root}/{path}"


async def prepare(row: Row, sandbox: Sandbox, root: str) -> None:
    """Make the files of a row in a sandbox."""
    folders = [root, *(place(root, path) for path, data in row.files.items() if data is None)]
    commands = ["mkdir -p " + " ".join(map(shlex.quote, folders))]
    commands += [f"mkfifo {shlex.quote(place(root, row.fifo))}"] if row.fifo else []
    for path, data in row.files.items():
        if data is not None:
            await sandbox.write_file(place(root, path), data)
    commands += [
        f"chmod {mode:o} {shlex.quote(place(root, path))}" for path, mode in row.modes.items() if path in row.files
    ]
    result = await sandbox.exec("\n".join(commands))
    if result.exit_code:
        raise AssertionError(f"cannot prepare {row.name}: {result.output}")
