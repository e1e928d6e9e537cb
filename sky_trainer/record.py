"""What a run leaves in its directory while it goes: metrics, transcripts, TensorBoard events, the reward plot.

Every line is on disk before the next step starts, so an interrupt loses nothing. A resumed run drops the metrics of
steps after its checkpoint, since those steps are run again; transcripts are only ever added.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from skyenv.trajectory_io import append_trajectories
from skyenv.types import Trajectory

METRICS, TRANSCRIPTS, PLOT = "metrics.jsonl", "trajectories.jsonl", "reward.png"


class RunRecord:
    """The files of one run directory. Close it to flush TensorBoard; `on_step` hears of each step's numbers."""

    def __init__(
        self, run_dir: Path, first_step: int = 0, on_step: Callable[[Mapping[str, Any]], None] | None = None
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter

        run_dir.mkdir(parents=True, exist_ok=True)
        self.run_dir = run_dir
        self.step = first_step
        self._on_step = on_step
        self._started = time.monotonic()
        kept = [row for row in read_metrics(run_dir) if row["step"] <= first_step]
        self._elapsed_before = kept[-1]["elapsed"] if kept else 0.0
        self._last = self._elapsed_before
        (run_dir / METRICS).write_text("".join(_line(row) for row in kept), encoding="utf-8")
        self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step + 1)

    def metrics(self, step: int, numbers: Mapping[str, Any]) -> None:
        """Record the numbers of a step; what is not a finite number is written as null."""
        elapsed = self._elapsed_before + time.monotonic() - self._started
        clean = {name: _finite(value) for name, value in sorted(numbers.items())}
        row = {"step": step, "elapsed": round(elapsed, 3), "step_seconds": round(elapsed - self._last, 3), **clean}
        self._last = elapsed
        with (self.run_dir / METRICS).open("a", encoding="utf-8") as file:
            file.write(_line(row))
        for name, value in clean.items():
            if value is not None:
                self._board.add_scalar(name, value, step)
        self.step = step
        if self._on_step is not None:
            self._on_step(row)

    def trajectory(self, trajectory: Trajectory) -> None:
        """Add one transcript, marked with the optimizer step whose batch it belongs to."""
        append_trajectories(self.run_dir / TRANSCRIPTS, [trajectory], step=self.step + 1)

    def close(self) -> None:
        """Flush TensorBoard and draw the plot from what was recorded."""
        self._board.close()
        plot_rewards(self.run_dir)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The recorded steps of a run, in order; a line cut short by a crash is left out."""
    path = run_dir / METRICS
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def last_checkpoint(run_dir: Path) -> Path | None:
    """The newest complete checkpoint of a run, if any."""
    found = [path for path in run_dir.glob("checkpoint-*") if (path / "trainer_state.json").is_file()]
    return max(found, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


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


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row) + "\n"
