"""How long the trajectories of each task took: history from which a run starts its longest groups first."""

from __future__ import annotations

from collections.abc import Iterable

from skyenv.types import Trajectory

SERVICE = ("init", "run", "eval")


class Durations:
    """A mean for each task in which the newest trajectory weighs `weight`; grows by one number a task."""

    def __init__(self, trajectories: Iterable[Trajectory] = (), *, weight: float = 0.3) -> None:
        self._weight = weight
        self._seconds: dict[str, float] = {}
        self._sum = 0.0
        for trajectory in trajectories:
            self.note(trajectory)

    def note(self, trajectory: Trajectory) -> None:
        """Learn from a trajectory that was served to its end; failures and cancelled ones say nothing."""
        if trajectory.failure is not None:
            return
        seconds = sum(trajectory.seconds.get(stage, 0.0) for stage in SERVICE)
        before = self._seconds.get(trajectory.task_id)
        after = seconds if before is None else before + self._weight * (seconds - before)
        self._seconds[trajectory.task_id] = after
        self._sum += after - (before or 0.0)

    def expected(self, task_id: str) -> float:
        """Seconds of service that a trajectory of the task may take; of an unknown task, the mean of all known."""
        known = self._seconds.get(task_id)
        if known is not None:
            return known
        return self._sum / len(self._seconds) if self._seconds else 0.0
