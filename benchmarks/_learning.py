"""Learning curves as a picture: a panel a variant, a thin line a seed, their mean thick."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SMOOTH, COLUMNS = 5, 4
COLOURS = ("#1b6ca8", "#b3541e")


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


def draw(path: Path, curves: Mapping[str, Sequence[Curve]], parts: Mapping[str, Sequence[str]], beside: str) -> None:
    """Rows of panels, each part's after its heading; the mean of `beside` is dashed in every other panel.

    The background is opaque, so that the picture can be read on pages of any colour.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "learning"  # the same picture is the same file
    from matplotlib import pyplot as plt

    heights = [-(-len(names) // COLUMNS) for names in parts.values()]
    size = (2.5 * COLUMNS, 1.8 * sum(heights) + 0.3 * len(heights))
    figure = plt.figure(figsize=size, facecolor="white", layout="constrained")
    subfigures = figure.subfigures(len(parts), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part, heading, rows, colour in zip(subfigures, parts, heights, COLOURS, strict=False):
        part.suptitle(heading, x=0.01, ha="left", fontsize=10, fontweight="bold")
        axes = list(part.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False).flat)
        for axis, name in zip(axes, parts[heading], strict=False):
            if name != beside and beside in curves:
                axis.plot(*mean(curves[beside]), color="#777777", linestyle="--", linewidth=1)
            panel(axis, name, curves[name], colour)
        for axis in axes[len(parts[heading]) :]:
            axis.set_visible(False)
    figure.supxlabel(f"optimizer step; share of rollouts solved, mean of {SMOOTH} steps", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def panel(axis: Any, name: str, runs: Sequence[Curve], colour: str) -> None:
    """One variant's seeds and their mean."""
    for curve in runs:
        smoothed = smooth(curve.solved)
        axis.plot(range(1, len(smoothed) + 1), smoothed, color=colour, alpha=0.4, linewidth=0.9)
    axis.plot(*mean(runs), color=colour, linewidth=2)
    axis.set_title(f"{name} ({len(runs)} {'seed' if len(runs) == 1 else 'seeds'})", fontsize=9)
    axis.set_ylim(0, 1)
    axis.grid(alpha=0.25)
    axis.tick_params(labelsize=8, labelbottom=True)


def mean(runs: Sequence[Curve]) -> tuple[list[int], list[float]]:
    """Steps, and the smoothed share solved at each, over the seeds."""
    columns = list(zip(*(smooth(curve.solved) for curve in runs), strict=False))
    return list(range(1, len(columns) + 1)), [statistics.fmean(column) for column in columns]
