"""`str_replace_editor` in the words of OpenHands 0.25 (its editor is openhands-aci), over a sandbox's files.

On UTF-8 text with LF line ends, what the model sees equals what that editor shows. Its quirks that only concern the
view are kept: an empty line with a number after a final line break, cuts before numbering, a retry with both strings
stripped, undo that restores whatever the last edit replaced. A file is never rewritten beyond the edit.
"""

from __future__ import annotations

import errno
import os
import posixpath
import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from skyenv.core import FileOps
from skyenv.errors import SandboxPathError
from skyenv.tools import edit_text
from skyenv.tools.edit_text import EditRefused
from skyenv.tools.openhands import text as say
from skyenv.types import FileInfo, ToolSpec

_CONTEXT = 4
_UNDO_DEPTH = 10
_MAX_BYTES = 10 * 1024 * 1024


class OpenHandsEditor:
    """`str_replace_editor(command, path, ...)`; one instance an episode.

    `max_chars` of file text are shown before the cut; `workdir` is only used to suggest an absolute path.
    """

    def __init__(self, *, max_chars: int = 16_000, workdir: str = "/") -> None:
        self._max_chars = max_chars
        self._workdir = workdir
        self._history: dict[str, deque[bytes]] = {}
        self.spec = ToolSpec("str_replace_editor", say.DESCRIPTION, say.PARAMETERS)

    async def run(self, arguments: Mapping[str, Any], sandbox: FileOps) -> str:
        """Carry out one command; the text begins with `ERROR:` when nothing was done."""
        path = arguments["path"]
        try:
            shown = await self._dispatch(arguments, _normal(path), sandbox)
        except EditRefused as error:
            shown = f"ERROR:\n{error}"
        except SandboxPathError as error:
            reason = f"[Errno {error.errno}] {os.strerror(error.errno or 0)}: '{path[:200]}'"
            doing = "trying to read" if arguments["command"] == "view" else "trying to write to"
            shown = f"ERROR:\nRan into {reason} while {doing} {path[:200]}"
        return shown if shown.isascii() else shown.encode("utf-8", "backslashreplace").decode()

    async def _dispatch(self, arguments: Mapping[str, Any], path: str, files: FileOps) -> str:
        command = arguments["command"]
        info = await self._check_path(command, path, files)
        if command == "view":
            return await self._view(path, info, arguments.get("view_range"), files)
        if command == "create":
            return await self._create(path, _need(arguments, "file_text"), files)
        if command == "str_replace":
            old, new = _need(arguments, "old_str"), arguments.get("new_str")
            if old == new:
                hint = "No replacement was performed. `new_str` and `old_str` must be different."
                raise say.invalid("new_str", new, hint)
            return await self._replace(path, old, new or "", await _read(path, info, files), files)
        if command == "insert":
            line, new = _need(arguments, "insert_line"), _need(arguments, "new_str")
            return await self._insert(path, line, new, await _read(path, info, files), files)
        return await self._undo(path, await _read(path, info, files), files)

    async def _check_path(self, command: str, path: str, files: FileOps) -> FileInfo | None:
        if not path.startswith("/"):
            raise await self._relative(path, files)
        try:
            info = await files.stat(path)
        except SandboxPathError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                raise
            info = None
        if command == "create":
            if info is not None:
                hint = f"File already exists at: {path}. Cannot overwrite files using command `create`."
                raise say.invalid("path", path, hint)
        elif info is None:
            raise say.invalid("path", path, f"The path {path} does not exist. Please provide a valid path.")
        elif info.kind == "dir" and command != "view":
            hint = f"The path {path} is a directory and only the `view` command can be used on directories."
            raise say.invalid("path", path, hint)
        return info

    async def _relative(self, path: str, files: FileOps) -> EditRefused:
        hint = "The path should be an absolute path, starting with `/`."
        guess = posixpath.join(self._workdir, path)
        try:
            await files.stat(guess)
            hint += f" Maybe you meant {guess}?"
        except SandboxPathError:
            pass
        return say.invalid("path", path, hint)

    async def _view(self, path: str, info: FileInfo | None, view_range: Sequence[int] | None, files: FileOps) -> str:
        if info is not None and info.kind == "dir":
            if view_range:
                hint = "The `view_range` parameter is not allowed when `path` points to a directory."
                raise say.invalid("view_range", list(view_range), hint)
            return say.directory(path, await files.list_dir(path, depth=2), self._max_chars)
        text = _shown(await _read(path, info, files))
        if not view_range:
            return self._numbered(text, path, 1)
        lines = edit_text.split_lines(text.encode("utf-8", "surrogateescape"))
        first, last, note = say.check_range(view_range, len(lines))
        part = b"\n".join(lines[first - 1 : last]).decode("utf-8", "surrogateescape")
        return note + self._numbered(part, path, first)

    async def _create(self, path: str, text: str, files: FileOps) -> str:
        await files.write_file(path, text.encode())
        self._remember(path, text.encode())
        return f"File created successfully at: {path}"

    async def _replace(self, path: str, old: str, new: str, data: bytes, files: FileOps) -> str:
        text = _shown(data)
        spans = [found.span() for found in re.finditer(re.escape(old), text)]
        if not spans:
            old, new = old.strip(), new.strip()
            spans = [found.span() for found in re.finditer(re.escape(old), text)]
        if not spans:
            raise EditRefused(f"No replacement was performed, old_str `{old}` did not appear verbatim in {path}.")
        if len(spans) > 1:
            lines = sorted({text.count("\n", 0, start) + 1 for start, _ in spans})
            raise EditRefused(
                f"No replacement was performed. Multiple occurrences of old_str `{old}` in lines {lines}. "
                "Please ensure it is unique."
            )
        start, end = (_offset(data, text, position) for position in spans[0])
        inserted = edit_text.with_style(edit_text.encode(new, edit_text.encoding_of(data)), data[start:end], data)
        after = data[:start] + inserted + data[end:]
        await files.write_file(path, after, expected=data)
        self._remember(path, data)
        line = text.count("\n", 0, spans[0][0]) + 1
        first, last = max(0, line - _CONTEXT), line + _CONTEXT + new.count("\n")
        snippet = self._snippet(after, first, last, f"a snippet of {path}", first + 1)
        return f"The file {path} has been edited. {snippet}{say.REVIEW_REPLACE}"

    async def _insert(self, path: str, line: int, new: str, data: bytes, files: FileOps) -> str:
        total = len(edit_text.split_lines(data))
        if not 0 <= line <= total:
            hint = f"It should be within the range of allowed values: {[0, total]}"
            raise say.invalid("insert_line", line, hint)
        after = edit_text.insert(data, line, new + "\n" if new.endswith("\n") else new).data
        await files.write_file(path, after, expected=data)
        self._remember(path, data)
        count = new.count("\n") + 1
        first, last = max(0, line - _CONTEXT), min(total + count, line + _CONTEXT + count)
        snippet = self._snippet(after, first, last, "a snippet of the edited file", max(1, line - _CONTEXT + 1))
        return f"The file {path} has been edited. {snippet}{say.REVIEW_INSERT}"

    async def _undo(self, path: str, current: bytes, files: FileOps) -> str:
        history = self._history.get(path)
        if not history:
            raise EditRefused(f"No edit history found for {path}.")
        await files.write_file(path, history[-1], expected=current)
        before = history.pop()
        return f"Last edit to {path} undone successfully. {self._numbered(_shown(before), path, 1)}"

    def _remember(self, path: str, before: bytes) -> None:
        self._history.setdefault(path, deque(maxlen=_UNDO_DEPTH)).append(before)

    def _snippet(self, data: bytes, first: int, last: int, name: str, label: int) -> str:
        lines = _shown(data).split("\n")
        ended = [line + "\n" for line in lines[:-1]] + lines[-1:]
        return self._numbered("".join(ended[first:last]), name, label)

    def _numbered(self, text: str, name: str, first: int) -> str:
        if len(text) > self._max_chars:
            text = text[: self._max_chars] + say.FILE_CUT
        rows = (f"{number:6}\t{line}" for number, line in enumerate(text.split("\n"), first))
        return f"Here's the result of running `cat -n` on {name}:\n" + "\n".join(rows) + "\n"


