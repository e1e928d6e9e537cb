"""Learning curves of several seeds as a picture: the mean as a line, what lies between the seeds as a band."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SMOOTH = 5


@dataclass(frozen=True, slots=True)
class Curve:
    """The share of solved rollouts at each step of one run, and how long it took."""

    solved: list[float]
    seconds: float

    @property
    def first(self) -> float:
        """Mean of the first quarter of the steps."""
        return statistics.fmean(self.solved[: len(self.solved) // 4])

    @property
    def last(self) -> float:
        """Mean of the last quarter of the steps."""
        return statistics.fmean(self.solved[-(len(self.solved) // 4) :])


def smooth(values: Sequence[float]) -> list[float]:
    """Means over the steps around each."""
    half = SMOOTH // 2
    return [statistics.fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def draw(path: Path, curves: Mapping[str, Sequence[Curve]], panels: Sequence[Sequence[str]]) -> None:
    """One panel beside the other, each with the variants named for it."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "learning"  # the same picture is the same file
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(panels), figsize=(5.5 * len(panels), 4), sharey=True, squeeze=False)
    for axis, names in zip(axes[0], panels, strict=True):
        for name in names:
            runs = [smooth(curve.solved) for curve in curves[name]]
            steps = range(1, min(map(len, runs)) + 1)
            columns = list(zip(*runs, strict=False))
            (line,) = axis.plot(steps, [statistics.fmean(c) for c in columns], label=f"{name} ({len(runs)} seeds)")
            axis.fill_between(
                steps, [min(c) for c in columns], [max(c) for c in columns], alpha=0.12, color=line.get_color()
            )
        axis.set_xlabel("optimizer step")
        axis.set_ylim(0, 1)
        axis.legend(fontsize=8, loc="lower right")
    axes[0][0].set_ylabel(f"share solved, mean of {SMOOTH} steps")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
