"""Makes raw terminal output readable text of bounded size: pure functions, linear in the input.

Escape sequences go, a carriage return keeps only what a terminal would show last, other control characters become
U+FFFD, and the middle is cut on line boundaries with a note of what is missing.
"""

from __future__ import annotations

import re

_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor movement, mode switches, status queries
    r"|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)?"  # OSC: window titles, hyperlinks
    r"|\x1b[PX^_][^\x1b\n]*(?:\x1b\\)?"  # DCS, SOS, PM, APC strings
    r"|\x1b[ -/]*[0-~]"  # two-character sequences
    r"|\x1b"
)
_OVERSTRIKE = re.compile(r"[^\n\x08]\x08")
_CONTROLS = {code: "\ufffd" for code in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if chr(code) not in "\n\t\r"}
_CONTROLS |= {0x07: "", 0x08: ""}


def clean(text: str) -> str:
    """Return the text as a terminal would leave it, spaces kept."""
    if "\x1b" in text:
        text = _ESCAPES.sub("", text)
    if "\x08" in text:
        text = _OVERSTRIKE.sub("", text)
    text = text.translate(_CONTROLS)
    if "\r" in text:
        text = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return text


def cut_middle(text: str, max_chars: int, note: str = "") -> str:
    """Keep head and tail of a text longer than `max_chars` characters, and say in between what was left out.

    `note` is added to that line. The result is never longer than `max_chars` plus the line itself.
    """
    if len(text) <= max_chars:
        return text
    half = max(1, max_chars // 2)
    head_end, tail_start = half, len(text) - (max_chars - half)
    newline = text.rfind("\n", 0, head_end)
    if newline >= half // 2:
        head_end = newline + 1
    newline = text.find("\n", tail_start, tail_start + half // 2)
    if newline != -1:
        tail_start = newline + 1
    elided = text[head_end:tail_start]
    marker = f"[... {elided.count(chr(10))} lines ({len(elided)} characters) left out{note} ...]"
    before = "" if text[head_end - 1] == "\n" else "\n"
    return f"{text[:head_end]}{before}{marker}\n{text[tail_start:]}"
