"""Which tools an environment offers: a preset by name, or a list of tools of the user's own.

Tools keep state of an episode, so whatever is named here is made anew for each one; an instance is shared by all
episodes that get it, which is right only for a tool without state, such as a function made a tool by `tool`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from skyenv.core import Tool
from skyenv.errors import ConfigError
from skyenv.plugins import load
from skyenv.tools.bash import ExecuteBash
from skyenv.tools.editor import StrReplaceEditor
from skyenv.tools.finish import Finish
from skyenv.tools.kernel import IPython
from skyenv.tools.openhands import OpenHandsBash, OpenHandsEditor, OpenHandsFinish
from skyenv.tools.search import Search
from skyenv.tools.task_tracker import TaskTracker
from skyenv.tools.think import Think

ToolChoice = str | Tool | Callable[[], Tool]
"""A preset or one of our tools by name, a path `module:name`, an instance, or something that makes one (a class)."""

PRESETS = ("strict", "openhands", "terminal")
EXTRAS = ("ipython", "search", "task_tracker", "think")
_MAX_CHARS = {"strict": 16_000, "openhands": 30_000, "terminal": 16_000}


def default_tools(
    *, preset: str = "strict", observation_max_chars: int | None = None, workdir: str = "/"
) -> tuple[Tool, ...]:
    """Return a fresh shell, editor and `finish`: one set an episode, since tools keep state.

    `preset` "openhands" speaks as OpenHands 0.25 and adds `think`; "terminal" is "strict" with a shell that can run a
    command on a terminal. `observation_max_chars` bounds what one call shows
    (None: as the preset has it); `workdir` is only used to suggest absolute paths. ConfigError for another preset.
    """
    if preset not in PRESETS:
        known = f"a preset ({', '.join(PRESETS)}), a tool ({', '.join(EXTRAS)}) or a path module:name"
        raise ConfigError(f"tools: unknown name {preset!r}; use {known}")
    limit = observation_max_chars or _MAX_CHARS[preset]
    if preset == "openhands":
        editor = OpenHandsEditor(max_chars=min(limit, 16_000), workdir=workdir)
        return OpenHandsBash(max_chars=limit), Think(), OpenHandsFinish(), editor
    shell = ExecuteBash(max_chars=limit, terminal=preset == "terminal")
    return shell, StrReplaceEditor(max_chars=limit, workdir=workdir), Finish()


def make_tools(
    choice: ToolChoice | Sequence[ToolChoice] = "strict",
    *,
    observation_max_chars: int | None = None,
    workdir: str = "/",
) -> tuple[Tool, ...]:
    """Make the tools of one episode; a preset may stand anywhere in a list, beside single tools.

    ConfigError for an unknown preset, a path that leads to no tool, or two tools of one name.
    """
    choices = [choice] if isinstance(choice, str) or not isinstance(choice, Sequence) else list(choice)
    tools: list[Tool] = []
    for item in choices:
        if isinstance(item, str) and item in EXTRAS:
            tools.append(_extra(item, observation_max_chars or 16_000, workdir))
        elif isinstance(item, str) and ":" not in item:
            tools += default_tools(preset=item, observation_max_chars=observation_max_chars, workdir=workdir)
        else:
            tools.append(_one(load("tools", item) if isinstance(item, str) else item))
    names = [tool.spec.name for tool in tools]
    if double := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"tools: two tools are named {double[0]!r}; leave one out")
    return tuple(tools)


def observation_limit(choice: object) -> int:
    """How many characters of one observation the chosen tools want shown."""
    names = [choice] if isinstance(choice, str) else choice if isinstance(choice, Sequence) else []
    return max((_MAX_CHARS[name] for name in names if isinstance(name, str) and name in _MAX_CHARS), default=16_000)


def _extra(name: str, max_chars: int, workdir: str) -> Tool:
    if name == "ipython":
        return IPython(max_chars=max_chars)
    if name == "search":
        return Search(workdir=workdir, max_chars=max_chars)
    return TaskTracker() if name == "task_tracker" else Think()


def _one(found: Any) -> Tool:
    is_maker = isinstance(found, type) or (callable(found) and not isinstance(found, Tool))
    made = found() if is_maker else found
    if not isinstance(made, Tool):
        raise ConfigError(f"tools: {found!r} is not a tool; it needs `spec` and `async run(arguments, sandbox)`")
    return made
