"""What the editor of the preset says, and how it lists directories and checks ranges. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skyenv.tools.edit_text import EditRefused
from skyenv.types import FileInfo

_CLIPPED = (
    "<response clipped><NOTE>Due to the max output limit, only part of this {kind} has been shown to you. {do}</NOTE>"
)
FILE_CUT = _CLIPPED.format(
    kind="file",
    do="You should retry this tool after you have searched inside the file with `grep -n` in order to find the line "
    "numbers of what you are looking for.",
)
_DIRECTORY_CUT = _CLIPPED.format(
    kind="directory", do="You should use `ls -la` instead to view large directories incrementally."
)
REVIEW_REPLACE = "Review the changes and make sure they are as expected. Edit the file again if necessary."
REVIEW_INSERT = (
    "Review the changes and make sure they are as expected (correct indentation, no duplicate lines, etc). "
    "Edit the file again if necessary."
)


def invalid(name: str, value: object, hint: str) -> EditRefused:
    """The refusal of one parameter."""
    return EditRefused(f"Invalid `{name}` parameter: {value}. {hint}")


def check_range(view_range: Sequence[int], total: int) -> tuple[int, int, str]:
    """First and last line to show of a file with `total` lines, and the note when the end was clamped."""
    wanted = list(view_range)
    if len(wanted) != 2:
        raise invalid("view_range", wanted, "It should be a list of two integers.")
    first, last = wanted
    if not 1 <= first <= total:
        hint = f"Its first element `{first}` should be within the range of lines of the file: {[1, total]}."
        raise invalid("view_range", wanted, hint)
    note = ""
    if last > total:
        note = f"NOTE: We only show up to {total} since there're only {total} lines in this file.\n"
    last = total if last == -1 or last > total else last
    if last < first:
        hint = f"Its second element `{last}` should be greater than or equal to the first element `{first}`."
        raise invalid("view_range", wanted, hint)
    return first, last, note


def directory(path: str, entries: Sequence[FileInfo], max_chars: int) -> str:
    """List two levels, hidden entries left out, those at the first level counted."""
    prefix = path.rstrip("/") + "/"
    hidden, shown = 0, [prefix]
    for entry in entries:
        parts = entry.path.removeprefix(prefix).split("/")
        if any(part.startswith(".") for part in parts):
            hidden += len(parts) == 1
        else:
            shown.append(entry.path + ("/" if entry.kind == "dir" else ""))
    shown.sort(key=lambda name: name.rstrip("/").encode("utf-8", "surrogatepass"))
    listing = "\n".join(shown)
    if len(listing) > max_chars:
        listing = listing[:max_chars] + _DIRECTORY_CUT
    text = f"Here's the files and directories up to 2 levels deep in {path}, excluding hidden items:\n{listing}"
    if hidden:
        text += (
            f"\n\n{hidden} hidden files/directories in this directory are excluded. "
            f"You can use 'ls -la {path}' to see them."
        )
    return text


DESCRIPTION = """\
Custom editing tool for viewing, creating and editing files in plain-text format.
* `view` shows a file as `cat -n` does, or the files and directories of a directory up to 2 levels deep.
* `create` cannot be used if the path already exists as a file.
* `str_replace` replaces `old_str`, which must match exactly one place in the file, white space included, by `new_str`.
* `insert` puts `new_str` after line `insert_line`. `undo_edit` reverts the last edit of the file.
* Long output is cut and marked with `<response clipped>`. Always use absolute paths."""

PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "command": {
            "type": "string",
            "enum": ["view", "create", "str_replace", "insert", "undo_edit"],
            "description": "The command to run.",
        },
        "path": {"type": "string", "description": "Absolute path to a file or directory, e.g. `/workspace/file.py`."},
        "file_text": {"type": "string", "description": "Required by `create`: the content of the file."},
        "old_str": {"type": "string", "description": "Required by `str_replace`: the text to replace."},
        "new_str": {"type": "string", "description": "New text for `str_replace` (optional) and `insert` (required)."},
        "insert_line": {"type": "integer", "description": "Required by `insert`: the line after which to insert."},
        "view_range": {
            "type": "array",
            "items": {"type": "integer"},
            "description": "For `view` of a file: first and last line, e.g. `[11, 12]`; `[11, -1]` is to the end.",
        },
    },
    "required": ["command", "path"],
}
