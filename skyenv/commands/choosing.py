"""Which tasks a command is about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from skyenv.commands.output import print_line
from skyenv.errors import ConfigError

if TYPE_CHECKING:
    from skyenv.envs.swe.tasks import SweTask


def chosen_tasks(place: str, ids: Sequence[str] = ()) -> list[SweTask]:
    """Load a task set and keep `ids` (all when empty). ConfigError for an id that is not there."""
    from skyenv.envs.swe.loading import load_tasks

    return _only(load_tasks(place), place, ids)


def readable_tasks(place: str, ids: Sequence[str] = ()) -> tuple[list[SweTask], list[str]]:
    """As `chosen_tasks`, admitted or not; what cannot be read is told, and comes back as why."""
    from skyenv.envs.swe.loading import load_tasks

    refused: list[str] = []

    def refuse(error: ConfigError) -> None:
        refused.append(str(error))
        print_line(f"REFUSED {error}")

    return _only(load_tasks(place, refused=refuse, admitted=False), place, ids), refused


def _only(tasks: list[SweTask], place: str, ids: Sequence[str]) -> list[SweTask]:
    known = {task.task_id: task for task in tasks}
    for task_id in ids:
        if task_id not in known:
            raise ConfigError(f"{place} has no task {task_id!r}; `skyenv tasks list {place}` names all")
    return [known[task_id] for task_id in ids] if ids else tasks
