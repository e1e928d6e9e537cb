"""The fields of a configuration that name files and directories, and what they name however they are spelled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from skyenv.envs.swe.loading import NAMED_SETS

MADE = ("out", "engine.directory", "launch.environment", "launch.logs")
"""What is there or will be."""
THERE = ("model.path", "tasks.source", "evaluation.tasks.source", "stages.tasks.source", "sft.data")
"""What is there, or else is the name of a task set or of something on a hub."""

Change = Callable[[str, str], str]
"""A dotted key and a path in, the path out."""


def over_paths(data: Mapping[str, Any], change: Change) -> dict[str, Any]:
    """The nested values of a configuration with every path in them changed; what is no text stays as it is."""
    return {key: _over(key, value, change) for key, value in data.items()}


def _over(key: str, value: Any, change: Change) -> Any:
    if isinstance(value, Mapping):
        return {name: _over(f"{key}.{name}", item, change) for name, item in value.items()}
    if isinstance(value, list):
        return [_over(key, item, change) for item in value]
    return change(key, value) if isinstance(value, str) and value and key in (*MADE, *THERE) else value


def from_home(key: str, path: str) -> str:
    """With the home directory for a leading `~`, as a shell would write it."""
    return str(Path(path).expanduser()) if path.startswith("~/") else path


def whole(base: Path) -> Change:
    """What is named from the directory `base`, named from the root, links followed; other names stay."""

    def change(key: str, path: str) -> str:
        if key in MADE:
            return str((base / path).resolve())
        if path in ("tiny", *NAMED_SETS):
            return path
        dataset, colon, place = path.partition(":")
        if (base / path).exists() or not colon:
            dataset, colon, place = "", "", path
        there = (base / place).exists()
        return f"{dataset}{colon}{(base / place).resolve()}" if there else path

    return change
