"""How files and directories are shown: numbered lines, ranges, cuts. Pure functions over bytes and listings."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from skyenv.tools.edit_text import EditRefused, encoding_of, split_lines
from skyenv.types import FileInfo

_SNIPPET_CONTEXT = 4
_MAX_ENTRIES = 500
_NOTICE_ROOM = 200


@dataclass(frozen=True, slots=True)
class LineRange:
    """1-based inclusive lines to show; `clamped` when the end asked for lies behind the last line.

    `hidden`: how many bytes at the end of the first line were not read.
    """

    first: int
    last: int
    clamped: bool = False
    hidden: int = 0


def resolve_range(view_range: Sequence[int], total: int) -> LineRange:
    """Check `[a, b]` against a file of `total` lines; b -1 is the end. Raises EditRefused naming [1, total]."""
    if len(view_range) != 2:
        raise EditRefused(f"view_range must be two integers [first, last]; got {list(view_range)}.")
    first, last = view_range
    if not 1 <= first <= total:
        raise EditRefused(f"view_range must start in [1, {total}], the lines of the file; got {list(view_range)}.")
    if last == -1:
        return LineRange(first, total)
    if last < first:
        raise EditRefused(
            f"view_range must end at {first} or later (or at -1, the end), within [1, {total}]; got {list(view_range)}."
        )
    return LineRange(first, min(last, total), clamped=last > total)


def view_file(data: bytes, path: str, view_range: Sequence[int] | None, max_chars: int) -> str:
    """Show a file, or the lines of `view_range`, numbered as `cat -n` does."""
    lines = split_lines(data)
    if not lines:
        return f"The file {path} is empty."
    shown = resolve_range(view_range, len(lines)) if view_range else LineRange(1, len(lines))
    encoding = encoding_of(data)
    return show_lines(lines[shown.first - 1 : shown.last], path, shown, len(lines), (encoding, max_chars))


def show_lines(lines: Sequence[bytes], path: str, shown: LineRange, total: int, how: tuple[str | None, int]) -> str:
    """Show already selected lines; `how` is the encoding (None: unknown) and the character limit of the whole."""
    encoding, max_chars = how
    body = _number(lines, shown, total, (encoding, max_chars))
    parts = [f"Here's the result of running `cat -n` on {path}:", *body]
    if shown.clamped:
        parts.append(f"[The file has only {total} lines; shown up to its end.]")
    if encoding is None:
        parts.append("[The file is not valid UTF-8; bytes that are not text are shown as \\xNN.]")
    elif encoding != "utf-8":
        parts.append(f"[The file is encoded in {encoding}.]")
    return "\n".join(parts)


def snippet(data: bytes, path: str, first_line: int, count: int, max_chars: int) -> str:
    """Show the `count` lines from `first_line` with four lines of context on each side."""
    lines = split_lines(data)
    first = max(1, first_line - _SNIPPET_CONTEXT)
    last = min(len(lines), first_line + count - 1 + _SNIPPET_CONTEXT)
    encoding = encoding_of(data)
    shown = lines[first - 1 : last]
    numbered = _number(shown, LineRange(first, last), len(lines), (encoding, max_chars))
    body = numbered if shown else ["(the file is now empty)"]
    return "\n".join([f"Here's the result of running `cat -n` on a snippet of {path}:", *body])


def decode_line(line: bytes, encoding: str | None, *, first: bool = False) -> str:
    """Decode one line for display: no CR of a CRLF, no byte order mark, undecodable bytes escaped."""
    text = line.removesuffix(b"\r").decode(encoding or "utf-8", "backslashreplace")
    return text.removeprefix("\ufeff") if first else text


def _number(lines: Sequence[bytes], shown: LineRange, total: int, how: tuple[str | None, int]) -> list[str]:
    """Number the lines and keep as many whole ones as fit; the first is cut inside if it alone is too long."""
    encoding, max_chars = how
    room = max(max_chars - _NOTICE_ROOM, 1)
    kept: list[str] = []
    for number, line in enumerate(lines, start=shown.first):
        row = f"{number:6}\t{decode_line(line, encoding, first=number == 1)}"
        if len(row) + 1 > room:
            if not kept:
                more = f"{len(row) - room} more characters"
                if shown.hidden:
                    more = f"{len(row[room:].encode(encoding or 'utf-8')) + shown.hidden} more bytes"
                kept.append(f"{row[:room]}... [{more} in this line]")
            break
        room -= len(row) + 1
        kept.append(row)
    last = shown.first + len(kept) - 1
    if len(kept) < len(lines):
        kept.append(f"[Shown up to line {last} of {total}; use view_range to see more.]")
    return kept


def view_directory(path: str, entries: Sequence[FileInfo], max_chars: int) -> str:
    """List a directory: full paths sorted bytewise, `/` after directories, hidden entries only counted."""
    prefix = path.rstrip("/") + "/"
    visible, hidden = [], 0
    for entry in entries:
        name = entry.path if entry.path.startswith("/") else prefix + entry.path
        parts = name.removeprefix(prefix).split("/")
        if any(part.startswith(".") for part in parts[:-1]):
            continue
        if parts[-1].startswith("."):
            hidden += 1
        else:
            visible.append((name, entry.kind))
    visible.sort(key=lambda item: item[0].encode("utf-8", "surrogatepass"))
    rows, room = [prefix], max_chars - _NOTICE_ROOM - len(prefix)
    for name, kind in visible[:_MAX_ENTRIES]:
        row = name + ("/" if kind == "dir" else "")
        room -= len(row) + 1
        if room < 0:
            break
        rows.append(row)
    text = [f"Here are the files and directories up to 2 levels deep in {path}, hidden ones left out:", *rows]
    if left := len(visible) - (len(rows) - 1):
        text.append(f"[{left} more entries not shown; view a subdirectory.]")
    if hidden:
        text.append(f"[{hidden} hidden entries left out; `ls -a` shows them.]")
    return "\n".join(text)


class LineWindow:
    """Collects lines `first` to `last` (-1: the end) of a file that is fed in chunks, and counts all lines.

    Holds at most `max_bytes` of the wanted lines; what comes after is counted only.
    """

    def __init__(self, first: int, last: int, max_bytes: int) -> None:
        self._first, self._last, self._room = first, last, max_bytes
        self._newlines = 0
        self._partial = False
        self._kept: list[bytes] = []
        self._hidden = 0

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the file."""
        *whole, rest = chunk.split(b"\n")
        for part in whole:
            self._keep(part + b"\n")
            self._newlines += 1
        if whole:
            self._partial = False
        if rest:
            self._keep(rest)
            self._partial = True

    def _keep(self, part: bytes) -> None:
        line = self._newlines + 1
        if line < self._first or (self._last != -1 and line > self._last):
            return
        if self._room > 0:
            self._kept.append(part[: self._room])
        if line == self._first:
            self._hidden += max(0, len(part.removesuffix(b"\n")) - max(0, self._room))
        self._room -= len(part)

    @property
    def total(self) -> int:
        """How many lines the file has, as far as it was fed."""
        return self._newlines + self._partial

    def result(self) -> tuple[list[bytes], int]:
        """The collected lines without their LF, and how many bytes at the end of the first are not among them.

        The last line may be incomplete when `max_bytes` was reached, but ends with a whole character.
        """
        lines = split_lines(b"".join(self._kept))
        if self._room > 0 or not lines:
            return lines, self._hidden
        whole = whole_characters(lines[-1])
        hidden = self._hidden + (len(lines[-1]) - len(whole) if len(lines) == 1 else 0)
        return [*lines[:-1], whole], hidden


def whole_characters(data: bytes) -> bytes:
    """Without the beginning of a UTF-8 character at the end; other data as it is."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        decoder.decode(data)
    except UnicodeDecodeError:
        return data
    return data[: len(data) - len(decoder.getstate()[0])]
