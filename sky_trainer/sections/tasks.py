"""The `tasks:` section, and the limits and stages of a curriculum."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from sky_trainer.settings import check_least
from skyenv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TasksConfig:
    """Which tasks: a set's name or path, then only these ids (empty: all), this level, at most `limit`.

    `shuffle`: training takes them in a new order each time around, else always as they stand.
    """

    source: str = "builtin"
    ids: tuple[str, ...] = ()
    level: int | None = None
    limit: int | None = None
    shuffle: bool = True


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """Budgets of an episode where they differ from those of `rollout`."""

    max_turns: int | None = None
    max_tokens_per_turn: int | None = None
    max_context: int | None = None
    wall_clock: float | None = None


@dataclass(frozen=True, slots=True)
class StageConfig:
    """A stage of a curriculum: so many optimizer steps on these tasks, within `limits`."""

    steps: int = 0
    tasks: TasksConfig = field(default_factory=TasksConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)


def check_tasks(tasks: TasksConfig, key: str) -> None:
    """Raise ConfigError naming the field and the fix; `key` is the section's."""
    if not tasks.source:
        raise ConfigError(f"{key}.source is empty; name a set, a file or a folder, such as builtin")
    if tasks.limit is not None:
        check_least({f"{key}.limit": (tasks.limit, 1)})
    twice = [task_id for task_id, times in Counter(tasks.ids).items() if times > 1]
    if twice:
        raise ConfigError(f"{key}.ids names {twice[0]} twice; name each task once")
