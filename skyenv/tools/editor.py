"""The file editor tool: exact edits on bytes over a sandbox's files, or a refusal that says why.

It needs no shell and no interpreter inside the sandbox. Every write is compare-and-swap against the bytes the edit
was computed from. State of an episode: the undo history, by path, which remembers what each edit left behind, so
that undo never overwrites somebody else's change. What a file system refuses is text for the model; only
infrastructure raises.
"""

from __future__ import annotations

import errno
import hashlib
import os
import posixpath
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from skyenv.core import FileOps
from skyenv.errors import SandboxConflict, SandboxPathError
from skyenv.tools import edit_text, edit_view
from skyenv.tools.edit_text import Edited, EditRefused
from skyenv.types import FileInfo, ToolSpec

_UNDO_DEPTH = 20
_MAX_EDIT_BYTES = 10_000_000
_MAX_VIEW_BYTES = 512_000_000
_CHUNK = 1 << 20
_CHECK = "Check that the change is as intended (indentation, no duplicate lines); edit the file again if it is not."


@dataclass(frozen=True, slots=True)
class _Undo:
    before: bytes | None
    after_digest: bytes


class StrReplaceEditor:
    """`str_replace_editor(command, path, ...)`; one instance an episode.

    `max_chars` bounds what one call shows. `workdir` is only used to suggest an absolute path for a relative one.
    """

    def __init__(self, *, max_chars: int = 16_000, workdir: str = "/") -> None:
        self._max_chars = max_chars
        self._workdir = workdir
        self._history: dict[str, deque[_Undo]] = {}
        self.spec = ToolSpec("str_replace_editor", _DESCRIPTION, _PARAMETERS)

    async def run(self, arguments: Mapping[str, Any], sandbox: FileOps) -> str:
        """Carry out one command; the text begins with `ERROR:` when nothing was done."""
        shown = _shorten(arguments["path"])
        try:
            path = await self._check_path(arguments["path"], sandbox)
            text = await self._dispatch(arguments, path, sandbox)
        except EditRefused as error:
            text = f"ERROR: {error}"
        except SandboxConflict:
            text = f"ERROR: {shown} changed since it was read, so nothing was written. View it and try again."
        except SandboxPathError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            text = f"ERROR: cannot {arguments['command']} {shown}: {reason}."
        return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()

    async def _dispatch(self, arguments: Mapping[str, Any], path: str, files: FileOps) -> str:
        command = arguments["command"]
        if command == "view":
            return await self._view(path, arguments.get("view_range"), files)
        if command == "create":
            return await self._create(path, _need(arguments, "file_text"), files)
        if command == "undo_edit":
            return await self._undo(path, files)
        if command == "insert":
            line, text = _need(arguments, "insert_line"), _need(arguments, "new_str")
            data = await self._read(path, files)
            return await self._apply(path, data, edit_text.insert(data, line, text), files)
        old = _need(arguments, "old_str")
        data = await self._read(path, files)
        return await self._apply(path, data, edit_text.replace(data, old, arguments.get("new_str", "")), files)

    async def _check_path(self, path: str, files: FileOps) -> str:
        if not path:
            raise EditRefused("path is empty; give an absolute path.")
        if "\0" in path:
            raise EditRefused("path contains a NUL character, which no file name can.")
        if path.startswith("/"):
            return "/" + posixpath.normpath(path).lstrip("/")
        if path.startswith("~"):
            raise EditRefused(f"path must be absolute, and ~ is not expanded; got {_shorten(path)}.")
        guess = posixpath.normpath(posixpath.join(self._workdir, path.strip()))
        try:
            await files.stat(guess)
        except SandboxPathError:
            raise EditRefused(f"path must be absolute, starting with /; got {_shorten(path)}.") from None
        raise EditRefused(f"path must be absolute, starting with /; did you mean {_shorten(guess)}?")

    async def _view(self, path: str, view_range: Sequence[int] | None, files: FileOps) -> str:
        info = await files.stat(path)
        if info.kind == "dir":
            if view_range:
                raise EditRefused(f"view_range is for files, and {path} is a directory.")
            return edit_view.view_directory(path, await files.list_dir(path, depth=2), self._max_chars)
        _require_regular(info, path)
        if info.size <= _MAX_EDIT_BYTES:
            data = await files.read_file(path)
            _require_text(data, path)
            return edit_view.view_file(data, path, view_range, self._max_chars)
        if not view_range:
            raise EditRefused(f"{path} has {info.size} bytes, too many to show whole; give a view_range.")
        if info.size > _MAX_VIEW_BYTES:
            raise EditRefused(f"{path} has {info.size} bytes, too many to view; use the shell on it.")
        return await self._view_large(path, view_range, info.size, files)

    async def _view_large(self, path: str, view_range: Sequence[int], size: int, files: FileOps) -> str:
        """Stream a large file and keep only what can be shown."""
        if len(view_range) != 2:
            raise EditRefused(f"view_range must be two integers [first, last]; got {list(view_range)}.")
        window = edit_view.LineWindow(view_range[0], view_range[1], 4 * self._max_chars)
        for offset in range(0, size, _CHUNK):
            chunk = await files.read_file(path, offset=offset, max_bytes=_CHUNK)
            if not offset:
                _require_text(chunk, path)
            window.feed(chunk)
        shown = edit_view.resolve_range(view_range, window.total)
        lines, hidden = window.result()
        shown = replace(shown, hidden=hidden)
        how = (edit_text.encoding_of(b"\n".join(lines)), self._max_chars)
        return edit_view.show_lines(lines, path, shown, window.total, how)

    async def _create(self, path: str, text: str, files: FileOps) -> str:
        try:
            await files.stat(path)
        except SandboxPathError as error:
            if error.errno != errno.ENOENT:
                raise
        else:
            raise EditRefused(f"{path} already exists; edit it with str_replace, or remove it first.")
        data = text.encode()
        await files.write_file(path, data)
        self._remember(path, None, data)
        return f"File created at {path} ({len(data)} bytes)."

    async def _read(self, path: str, files: FileOps) -> bytes:
        """Read a file for editing: a regular text file of moderate size."""
        info = await files.stat(path)
        if info.kind == "dir":
            raise EditRefused(f"{path} is a directory; only files can be edited.")
        _require_regular(info, path)
        if info.size > _MAX_EDIT_BYTES:
            raise EditRefused(f"{path} has {info.size} bytes, too many to edit here; use the shell on it.")
        data = await files.read_file(path)
        _require_text(data, path)
        return data

    async def _apply(self, path: str, before: bytes, edited: Edited, files: FileOps) -> str:
        await files.write_file(path, edited.data, expected=before)
        self._remember(path, before, edited.data)
        body = edit_view.snippet(edited.data, path, edited.first_line, edited.count, self._max_chars)
        return f"The file {path} has been edited. {body}\n{_CHECK}"

    def _remember(self, path: str, before: bytes | None, after: bytes) -> None:
        history = self._history.setdefault(path, deque(maxlen=_UNDO_DEPTH))
        history.append(_Undo(before, hashlib.sha256(after).digest()))

    async def _undo(self, path: str, files: FileOps) -> str:
        history = self._history.get(path)
        if not history:
            raise EditRefused(f"no edit of {path} is left to undo (no history).")
        info = await files.stat(path)
        current = await files.read_file(path) if info.kind == "file" else b""
        last = history[-1]
        if info.kind != "file" or hashlib.sha256(current).digest() != last.after_digest:
            raise EditRefused(f"{path} changed since the last edit here, so undoing it would lose that change.")
        if last.before is None:
            await files.remove(path)
            history.pop()
            return f"The creation of {path} was undone: the file is gone."
        await files.write_file(path, last.before, expected=current)
        history.pop()
        shown = edit_view.view_file(last.before, path, None, self._max_chars)
        return f"The last edit of {path} was undone. {shown}"


