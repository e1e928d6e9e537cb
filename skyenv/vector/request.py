"""What a run is asked for: by callers of `RolloutPipeline.run`, and by shards that serve a share of it."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from dataclasses import dataclass

from skyenv.core import Task
from skyenv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Numbering:
    """What the one group of a run is called: its number, and those of its samples."""

    group_id: int
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """What a run is asked for; see `RolloutPipeline.run`. `numbering` is that of the first of the groups."""

    tasks: Iterable[Task | str]
    numbering: Numbering
    enough: int | None = None
    priority: int = 0

    @classmethod
    def of(
        cls, tasks: Iterable[Task | str], group_size: int, enough: int | None, priority: int, first_group: int
    ) -> Request:
        """Whole groups, counted from `first_group`. ConfigError for sizes that cannot work."""
        if group_size < 1:
            raise ConfigError("group_size: must be at least 1")
        if enough is not None and not 1 <= enough <= group_size:
            raise ConfigError(f"enough: must be from 1 to group_size ({group_size})")
        return cls(tasks, Numbering(first_group, tuple(range(group_size))), enough, priority)

    @property
    def group_size(self) -> int:
        """Samples of each task."""
        return len(self.numbering.samples)

    @property
    def total(self) -> int | None:
        """How many trajectories are asked for; None for a stream of tasks."""
        return len(self.tasks) * self.group_size if isinstance(self.tasks, Sized) else None
