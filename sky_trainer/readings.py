"""The numbers of a pipeline for people: a table of its stages on a terminal, one line anywhere else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Group

STAGES = ("init", "run", "eval")
COLUMNS: dict[str, tuple[tuple[str, ...], str]] = {
    "slots": (("width",), "{:.1f}"),
    "in use": (("utilisation",), "{:.0%}"),
    "queue mean/max": (("queue_mean", "queue_max"), "{:.1f}"),
    "wait p50/p95/max s": (("wait_p50", "wait_p95", "wait_max"), "{:.3g}"),
    "service p50/p95/max s": (("service_p50", "service_p95", "service_max"), "{:.3g}"),
}


def stage_table(numbers: Mapping[str, float]) -> Group:
    """A row a stage, and below it what came back and what the engine did."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("stage")
    for title in COLUMNS:
        table.add_column(title, justify="right", no_wrap=True)
    for stage in STAGES:
        cells = (
            "/".join(_cell(numbers, f"stage/{stage}/{key}", form) for key in keys) for keys, form in COLUMNS.values()
        )
        table.add_row(stage, *cells)
    return Group(table, *(Text(line) for line in _lines(numbers)))


def one_line(numbers: Mapping[str, float]) -> str:
    """The same in short, for a pipe or a log."""
    stages = (
        f"{stage} {_cell(numbers, f'stage/{stage}/utilisation', '{:.0%}')} in use"
        f" (waits p95 {_cell(numbers, f'stage/{stage}/wait_p95', '{:.3g}')} s)"
        for stage in STAGES
    )
    return "; ".join((", ".join(stages), *_lines(numbers)))


def _lines(numbers: Mapping[str, float]) -> list[str]:
    words = ["done", "failed", "cancelled", "retried"]
    counts = ", ".join(f"{_cell(numbers, f'trajectories/{word}', '{:.0f}')} {word}" for word in words)
    failures = [f"{name[9:]} {count:.0f}" for name, count in sorted(numbers.items()) if name.startswith("failures/")]
    passes = [f"{name} {value:.1%}" for name, value in numbers.items() if name.startswith("pass@")]
    cell = lambda key, form: _cell(numbers, key, form)  # noqa: E731
    return [
        f"trajectories: {counts}, {cell('trajectories/per_hour', '{:.0f}')} an hour,"
        f" sandboxes alive {cell('sandboxes/live_mean', '{:.1f}')} mean {cell('sandboxes/live_max', '{:.0f}')} max"
        + (f"; failures: {', '.join(failures)}" if failures else ""),
        f"engine: idle {cell('engine/idle', '{:.0%}')}, {cell('engine/requests_mean', '{:.1f}')} requests,"
        f" latency p50 {cell('engine/latency_p50', '{:.3g}')} s p95 {cell('engine/latency_p95', '{:.3g}')} s,"
        f" tokens/s {cell('engine/prompt_tokens_per_second', '{:.0f}')} prompt"
        f" {cell('engine/sampled_tokens_per_second', '{:.0f}')} sampled"
        + (f", {numbers['engine/cached']:.0%} cached" if "engine/cached" in numbers else ""),
        f"groups: done in p50 {cell('group/seconds_p50', '{:.3g}')} s p95 {cell('group/seconds_p95', '{:.3g}')} s,"
        f" first to last p95 {cell('group/spread_p95', '{:.3g}')} s" + (f"; {', '.join(passes)}" if passes else ""),
    ]


def _cell(numbers: Mapping[str, float], key: str, form: str) -> str:
    value = numbers.get(key)
    return "-" if value is None else form.format(value)
