"""The picture of a pipeline: where every trajectory stood at every moment, and below how busy the engine was."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyenv.errors import ConfigError
from skyenv.vector.timeline import Lifeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

COLOURS = {"init": "#4e79a7", "run": "#b7d7a8", "eval": "#f28e2b"}
WAITING, GENERATING, FAILED = "#d9d9d9", "#3a7d34", "#c0392b"
FORMATS = (".svg", ".png", ".pdf")
POINTS = 600


def draw_timeline(
    lines: Sequence[Lifeline],
    path: Path,
    *,
    beside: Sequence[Lifeline] = (),
    slots: int | None = None,
    title: str = "",
) -> None:
    """Draw to an SVG, PNG or PDF file. ConfigError for another ending.

    `slots` is how many requests the engines serve at once (default: the most seen). `beside` are trajectories without a
    row that use the engine too.
    """
    if path.suffix not in FORMATS:
        raise ConfigError(f"--out {path}: must end with {', '.join(FORMATS)}")
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    first, last = min(line.start for line in lines), max(line.end for line in lines)
    ordered = sorted((line.later(-first) for line in lines), key=lambda line: (line.start, line.group_id))
    height = min(12.0, max(3.0, 1.6 + 0.075 * len(ordered)))
    with mpl.rc_context({"font.size": 9, "svg.hashsalt": "timeline", "svg.fonttype": "path", "path.simplify": True}):
        figure = Figure(figsize=(9.5, height + 1.5), layout="constrained")
        FigureCanvasAgg(figure)
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[height, 1.5])
        handles = _draw_trajectories(above, ordered)
        requests = [each for line in beside for each in line.later(-first).generations]
        requests += [each for line in ordered for each in line.generations]
        _draw_engine(below, requests, last - first, slots)
        above.set_title(title or f"{len(ordered)} trajectories through init | run | eval", loc="left", fontsize=11)
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False, handlelength=1.0)
        below.set_xlabel("seconds")
        below.set_xlim(0, last - first)
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=150, metadata=metadata)


def _draw_trajectories(axes: Axes, lines: Sequence[Lifeline]) -> list[Patch]:
    """One row a trajectory; returns the legend."""
    from matplotlib.patches import Patch

    colours = {**{f"{state}_wait": WAITING for state in COLOURS}, **COLOURS}
    bars: dict[str, list[Any]] = {}
    for row, line in enumerate(lines):
        for state, start, end in line.spans:
            if end > start and state in colours:
                bars.setdefault(colours[state], []).append(_box(start, end, row))
        bars.setdefault(GENERATING, []).extend(_box(start, end, row) for start, end in line.generations)
    failed = [(line.end, row) for row, line in enumerate(lines) if line.reward is None]
    _add(axes, bars)
    names = [(COLOURS["init"], "init"), (GENERATING, "run: engine"), (COLOURS["run"], "run: tools")]
    names += [(COLOURS["eval"], "eval"), (WAITING, "waiting for a slot")]
    legend = [Patch(color=colour, label=label) for colour, label in names]
    if failed:
        ends, rows = zip(*failed, strict=True)
        axes.plot(ends, rows, "x", color=FAILED, markersize=4, clip_on=False)
        legend.append(Patch(color=FAILED, label="no reward"))
    axes.set_ylim(len(lines) - 0.3, -0.7)
    axes.set_ylabel("trajectory")
    axes.spines[["top", "right"]].set_visible(False)
    return legend


def _add(axes: Axes, bars: dict[str, list[Any]]) -> None:
    """One path a colour, so that the file stays small."""
    import numpy as np
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    for colour, boxes in bars.items():
        if boxes:
            outline = Outline.make_compound_path_from_polys(np.array(boxes))
            axes.add_patch(PathPatch(outline, facecolor=colour, edgecolor="none", linewidth=0))


def _box(start: float, end: float, row: int) -> list[tuple[float, float]]:
    low, high = row - 0.4, row + 0.4
    return [(start, low), (end, low), (end, high), (start, high)]


def _draw_engine(axes: Axes, requests: Sequence[tuple[float, float]], seconds: float, slots: int | None) -> None:
    """The share of engine slots in use, mean over each 1/`POINTS` of the time."""
    slots = slots or most_at_once(requests) or 1
    edges = [seconds * place / POINTS for place in range(POINTS + 1)]
    shares = [min(1.0, busy / slots) for busy in busy_between(requests, edges)]
    mean = sum(shares) / POINTS
    axes.stairs(shares, edges, fill=True, color=GENERATING, linewidth=0)
    axes.axhline(mean, color="black", linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_ylim(0, 1.02)
    axes.set_yticks([0, 0.5, 1], ["0 %", "50 %", "100 %"])
    axes.set_ylabel(f"engine busy\n({slots} slots)")
    axes.text(1.005, mean, f"mean\n{mean:.0%}", transform=axes.get_yaxis_transform(), va="center")
    axes.spines[["top", "right"]].set_visible(False)


def most_at_once(requests: Iterable[tuple[float, float]]) -> int:
    """How many overlapped at most; one that ends when another begins does not."""
    steps = sorted(step for start, end in requests if end > start for step in ((start, 1), (end, -1)))
    return max(accumulate(change for _at, change in steps), default=0)


def busy_between(requests: Iterable[tuple[float, float]], edges: Sequence[float]) -> list[float]:
    """Mean number of requests under way between each two neighbouring edges."""
    areas = [0.0] * (len(edges) - 1)
    for start, end in requests:
        place = max(0, bisect_right(edges, start) - 1)
        while place < len(areas) and edges[place] < end:
            areas[place] += max(0.0, min(end, edges[place + 1]) - max(start, edges[place]))
            place += 1
    return [area / (high - low) for area, low, high in zip(areas, edges, edges[1:], strict=False) if high > low]
