"""What the agent is told: who it is, where the repository lies, what the issue says, how to go about it.

Presets: `codeact` for models that can follow a procedure, `brief` for tiny ones, `agent` for programs that bring
prompts of their own, `terminal` for tasks that say everything themselves. Tool descriptions are not part of a prompt;
the format of the model puts them there.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from skyenv.envs.swe.tasks import SweTask
from skyenv.errors import ConfigError
from skyenv.types import Message


class Preset(NamedTuple):
    """Templates with the fields `repo` and `problem`."""

    system: str
    task: str


_CODEACT = Preset(
    system="""\
You are an autonomous software engineer. You work in a Linux sandbox through tools and nobody answers questions.

- Explore before you edit: find the relevant files, read them, understand the cause.
- Change what is there instead of adding copies of files. Keep edits small and in the style of the code.
- Combine shell commands where that saves steps.
- When something fails, read the error, think of several causes, and check the likely ones first.
- There is no network, and everything you need is installed.""",
    task="""\
The repository in {repo} has this issue:

<issue>
{problem}
</issue>

Change the files of the repository, tests left aside, so that the issue is solved. The tests that will check your work \
are not in the repository, so do not edit or add tests to make them pass.

Go about it like this:
1. Look around in {repo} and read the code that the issue is about.
2. Reproduce the problem with a small script or command.
3. Make the smallest change that solves it at its cause.
4. Run your reproduction and the existing tests again; think of edge cases.
5. Remove files that you made on the way, then call finish.""",
)
_BRIEF = Preset(
    system="You fix bugs in {repo} with the tools. Call finish when done.",
    task="{problem}",
)
_AGENT = Preset(
    system="",
    task="""\
The repository in {repo} has this issue:

<issue>
{problem}
</issue>

Change the files of the repository, tests left aside, so that the issue is solved. There is no network.""",
)
_TERMINAL = Preset(
    system="""\
You work on a Linux machine through tools, as root, until a task is done. Nobody answers questions.

- Look around before you change things, and check your work before you finish.
- When something fails, read the error, think of several causes, and check the likely ones first.
- What counts is the state that the machine is left in. Call finish when the task is done.""",
    task="""\
{problem}

The shell stands in {repo}.""",
)
PRESETS: Mapping[str, Preset] = MappingProxyType(
    {"codeact": _CODEACT, "brief": _BRIEF, "agent": _AGENT, "terminal": _TERMINAL}
)


def get_preset(name: str) -> Preset:
    """Return the preset of that name. ConfigError naming the known ones."""
    if name not in PRESETS:
        raise ConfigError(f"prompt: unknown preset {name!r}; choose {', '.join(PRESETS)}")
    return PRESETS[name]


def task_messages(task: SweTask, preset: Preset) -> tuple[Message, ...]:
    """Return the system and the task message. Braces in an issue stand for themselves."""
    fields = {"repo": task.repo_path, "problem": task.problem.strip()}
    return (
        Message("system", preset.system.format(**fields)),
        Message("user", preset.task.format(**fields)),
    )