async def _read(path: str, info: FileInfo | None, files: FileOps) -> bytes:
    if info is not None and info.size > _MAX_BYTES:
        megabytes = f"{info.size / 1024 / 1024:.1f}MB"
        reason = f"File is too large ({megabytes}). Maximum allowed size is 10MB."
        raise EditRefused(f"File validation failed for {path}: {reason}")
    data = await files.read_file(path)
    if edit_text.is_binary(data):
        reason = "File appears to be binary and this file type cannot be read or edited by this tool."
        raise EditRefused(f"File validation failed for {path}: {reason}")
    return data


def _shown(data: bytes) -> str:
    """The text that strings are looked up in: LF line ends, bytes that are no text as lone surrogates."""
    encoding = edit_text.encoding_of(data)
    return data.decode(encoding or "utf-8", "surrogateescape").replace("\r\n", "\n")


def _offset(data: bytes, text: str, position: int) -> int:
    """Byte offset in the file of a position in its shown text."""
    encoding = edit_text.encoding_of(data) or "utf-8"
    offset = len(text[:position].encode(encoding, "surrogateescape"))
    if b"\r\n" not in data:
        return offset
    whole = data.split(b"\n")[: text.count("\n", 0, position)]
    return offset + sum(line.endswith(b"\r") for line in whole)


def _normal(path: str) -> str:
    if "\0" in path:
        raise say.invalid("path", path.replace("\0", "\\0")[:200], "It contains a NUL character.")
    kept = re.sub(r"/(\./)*/*", "/", path)
    return kept.rstrip("/") or kept[:1]


def _need(arguments: Mapping[str, Any], name: str) -> Any:
    if name not in arguments:
        raise EditRefused(f"Parameter `{name}` is required for command: {arguments['command']}.")
    return arguments[name]
