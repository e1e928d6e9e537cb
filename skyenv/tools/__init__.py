"""The tools a software agent works with. A tool's mistakes-by-the-model are answers; only infrastructure raises."""

from __future__ import annotations

from skyenv.core import Tool
from skyenv.tools.bash import ExecuteBash
from skyenv.tools.editor import StrReplaceEditor
from skyenv.tools.finish import Finish
from skyenv.tools.schema import check_arguments

__all__ = ["ExecuteBash", "Finish", "StrReplaceEditor", "check_arguments", "default_tools"]


def default_tools(*, observation_max_chars: int = 16_000, workdir: str = "/") -> tuple[Tool, ...]:
    """Return fresh `execute_bash`, `str_replace_editor` and `finish`: one set an episode, since tools keep state.

    `observation_max_chars` bounds what one call shows; `workdir` is only used to suggest absolute paths.
    """
    return (
        ExecuteBash(max_chars=observation_max_chars),
        StrReplaceEditor(max_chars=observation_max_chars, workdir=workdir),
        Finish(),
    )
