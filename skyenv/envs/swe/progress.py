"""What an agent achieved on its way, for rewards that shape: seen from the calls it made and the verdict on its work.

A watcher reads calls and observations only; it runs nothing and the agent learns nothing of it. It knows the files of
the reference, as the verdict does that it becomes part of.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from skyenv.envs.swe.tasks import Fix, PatchText, SourceFiles, SweTask
from skyenv.types import ToolCall

_PATHS = re.compile(rb"^(?:\+\+\+ b|--- a)/(.+?)\r?$", re.MULTILINE)
_FAILURE = re.compile(
    r"Traceback \(most recent call last\)|\bFAILED\b|\b\w*Error\b|\bassert\b.*\bfailed\b", re.IGNORECASE
)
_WRITES = re.compile(r"\bsed -i|>>?\s*[\w./-]+|\btee\b|\bgit apply\b|\bpatch\b|\.write\(|write_text")
_EDITS = frozenset({"str_replace", "create", "insert", "edit", "write"})


class Progress:
    """Watches one episode."""

    def __init__(self, task: SweTask) -> None:
        self._files = reference_paths(task)
        self._viewed = self._reproduced = self._edited = False

    def watch(self, action: object, observation: str) -> None:
        """Take note of one action and what came of it."""
        arguments = _arguments(action)
        text = json.dumps(arguments, default=str)
        edits = arguments.get("command") in _EDITS or _WRITES.search(str(arguments.get("command", ""))) is not None
        if any(path in text for path in self._files):
            self._viewed = True
        if not self._edited and not edits and _FAILURE.search(observation):
            self._reproduced = True
        self._edited = self._edited or edits

    def milestones(self, verdict: Mapping[str, Any]) -> dict[str, bool]:
        """The milestones that were reached, by the names of `skyenv.rewards.MILESTONES`."""
        patch = str(verdict.get("patch", "")).encode("utf-8", "surrogateescape")
        outcomes = verdict.get("tests", {}).values()
        return {
            "viewed": self._viewed,
            "reproduced": self._reproduced,
            "edited": bool(set(paths_of(patch)) & set(self._files)),
            "imports": any(outcome not in ("missing", "error") for outcome in outcomes),
        }


def reference_paths(task: SweTask) -> Collection[str]:
    """The files that the reference changes, as far as the row says."""
    match task.reference:
        case PatchText(patch):
            found = paths_of(patch)
        case SourceFiles(_, paths):
            found = paths
        case _:
            found = ()
    return tuple(dict.fromkeys([*found, *((task.fix.path,) if isinstance(task.fix, Fix) else ())]))


def paths_of(patch: bytes) -> tuple[str, ...]:
    """The files that a patch names."""
    names = (name.decode("utf-8", "surrogateescape") for name in _PATHS.findall(patch))
    return tuple(dict.fromkeys(names))


def _arguments(action: object) -> Mapping[str, Any]:
    if isinstance(action, ToolCall):
        return action.arguments
    if isinstance(action, Mapping):
        arguments = action.get("arguments", {})
        return arguments if isinstance(arguments, Mapping) else {}
    return {}
