"""What an edit does to the bytes of a file: pure functions, bytes outside the edit stay identical.

Lines end with LF only. A LF in the model's strings matches CRLF too, and new text takes the newline style of what it
replaces. An edit that cannot be made exactly is refused with `EditRefused`, whose text tells the model why.
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass

from skyenv.tools.edit_hints import explain_no_match

_MAX_LISTED = 20
_CODING = re.compile(rb"^[ \t\f]*(?:#.*?coding[:=]|<\?xml[^>]*encoding=[\"'])[ \t]*([-\w.]+)")
_BINARY_PROBE = 8192


class EditRefused(Exception):
    """The request cannot be carried out as it stands; the text is for the model and nothing was changed."""


@dataclass(frozen=True, slots=True)
class Edited:
    """Result of an edit: the new content, and the first line (1-based) and number of lines of the new text."""

    data: bytes
    first_line: int
    count: int


def is_binary(data: bytes) -> bool:
    """Whether a NUL stands in the first 8 KiB."""
    return b"\0" in data[:_BINARY_PROBE]


def encoding_of(data: bytes) -> str | None:
    """Return "utf-8", the encoding that the file declares for itself and obeys, or None when neither holds.

    Only single-byte encodings that keep ASCII as it is count, because edits are made on bytes.
    """
    try:
        data.decode("utf-8")
        return "utf-8"
    except UnicodeDecodeError:
        pass
    for line in data.split(b"\n", 2)[:2]:
        if found := _CODING.match(line):
            return _declared(found[1].decode("ascii", "replace"), data)
    return None


def _declared(name: str, data: bytes) -> str | None:
    ascii_text = "".join(map(chr, range(1, 128)))
    try:
        info = codecs.lookup(name)
        if ascii_text.encode(info.name) != ascii_text.encode():
            return None
        text = data.decode(info.name)
        return info.name if len(text) == len(data) and text.encode(info.name) == data else None
    except (LookupError, UnicodeError):
        return None


def split_lines(data: bytes) -> list[bytes]:
    """Split on LF only; no empty line after a final LF; LF removed and CR kept."""
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return lines


def encode(text: str, encoding: str | None) -> bytes:
    """Encode what the model wrote as the file is encoded. Raises EditRefused when the file cannot hold it."""
    try:
        return text.encode(encoding or "ascii")
    except UnicodeEncodeError as error:
        char = text[error.start]
        kind = f"is encoded in {encoding}" if encoding else "is not UTF-8 and declares no encoding"
        raise EditRefused(
            f"The file {kind}, which cannot hold the character {char!a}. Use ASCII, or convert the file first."
        ) from error


def replace(data: bytes, old: str, new: str) -> Edited:
    """Replace the only occurrence of `old` by `new`. Overlapping occurrences count.

    When `old` does not occur, one line break at each end that both strings share is left out of both and the search
    is made once more.
    """
    if not old:
        raise EditRefused("old_str is empty. Give the text to replace, with enough context to be unique.")
    if not old.strip():
        raise EditRefused("old_str is blank. Give the text to replace, with enough context to be unique.")
    encoding = encoding_of(data)
    spans = _occurrences(data, _try_encode(old, encoding))
    if spans and old == new:
        raise EditRefused("old_str and new_str are the same, so there is nothing to change.")
    if not spans:
        trimmed_old, trimmed_new = _trim_shared_breaks(old, new)
        if trimmed_old != old and trimmed_old.strip() and trimmed_old != trimmed_new:
            old, new = trimmed_old, trimmed_new
            spans = _occurrences(data, _try_encode(old, encoding))
    if not spans:
        raise EditRefused(explain_no_match(data.decode(encoding or "utf-8", "backslashreplace"), old))
    if len(spans) > 1:
        raise EditRefused(_ambiguous(data, spans))
    start, end = spans[0]
    inserted = with_style(encode(new, encoding), data[start:end], data)
    first = data.count(b"\n", 0, start) + 1
    count = inserted.count(b"\n") + (not inserted.endswith(b"\n"))
    return Edited(data[:start] + inserted + data[end:], first, count)


def insert(data: bytes, after_line: int, text: str) -> Edited:
    """Insert `text` as whole lines after line `after_line` (0: before the first); it ends with one line break."""
    lines = split_lines(data)
    if not 0 <= after_line <= len(lines):
        raise EditRefused(f"insert_line must be in [0, {len(lines)}], the lines of the file; got {after_line}.")
    block = encode(text if text.endswith("\n") else text + "\n", encoding_of(data))
    block = with_style(block, b"", data)
    offset = sum(len(line) + 1 for line in lines[:after_line])
    head = data[:offset]
    if head and not head.endswith(b"\n"):
        head += b"\r\n" if _crlf_dominates(data) else b"\n"
    return Edited(head + block + data[offset:], after_line + 1, block.count(b"\n"))


def _try_encode(text: str, encoding: str | None) -> bytes:
    """Encode text to search for; text that the file cannot hold is text that does not occur."""
    try:
        return text.encode(encoding or "utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-8")


def _occurrences(data: bytes, old: bytes) -> list[tuple[int, int]]:
    """Spans of `old`, overlapping ones included, at most one more than is ever listed."""
    old = old.replace(b"\r\n", b"\n")
    spans: list[tuple[int, int]] = []
    if b"\n" not in old or b"\r\n" not in data:
        position = data.find(old)
        while position != -1 and len(spans) <= _MAX_LISTED:
            spans.append((position, position + len(old)))
            position = data.find(old, position + 1)
        return spans
    pattern = re.compile(rb"\r?\n".join(re.escape(part) for part in old.split(b"\n")))
    found = pattern.search(data)
    while found and len(spans) <= _MAX_LISTED:
        spans.append(found.span())
        found = pattern.search(data, _next_start(data, found.start()))
    return spans


def _next_start(data: bytes, position: int) -> int:
    """A match that starts with CRLF must not be found a second time from its LF."""
    return position + (2 if data.startswith(b"\r\n", position) else 1)


def _trim_shared_breaks(old: str, new: str) -> tuple[str, str]:
    if old.startswith("\n") and (new.startswith("\n") or not new):
        old, new = old[1:], new[1:]
    if old.endswith("\n") and (new.endswith("\n") or not new):
        old, new = old[:-1], new[:-1]
    return old, new


def _ambiguous(data: bytes, spans: list[tuple[int, int]]) -> str:
    lines = [data.count(b"\n", 0, start) + 1 for start, _ in spans]
    listed = ", ".join(map(str, lines[:_MAX_LISTED])) + (" and more" if len(lines) > _MAX_LISTED else "")
    return f"old_str occurs more than once, starting in lines {listed}. Add context so that it is unique."


def with_style(text: bytes, replaced: bytes, data: bytes) -> bytes:
    """Give `text` the newline style of what it replaces, or of the file where that has none or both."""
    crlf, lf = replaced.count(b"\r\n"), replaced.count(b"\n")
    use_crlf = crlf == lf if lf and crlf in (0, lf) else _crlf_dominates(data)
    return text.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n") if use_crlf else text


def _crlf_dominates(data: bytes) -> bool:
    crlf = data.count(b"\r\n")
    return crlf > data.count(b"\n") - crlf
