"""What is said of each step, its rollouts, numbers and warnings: to files, reporters and the console."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sky_trainer.alarms import NAMES, Alarms
from sky_trainer.display import Display
from sky_trainer.filters import FilterConfig, Resampling
from sky_trainer.in_loop import InLoop
from sky_trainer.record import RunRecord, read_metrics
from sky_trainer.rollouts import PlannedRollouts
from skyenv.types import TrajectoryGroup


class Watch:
    """Between the trainer and its rollouts: what is filtered, recorded, shown and warned of.

    A batch serves `serves` steps. Alarms know what a resumed run recorded.
    """

    def __init__(
        self,
        record: RunRecord,
        display: Display,
        rollouts: PlannedRollouts,
        evaluation: InLoop | None,
        filters: FilterConfig,
        serves: int,
    ) -> None:
        self._record, self._display, self._rollouts, self._serves = record, display, rollouts, serves
        self._evaluation = evaluation
        self._collect = {
            stage.number: Resampling(rollouts.collect, rollouts.more, stage.tasks, filters, rollouts.plan.seed)
            for stage in rollouts.plan.stages
        }
        self._resampled: dict[str, float] = {}
        self._alarms = Alarms()
        for row in read_metrics(record.run_dir):
            self._alarms.look(row)

    def collect(self, tasks: Sequence[Any], group_size: int) -> list[TrajectoryGroup]:
        """The plan's next batch for the trainer, filtered, recorded as consumed from its step on."""
        batch = self._rollouts.plan.batch(self._rollouts.upcoming)
        collect = self._collect[batch.stage.number]
        groups = collect(tasks, group_size)
        self._resampled = {f"rollout/{name}": float(count) for name, count in collect.counts.items()}
        names = [task.task_id for task in batch.tasks]
        self._record.batch(batch.number * self._serves + 1, batch.stage.number + 1, names, groups)
        return groups

    def numbers(self, step: int, numbers: Mapping[str, Any]) -> dict[str, float]:
        """Record a step, warn where that is due, and return what the trainer does not know."""
        ours = self._rollouts.numbers() | self._resampled
        if self._evaluation is not None:
            ours |= self._evaluation.numbers()
        warned = self._alarms.look({**numbers, **ours})
        names = {warning.name for warning in warned}
        ours |= {f"warning/{name}": float(name in names) for name in NAMES}
        for warning in warned:
            self._display.warn(f"step {step}: {warning.text}")
        self._record.metrics(step, {**numbers, **ours})
        return ours
