"""Policies that need no model: what each task's script plays, as texts in a tool-call format.

The texts go through the real engine, renderer, tools and sandboxes like any model's answers. Only the gold policy and
the experts read a task's known fix; nothing of it reaches a prompt.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from skyenv.core import SandboxProvider
from skyenv.engines.scripted import Script
from skyenv.envs.swe.tasks import Fix, SweTask
from skyenv.envs.swe.validation import reference_patch
from skyenv.errors import ConfigError
from skyenv.formats.contract import Format
from skyenv.types import ToolCall, ToolSpec, Trajectory

FINISH = ToolCall("finish", {})
CHUNK = 60_000


def edit_call(task: SweTask, fix: Fix, new: str) -> ToolCall:
    """The editor call that puts `new` where the bug is."""
    path = f"{task.repo_path}/{fix.path}"
    arguments = {"command": "str_replace", "path": path, "old_str": fix.old, "new_str": new}
    return ToolCall("str_replace_editor", arguments)


def empty_script(format: Format) -> list[str]:
    """Finish at once."""
    return [format.render_call(FINISH)]


async def gold_script(task: SweTask, provider: SandboxProvider, format: Format) -> list[str]:
    """Make the known fix through the agent's own tools, then finish. ConfigError for a task without one."""
    if task.fix is not None:
        calls = [edit_call(task, task.fix, task.fix.new)]
    else:
        calls = patch_calls(task.repo_path, await reference_patch(task, provider))
    return [format.render_call(call) for call in (*calls, FINISH)]


def patch_calls(repo_path: str, patch: bytes) -> list[ToolCall]:
    """Shell commands that carry a patch of any bytes into the sandbox and apply it."""
    text = base64.b64encode(patch).decode()
    chunks = [text[start : start + CHUNK] for start in range(0, len(text), CHUNK)]
    commands = [f"printf %s {chunk} >> /tmp/reference.b64" for chunk in chunks]
    commands.append(
        f"cd {repo_path} && base64 -d /tmp/reference.b64 > /tmp/reference.patch"
        " && git apply --whitespace=nowarn /tmp/reference.patch"
    )
    return [ToolCall("execute_bash", {"command": command}) for command in commands]


def expert_scripts(task: SweTask, format: Format) -> list[list[str]]:
    """The right edit first, then one script for each decoy. ConfigError for a task without `fix` and `decoys`."""
    if task.fix is None or not task.decoys:
        raise ConfigError(f"warm start: task {task.task_id!r} has no fix and decoys; choose tasks of level 1")
    edits = [edit_call(task, task.fix, new) for new in (task.fix.new, *task.decoys)]
    return [[format.render_call(edit), format.render_call(FINISH)] for edit in edits]


def corpus(trajectories: Iterable[Trajectory], tools: Sequence[ToolSpec], format: Format) -> list[str]:
    """Everything that was read and written in these trajectories. For training a tokenizer."""
    texts = []
    described = format.render_tools(tools)
    for trajectory in trajectories:
        system, *others = trajectory.prompt
        texts += [system.content + described, *(message.content for message in others)]
        texts += [text for turn in trajectory.turns for text in (turn.text, turn.observation)]
    return texts


def read_scripts(path: Path, tasks: Sequence[SweTask], format: Format) -> dict[str, Script]:
    """Scripts of a file: one list for all tasks, or a mapping from task id. An entry is a call or a text.

    YAML or JSON, such as `[{name: execute_bash, arguments: {command: ls}}, {name: finish}]`.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--script {path}: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--script {path}: not valid YAML: {' '.join(str(error).split())}") from error
    scripts: dict[str, Script] = {}
    for task in tasks:
        entries = data.get(task.task_id) if isinstance(data, Mapping) else data
        if not isinstance(entries, list) or not entries:
            raise ConfigError(f"--script {path}: no list of turns for task {task.task_id!r}")
        scripts[task.task_id] = [_turn(entry, f"--script {path}", format) for entry in entries]
    return scripts


def _turn(entry: Any, where: str, format: Format) -> str:
    if isinstance(entry, str):
        return entry
    if isinstance(entry, Mapping) and isinstance(entry.get("name"), str):
        arguments = entry.get("arguments") or {}
        if isinstance(arguments, Mapping):
            return format.render_call(ToolCall(entry["name"], arguments))
    raise ConfigError(f"{where}: a turn is a text or {{name, arguments}}, not {json.dumps(entry, default=str)[:80]}")
