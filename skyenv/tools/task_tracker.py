"""The tool that keeps a plan: a list of steps with their states, held by the tool and shown on request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skyenv.core import Sandbox
from skyenv.types import ToolSpec

_STATES = ("todo", "in_progress", "done")
_MARKS = {"todo": "[ ]", "in_progress": "[~]", "done": "[x]"}
_MAX_TASKS = 100
_MAX_CHARS = 500


class TaskTracker:
    """`task_tracker(command, task_list)`; one instance an episode, which holds the list.

    `plan` replaces the whole list or, when any entry is wrong, nothing; `view` shows it.
    """

    def __init__(self) -> None:
        self._tasks: tuple[tuple[str, str, str], ...] = ()
        self.spec = ToolSpec("task_tracker", _DESCRIPTION, _PARAMETERS)

    async def run(self, arguments: Mapping[str, Any], sandbox: Sandbox) -> str:
        """Show or replace the list."""
        if arguments["command"] == "plan":
            if "task_list" not in arguments:
                return "ERROR: command plan needs the parameter task_list."
            read = _read(arguments["task_list"])
            if isinstance(read, str):
                return f"ERROR: {read} The list was not changed."
            self._tasks = read
        return self._show()

    def _show(self) -> str:
        if not self._tasks:
            return "The task list is empty. Use command plan to write one."
        done = sum(status == "done" for _, status, _ in self._tasks)
        lines = [f"Task list ({done} of {len(self._tasks)} done):"]
        for number, (title, status, notes) in enumerate(self._tasks, 1):
            lines.append(f"{number}. {_MARKS[status]} {title}")
            lines += [f"   {line}" for line in notes.splitlines()]
        return "\n".join(lines)


def _read(entries: Sequence[Any]) -> tuple[tuple[str, str, str], ...] | str:
    """The entries as title, status and notes, or what is wrong with the first bad one."""
    if len(entries) > _MAX_TASKS:
        return f"task_list has {len(entries)} entries; at most {_MAX_TASKS} are kept."
    tasks = []
    for number, entry in enumerate(entries, 1):
        if unknown := sorted(set(map(str, entry)) - {"id", "title", "status", "notes"}):
            return f"Entry {number} of task_list has an unknown key {unknown[0][:80]!r}; use title, status, notes."
        title, notes = entry.get("title"), entry.get("notes") or ""
        status = entry.get("status") or "todo"
        if not isinstance(title, str) or not title.strip() or not isinstance(notes, str):
            return f"Entry {number} of task_list needs a title, and title and notes must be text."
        if status not in _STATES:
            return f"The status of entry {number} of task_list must be one of {', '.join(_STATES)}."
        if max(len(title), len(notes)) > _MAX_CHARS:
            return f"The title or the notes of entry {number} of task_list are longer than {_MAX_CHARS} characters."
        tasks.append((" ".join(title.split()), status, notes))
    return tuple(tasks)


_DESCRIPTION = """\
Keep a plan of the work, for tasks with several steps.
* `plan` replaces the list by `task_list`: give every step each time, with its current status.
* `view` shows the list."""

_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "command": {"type": "string", "enum": ["view", "plan"], "description": "What to do."},
        "task_list": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "title": {"type": "string"},
                    "status": {"type": "string", "enum": list(_STATES)},
                    "notes": {"type": "string"},
                },
                "required": ["title"],
            },
            "description": "For `plan`: all steps in order. Status is todo (the default), in_progress or done.",
        },
    },
    "required": ["command"],
}
