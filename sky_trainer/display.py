"""The console of a run: a live table on a terminal, one line a step anywhere else. Shows numbers, never makes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sky_trainer.readings import stage_table
from skyenv.types import Trajectory
from skyenv.vector.progress import PipelineEvent

COLUMNS: dict[str, tuple[str, str]] = {
    "step": ("step", "{:.0f}"),
    "reward": ("reward", "{:.3f}"),
    "solved": ("rollout/resolved", "{:.0%}"),
    "masked": ("rollout/masked", "{:.0%}"),
    "turns": ("rollout/turns", "{:.1f}"),
    "tokens": ("rollout/sampled_tokens", "{:.0f}"),
    "entropy": ("entropy", "{:.3f}"),
    "grad": ("grad_norm", "{:.2f}"),
    "ratio": ("sampling/importance_sampling_ratio/mean", "{:.4f}"),
    "idle": ("engine/idle", "{:.0%}"),
    "tok/s": ("engine/sampled_tokens_per_second", "{:.0f}"),
    "s/step": ("step_seconds", "{:.1f}"),
    "total s": ("elapsed", "{:.0f}"),
}
BARS = " ▁▂▃▄▅▆▇█"


class Display:
    """Use as a context manager around a run; every method may be called from any thread."""

    def __init__(self, console: Console, title: str, steps: int, rows: int = 14) -> None:
        self._console = console
        self._title = title
        self._steps = steps
        self._rows: deque[Mapping[str, Any]] = deque(maxlen=rows)
        self._rewards: list[float] = []
        self._stage = ""
        self._ended = 0
        self._resolved = 0
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4, transient=False)
        self._interactive = console.is_terminal

    def __enter__(self) -> Self:
        if self._interactive:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._interactive:
            self._live.stop()

    def stage(self, text: str) -> None:
        """Say what the run does now."""
        self._stage = text
        if not self._interactive:
            self._console.print(text, highlight=False)

    def warn(self, text: str) -> None:
        """Say what should be looked at."""
        self._console.print(f"warning: {text}", style="yellow", highlight=False, soft_wrap=True)

    def progress(self, text: str) -> None:
        """Say how far the stage is; shown on a terminal only."""
        if self._interactive:
            self._stage = text

    def event(self, event: PipelineEvent) -> None:
        """Listen to a pipeline: how far its run is."""
        now = event.progress
        self.progress(f"rollouts {now.done}/{now.total}  init {now.init}  run {now.run}  eval {now.eval}")

    def trajectory(self, trajectory: Trajectory) -> None:
        """Count one ended rollout of the step that is being collected."""
        self._ended += 1
        self._resolved += bool(trajectory.verdict.get("resolved"))

    def step(self, row: Mapping[str, Any]) -> None:
        """Show the numbers of a finished step."""
        self._rows.append(row)
        if row.get("reward") is not None:
            self._rewards.append(row["reward"])
        self._ended = self._resolved = 0
        if not self._interactive:
            cells = (f"{name} {_cell(row, key, form)}" for name, (key, form) in COLUMNS.items())
            self._console.print("  ".join(cells), highlight=False, soft_wrap=True)

    def _render(self) -> Group:
        table = Table(title=self._title, title_justify="left", box=None, padding=(0, 1, 0, 0))
        for name in COLUMNS:
            table.add_column(name, justify="right", no_wrap=True)
        for row in self._rows:
            table.add_row(*(_cell(row, key, form) for key, form in COLUMNS.values()))
        done = int(self._rows[-1]["step"]) if self._rows else 0
        status = f"step {done}/{self._steps}  {self._stage}"
        if self._ended:
            status += f"  rollouts of this step: {self._ended} ended, {self._resolved} resolved"
        pipeline = [stage_table(self._rows[-1])] if self._rows and "stage/run/width" in self._rows[-1] else []
        return Group(table, *pipeline, Text(f"reward {sparkline(self._rewards, 60)}"), Text(status))


def sparkline(values: list[float], width: int) -> str:
    """The last `width` values, 0 to 1, as bars."""
    top = len(BARS) - 1
    return "".join(BARS[round(min(1.0, max(0.0, value)) * top)] for value in values[-width:])


def _cell(row: Mapping[str, Any], key: str, form: str) -> str:
    value = row.get(key)
    return "-" if value is None else form.format(value)
