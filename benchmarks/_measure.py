"""Shared by the benchmark scripts: percentiles, machine facts, and the closing JSON object."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Sequence
from typing import Any


def parse(description: str, **defaults: int | float | str) -> argparse.Namespace:
    """Options of a script: `--json` and one option for each keyword, of its default's type."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"default {default}")
    return parser.parse_args()


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Minimum, median, p95 and p99 in milliseconds."""
    ordered = sorted(1000 * s for s in seconds)
    at = lambda share: ordered[min(len(ordered) - 1, int(share * len(ordered)))]  # noqa: E731
    return {"min": ordered[0], "p50": statistics.median(ordered), "p95": at(0.95), "p99": at(0.99), "n": len(ordered)}


def table(results: dict[str, Any]) -> None:
    """Print the spreads and scalars, a line each; what has no value is left out."""
    for name, value in results.items():
        if isinstance(value, dict):
            print(f"{name:34}" + "".join(f"  {key} {number:9.3f}" for key, number in value.items()))
        elif value is not None:
            print(f"{name:34}  {value:.3f}" if isinstance(value, float) else f"{name:34}  {value}")


def report(results: dict[str, Any], as_json: bool) -> None:
    """Print a table, then the JSON object."""
    table(results)
    if as_json:
        close_with(results)


def close_with(results: dict[str, Any]) -> None:
    """Print the JSON object that a script ends with."""
    machine = {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "kernel": platform.release()}
    print(json.dumps({**results, "machine": machine}))
