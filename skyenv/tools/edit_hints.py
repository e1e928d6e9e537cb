"""Why a search text is not in a file: the likeliest difference, named with its line. Pure, deterministic."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

_MAX_TEXT = 1 << 20
_GUTTER = re.compile(r"^ *\d+\t", re.MULTILINE)
_QUOTES = str.maketrans("\u2018\u2019\u201c\u201d\u2013\u2014\u00a0", "''\"\"-- ")

Normalise = Callable[[str], str]


def explain_no_match(text: str, old: str) -> str:
    """Say that `old` does not occur in `text`, and how it differs from the place that looks most like it."""
    base = "old_str was not found in the file, so nothing was changed."
    if len(text) > _MAX_TEXT or len(old) > _MAX_TEXT:
        return base
    text, old = text.replace("\r\n", "\n"), old.replace("\r\n", "\n")
    hint = _gutter(text, old) or _escapes(text, old) or _spacing(text, old) or _unicode(text, old)
    return f"{base} {hint or _first_difference(text, old) or 'View the file and copy the text from it.'}"


def _gutter(text: str, old: str) -> str | None:
    lines = [line for line in old.split("\n") if line.strip()]
    bare = _GUTTER.sub("", old)
    if lines and all(_GUTTER.match(line) for line in lines) and bare.strip("\n") in text:
        return "It matches without the line numbers: remove the numbers and the tab after them."
    return None


def _escapes(text: str, old: str) -> str | None:
    escaped = old.replace("\n", "\\n").replace("\t", "\\t")
    if escaped != old and escaped in text:
        return "The file has the two characters \\n (or \\t) where old_str has a real line break (or tab)."
    unescaped = old.replace("\\n", "\n").replace("\\t", "\t")
    if unescaped != old and unescaped in text:
        return "The file has a real line break (or tab) where old_str has the two characters \\n (or \\t)."
    return None


def _spacing(text: str, old: str) -> str | None:
    wanted = old.strip("\n")
    if line := _line_of(text, wanted, lambda value: value.expandtabs(8)):
        return f"It matches from line {line} except that tabs and spaces differ."
    if line := _line_of(text, wanted, _strip_lines):
        return _which_spacing(text.split("\n"), wanted.split("\n"), line)
    if line := _line_of(text, wanted, _squeeze):
        return f"It matches from line {line} except for spaces or tabs inside a line."
    return None


def _which_spacing(lines: list[str], wanted: list[str], line: int) -> str:
    for offset, want in enumerate(wanted):
        if not want.strip():
            continue
        before, _, after = lines[line - 1 + offset].partition(want.strip())
        indent, rest = want[: len(want) - len(want.lstrip())], want[len(want.rstrip()) :]
        if before != indent and not (offset == 0 and before.endswith(indent)):
            return f"It matches from line {line} except for the indentation of line {line + offset}."
        if after != rest and not (offset == len(wanted) - 1 and after.startswith(rest)):
            return f"It matches from line {line} except for white space at the end of line {line + offset}."
    return f"It matches from line {line} except for white space."


def _unicode(text: str, old: str) -> str | None:
    wanted = old.strip("\n")
    if line := _line_of(text, wanted, lambda value: unicodedata.normalize("NFKC", value).translate(_QUOTES)):
        return f"It matches from line {line} except for quotes, dashes or the composition of Unicode characters."
    return None


def _first_difference(text: str, old: str) -> str | None:
    wanted = old.strip("\n").split("\n")
    if len(wanted) < 2:
        return None
    lines = text.split("\n")
    starts = [i for i, line in enumerate(lines) if line == wanted[0]][:100]
    best = (0, 0)
    for start in starts:
        same = 0
        while same < len(wanted) and start + same < len(lines) and lines[start + same] == wanted[same]:
            same += 1
        best = max(best, (same, -start))
    same, start = best[0], -best[1]
    if not same:
        return None
    if start + same >= len(lines):
        return f"It matches from line {start + 1}, but the file ends before old_str does."
    return f"It matches from line {start + 1} to {start + same}, but line {start + same + 1} differs."


def _line_of(text: str, wanted: str, normalise: Normalise) -> int | None:
    """1-based line where the normalised text is found; normalising must not add or remove line breaks."""
    needle = normalise(wanted)
    if not needle.strip():
        return None
    haystack = normalise(text)
    position = haystack.find(needle)
    return None if position == -1 else haystack.count("\n", 0, position) + 1


def _strip_lines(value: str) -> str:
    return "\n".join(line.strip() for line in value.split("\n"))


def _squeeze(value: str) -> str:
    return "\n".join("".join(line.split()) for line in value.split("\n"))
