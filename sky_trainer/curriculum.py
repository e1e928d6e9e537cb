"""Which tasks each batch of rollouts plays: a pure function of the stages and the seed.

Invariants: batch n is the same however often it is asked for and whatever happened to the run between, so a run that
was killed goes on without repeating or losing a task, and its record can be checked against the plan. A stage goes
through its tasks again and again, each of them once before any of them twice; a longer run begins like a shorter one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sky_trainer.assembly import choose_tasks
from sky_trainer.config import Config, RolloutConfig, limited
from skyenv.envs.swe.records import require_records
from skyenv.envs.swe.tasks import SweTask
from skyenv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Stage:
    """So many batches on these tasks, with these rollout settings."""

    number: int
    batches: int
    tasks: tuple[SweTask, ...]
    rollout: RolloutConfig
    shuffle: bool = True


@dataclass(frozen=True, slots=True)
class Batch:
    """What one batch of rollouts plays: a task for each group. `number` counts from 0 over all stages."""

    number: int
    stage: Stage
    tasks: tuple[SweTask, ...]

    def groups(self) -> list[tuple[int, SweTask]]:
        """The number of each group, counted over the whole run, with its task."""
        return list(enumerate(self.tasks, self.number * len(self.tasks)))


class Plan:
    """The batches of a run, `groups` groups each; `length` of them, each of which serves `serves` optimizer steps."""

    def __init__(self, stages: Sequence[Stage], groups: int, seed: int, length: int, serves: int = 1) -> None:
        self.stages, self.groups, self.length, self.serves = tuple(stages), groups, length, serves
        self.seed = seed
        self._batches: dict[int, Batch] = {batch.number: batch for batch in self._all()}
        self.tasks = one_of_each(task for stage in stages for task in stage.tasks)

    def batch(self, number: int) -> Batch:
        """Batch `number`, from 0 to `length` - 1."""
        return self._batches[number]

    def order(self) -> list[int]:
        """For every group of the run, batch by batch, the index of its task in `tasks`."""
        places = {task.task_id: place for place, task in enumerate(self.tasks)}
        return [places[task.task_id] for batch in self._batches.values() for task in batch.tasks]

    def _all(self) -> Iterator[Batch]:
        number = 0
        for stage in self.stages:
            stream = self._stream(stage)
            for _ in range(stage.batches):
                if number == self.length:
                    return
                yield Batch(number, stage, tuple(next(stream) for _ in range(self.groups)))
                number += 1

    def _stream(self, stage: Stage) -> Iterator[SweTask]:
        """The stage's tasks without end, in a new order each time around."""
        around = 0
        while True:
            tasks = list(stage.tasks)
            if stage.shuffle:
                random.Random(f"{self.seed} {stage.number} {around}").shuffle(tasks)
            yield from tasks
            around += 1


def one_of_each(tasks: Iterator[SweTask]) -> list[SweTask]:
    """Every task once. ConfigError when two that differ have the same id."""
    found: dict[str, SweTask] = {}
    for task in tasks:
        if found.setdefault(task.task_id, task) != task:
            raise ConfigError(f"stages: two of them have different tasks of the id {task.task_id!r}; rename one")
    return list(found.values())


def make_plan(config: Config, groups: int, steps_per_batch: int) -> Plan:
    """The plan of a run whose batches hold `groups` groups and serve `steps_per_batch` optimizer steps.

    ConfigError for tasks that cannot be had or were not admitted, and for steps that end within a batch.
    """
    stages = []
    for place, stage in enumerate(config.curriculum):
        tasks = choose_tasks(stage.tasks)
        require_records(tasks, stage.tasks.source)
        if stage.steps % steps_per_batch and place < len(config.curriculum) - 1:
            raise ConfigError(
                f"stages[{place}].steps is {stage.steps}; a batch of rollouts serves {steps_per_batch} steps, write a"
                " multiple of it"
            )
        batches = -(-stage.steps // steps_per_batch)
        rollout = limited(config.rollout, stage.limits)
        stages.append(Stage(place, batches, tuple(tasks), rollout, stage.tasks.shuffle))
    return Plan(stages, groups, config.seed, -(-config.steps // steps_per_batch), steps_per_batch)
