"""Where every trajectory was at every moment, as one compact JSON line each.

A file begins with a line `{"timeline": 1, "unix": seconds}` for every process that wrote to it; the times of the lines
below count from that moment. A line that a crash cut short is skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from skyenv.errors import ConfigError, boundary

FORMAT = 1
LIFELINES_KEPT = 1 << 16
Span = tuple[str, float, float]
"""A state of `skyenv.vector.progress.State`, when it began and when it ended, in seconds."""


@dataclass(frozen=True, slots=True)
class Lifeline:
    """One trajectory: `outcome` is its verdict's status or its failure's kind; `generations` are engine requests."""

    task_id: str
    group_id: int
    sample_index: int
    outcome: str
    reward: float | None
    spans: tuple[Span, ...]
    generations: tuple[tuple[float, float], ...]

    @property
    def start(self) -> float:
        """When it was admitted."""
        return self.spans[0][1] if self.spans else 0.0

    @property
    def end(self) -> float:
        """When its environment was closed."""
        return self.spans[-1][2] if self.spans else 0.0

    def later(self, seconds: float) -> Lifeline:
        """The same, so much later."""
        spans = tuple((state, start + seconds, end + seconds) for state, start, end in self.spans)
        generations = tuple((start + seconds, end + seconds) for start, end in self.generations)
        return replace(self, spans=spans, generations=generations)


class TimelineFile:
    """Appends to a file; `origin` is the moment, in seconds since 1970, from which the lifelines count."""

    def __init__(self, path: Path) -> None:
        self._path, self._begun = path, False

    def append(self, lifelines: Iterable[Lifeline], origin: float) -> None:
        """Write them, and close a line that a crash cut short. Blocks on the disk. OSError when that refuses."""
        rows = [json.dumps(lifeline_to_json(line), separators=(",", ":")) for line in lifelines]
        if not self._begun:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            rows.insert(0, json.dumps({"timeline": FORMAT, "unix": origin}))
            self._begun = True
            if self._path.exists() and not self._path.read_bytes().endswith(b"\n"):
                rows.insert(0, "")
        with self._path.open("a", encoding="utf-8") as file:
            file.write("".join(f"{row}\n" for row in rows))


def read_timeline(path: Path) -> list[Lifeline]:
    """All lifelines of a file on one clock, which starts with the first. ConfigError when there are none."""
    try:
        text = path.read_text("utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"timeline: cannot read {path}: {error.strerror}") from error
    first, offset = None, 0.0
    found = []
    for line in text.splitlines():
        try:
            with boundary(ConfigError, "no line of a timeline"):
                row = json.loads(line)
                if "timeline" in row:
                    first = row["unix"] if first is None else first
                    offset = row["unix"] - first
                else:
                    found.append(lifeline_from_json(row).later(offset))
        except ConfigError:
            continue
    if not found:
        raise ConfigError(f"timeline: {path} holds no trajectories")
    return found


def lifeline_to_json(line: Lifeline) -> dict[str, Any]:
    """As JSON values; times to a tenth of a millisecond."""
    spans = [[state, round(start, 4), round(end, 4)] for state, start, end in line.spans]
    generations = [[round(start, 4), round(end, 4)] for start, end in line.generations]
    named = {"task": line.task_id, "group": line.group_id, "sample": line.sample_index, "outcome": line.outcome}
    return {**named, "reward": line.reward, "spans": spans, "generations": generations}


def lifeline_from_json(row: Mapping[str, Any]) -> Lifeline:
    """The inverse. KeyError, TypeError or ValueError for anything else."""
    spans = tuple((str(state), float(start), float(end)) for state, start, end in row["spans"])
    generations = tuple((float(start), float(end)) for start, end in row["generations"])
    return Lifeline(row["task"], row["group"], row["sample"], row["outcome"], row["reward"], spans, generations)
