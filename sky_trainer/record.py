"""What a run leaves in its directory while it goes: metrics, transcripts, tables, TensorBoard events, the reward plot.

Every line is on disk before the next step starts, so an interrupt loses nothing. A resumed run drops what was recorded
of steps after its checkpoint, since those steps are run again; transcripts are only ever added, and a resumed run
trains on those that it finds instead of playing them again.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from sky_trainer.files import append_line, keep_lines, read_lines
from skyenv.errors import ConfigError, boundary
from skyenv.trajectory_io import append_trajectories, trajectory_from_json
from skyenv.types import Trajectory, TrajectoryGroup

METRICS, TRANSCRIPTS, PLOT = "metrics.jsonl", "trajectories.jsonl", "reward.png"
TASKS, ROLLOUTS, EVALUATIONS = "tasks.jsonl", "rollouts.jsonl", "evaluations.jsonl"
MARKED = re.compile(rb'\{"step": (\d+), ')


class RunRecord:
    """The files of one run directory. Close it to flush TensorBoard; `on_step` hears of each step's numbers."""

    def __init__(
        self, run_dir: Path, first_step: int = 0, on_step: Callable[[Mapping[str, Any]], None] | None = None
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter

        run_dir.mkdir(parents=True, exist_ok=True)
        self.run_dir, self.first_step = run_dir, first_step
        self._on_step = on_step
        self._started = time.monotonic()
        for name in (METRICS, TASKS, ROLLOUTS, EVALUATIONS):
            rows = read_lines(run_dir / name) if first_step else ()
            keep_lines(run_dir / name, [row for row in rows if row["step"] <= first_step])
        kept = read_metrics(run_dir)
        self._elapsed_before = kept[-1]["elapsed"] if kept else 0.0
        self._last = self._elapsed_before
        self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step + 1)

    def metrics(self, step: int, numbers: Mapping[str, Any]) -> None:
        """Record the numbers of a step; what is not a finite number is written as null."""
        elapsed = self._elapsed_before + time.monotonic() - self._started
        clean = {name: _finite(value) for name, value in sorted(numbers.items())}
        row = {"step": step, "elapsed": round(elapsed, 3), "step_seconds": round(elapsed - self._last, 3), **clean}
        self._last = elapsed
        append_line(self.run_dir / METRICS, row)
        for name, value in clean.items():
            if value is not None:
                self._board.add_scalar(name, value, step)
        if self._on_step is not None:
            self._on_step(row)

    def trajectory(self, trajectory: Trajectory, step: int) -> None:
        """Add one transcript, marked with the optimizer step whose batch it belongs to."""
        append_trajectories(self.run_dir / TRANSCRIPTS, [trajectory], step=step)

    def batch(self, step: int, stage: int, tasks: Sequence[str], groups: Sequence[TrajectoryGroup]) -> None:
        """Record what trains from this step on: the planned tasks, which are consumed, and a table of the rollouts."""
        append_line(self.run_dir / TASKS, {"step": step, "stage": stage, "tasks": list(tasks)})
        rows = [_table_row(trajectory) for group in groups for trajectory in group.trajectories]
        for row in rows:
            append_line(self.run_dir / ROLLOUTS, {"step": step, **row})
        self._board.add_text("rollouts", _markdown(rows), step)

    def evaluation(self, step: int, result: Mapping[str, Any]) -> None:
        """Record what an evaluation of the policy after this step came to."""
        append_line(self.run_dir / EVALUATIONS, {"step": step, **result})
        for name, value in result.items():
            if (number := _finite(value)) is not None:
                self._board.add_scalar(f"eval/{name}", number, step)

    def close(self) -> None:
        """Flush TensorBoard and draw the plot from what was recorded."""
        self._board.close()
        plot_rewards(self.run_dir)


def stored_trajectories(run_dir: Path, first_step: int) -> dict[int, list[Trajectory]]:
    """Transcripts of steps after `first_step`, by step: rollouts that a killed run had finished.

    A damaged line is left out, and so is what infrastructure spoiled.
    """
    path, found = run_dir / TRANSCRIPTS, dict[int, list[Trajectory]]()
    if not path.is_file():
        return found
    with path.open("rb") as lines:
        for line in lines:
            mark = MARKED.match(line)
            if mark is None or int(mark[1]) <= first_step:
                continue
            try:
                with boundary(ConfigError, "no transcript"):
                    trajectory = trajectory_from_json(json.loads(line))
            except ConfigError:
                continue
            if trajectory.failure is None:
                found.setdefault(int(mark[1]), []).append(trajectory)
    return found


def consumed_tasks(run_dir: Path) -> list[dict[str, Any]]:
    """The tasks of each batch that was trained on, in order: `step`, `stage` (from 1) and `tasks`."""
    return list(read_lines(run_dir / TASKS))


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The recorded steps of a run, in order; a line cut short by a crash is left out."""
    return list(read_lines(run_dir / METRICS))


def last_checkpoint(run_dir: Path) -> Path | None:
    """The newest complete checkpoint of a run, if any."""
    found = sorted(run_dir.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)
    return next((path for path in found if _is_complete(path)), None)


def _is_complete(checkpoint: Path) -> bool:
    """The trainer's state is written last."""
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def quarters(rows: list[dict[str, Any]]) -> tuple[float | None, float | None]:
    """Mean reward of the first and of the last quarter of the recorded steps; None without any reward."""
    rewards = [row["reward"] for row in rows if row.get("reward") is not None]
    if not rewards:
        return None, None
    size = max(1, len(rewards) // 4)
    return fmean(rewards[:size]), fmean(rewards[-size:])


def plot_rewards(run_dir: Path) -> Path | None:
    """Draw reward.png from metrics.jsonl: mean reward of each step's batch and its running mean."""
    points = [(row["step"], row["reward"]) for row in read_metrics(run_dir) if row.get("reward") is not None]
    if not points:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps, rewards = [p[0] for p in points], [p[1] for p in points]
    window = max(1, min(5, len(points)))
    running = [fmean(rewards[max(0, i + 1 - window) : i + 1]) for i in range(len(rewards))]
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(steps, rewards, marker="o", markersize=3, linewidth=0.8, alpha=0.5, label="one step")
    axes.plot(steps, running, linewidth=2.2, label=f"mean of last {window} steps")
    axes.set(xlabel="optimizer step", ylabel="mean reward of the batch", title=f"Reward, {run_dir.name}")
    low, high = min(0.0, *rewards), max(1.0, *rewards)
    axes.set_ylim(low - 0.03, high + 0.03)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(run_dir / PLOT)
    return run_dir / PLOT


def _finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _table_row(trajectory: Trajectory) -> dict[str, Any]:
    versions = [turn.policy_version for turn in trajectory.turns]
    return {
        "task": trajectory.task_id,
        "group": trajectory.group_id,
        "sample": trajectory.sample_index,
        "reward": trajectory.reward,
        "resolved": bool(trajectory.verdict.get("resolved")),
        "status": trajectory.failure.kind if trajectory.failure else trajectory.verdict.get("status"),
        "stop_reason": trajectory.stop_reason,
        "turns": len(trajectory.turns),
        "tokens": trajectory.sampled_tokens,
        "seconds": round(sum(trajectory.seconds.get(stage, 0.0) for stage in ("init", "run", "eval")), 3),
        "attempts": trajectory.attempts,
        "oldest_version": min(versions, default=None),
        "newest_version": max(versions, default=None),
    }


def _markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table as TensorBoard shows it."""
    names = list(rows[0]) if rows else []
    lines = [names, ["---"] * len(names), *(["" if v is None else str(v) for v in row.values()] for row in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)