def _need(arguments: Mapping[str, Any], name: str) -> Any:
    if name not in arguments:
        raise EditRefused(f"command {arguments['command']} needs the parameter {name}.")
    return arguments[name]


def _require_regular(info: FileInfo, path: str) -> None:
    if info.kind != "file":
        raise EditRefused(f"{path} is not a regular file or directory, so it is not opened.")


def _require_text(data: bytes, path: str) -> None:
    if edit_text.is_binary(data):
        raise EditRefused(f"{path} is a binary file of {len(data)} bytes; only text can be viewed or edited.")


def _shorten(path: str) -> str:
    return path if len(path) <= 200 else f"{path[:200]}... ({len(path)} characters)"


_DESCRIPTION = """\
View, create and edit text files by absolute path.
* `view` shows a file with line numbers (`view_range` limits it to some lines), or a directory two levels deep.
* `create` writes a new file with `file_text`; it refuses a path that exists.
* `str_replace` replaces the only place where `old_str` occurs by `new_str` (absent: deletes it). `old_str` must match \
the file exactly, white space included and without line numbers, and must be unique: give enough lines around it.
* `insert` puts `new_str` as new lines after line `insert_line` (0: before the first line).
* `undo_edit` takes back the last edit of the file made with this tool."""

_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "command": {
            "type": "string",
            "enum": ["view", "create", "str_replace", "insert", "undo_edit"],
            "description": "What to do.",
        },
        "path": {"type": "string", "description": "Absolute path of a file or directory, such as /testbed/file.py."},
        "file_text": {"type": "string", "description": "Content of the file, for `create`."},
        "old_str": {"type": "string", "description": "Text to replace, for `str_replace`."},
        "new_str": {"type": "string", "description": "New text, for `str_replace` and `insert`."},
        "insert_line": {"type": "integer", "description": "Line after which to insert, for `insert`."},
        "view_range": {
            "type": "array",
            "items": {"type": "integer"},
            "description": "First and last line to show, for `view`, such as [11, 20]; last -1 is the end of the file.",
        },
    },
    "required": ["command", "path"],
}
