"""The simulator: it ends with its figures, plays recorded traces, and tells which schedulers end under faults."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skyenv.trajectory_io import append_trajectories
from skyenv.types import StopReason, Trajectory, Turn

SCRIPT = Path(__file__).parent.parent.parent / "benchmarks" / "pipeline.py"
SMALL = ("--sandboxes", "8", "--engines", "2", "--slots", "2", "--scenarios", "0", "--seeds", "2", "--turns", "2,5")


def run(*options: str) -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, str(SCRIPT), "--json", *SMALL, *options], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def test_it_ends_with_its_headlines_and_their_spreads() -> None:
    found = run("--trajectories", "64")
    for name in ("share_of_bound", "vs_naive", "vs_bounded_batch"):
        assert found[name]["n"] == 2
        assert 0 < found[name]["min"] <= found[name]["median"] <= found[name]["max"]
    assert found["share_of_bound"]["max"] <= 1.0
    assert found["vs_naive"]["min"] > 1.0
    for name in ("pipeline", "longest_first"):
        assert found["clean"][name]["most_live"]["max"] <= 8
        assert found["clean"][name]["ends"]["min"] == 1


def test_under_faults_hangs_slow_starts_and_dead_engines_only_ours_loses_nothing() -> None:
    trouble = ("--faults", "0.2", "--hangs", "0.05", "--slow", "0.1", "--dead", "0.5", "--init", "8,0.1")
    clean = run("--trajectories", "64", *trouble)["clean"]
    assert clean["pipeline"]["ends"]["min"] == 1
    assert clean["pipeline"]["lost"]["max"] == 0
    for name in ("naive_batch", "bounded_batch", "bounded_queues", "three_queues"):
        assert clean[name]["lost"]["min"] > 0 or clean[name]["ends"]["max"] == 0, name


def trajectory(task_id: str, sample: int, seconds: float) -> Trajectory:
    made = Trajectory(task_id, 0, sample, reward=1.0, stop_reason=StopReason.FINISH)
    made.turns += [Turn("", (), "", "stop", 0, seconds, 0.5)] * 3
    made.seconds.update({"init": 4.0, "run": 3 * seconds + 1.5, "eval": 6.0, "eval_wait": 99.0})
    return made


def test_the_times_of_a_recorded_run_are_played(tmp_path: Path) -> None:
    store = tmp_path / "trajectories.jsonl"
    append_trajectories(store, [trajectory(f"t{n}", sample, 10.0 * (n + 1)) for n in range(2) for sample in range(4)])
    found = run("--trajectories", "32", "--group", "4", "--trace", str(store))
    seconds = found["clean"]["pipeline"]["seconds"]
    assert 32 * 30.0 / 4 <= seconds["min"] <= seconds["max"] <= 32 * 75.0 / 4  # 4 slots, 30 or 60 s of generation each


@pytest.mark.parametrize("sandboxes", [1, 200])
def test_any_size_of_cluster(sandboxes: int) -> None:
    found = run("--trajectories", "16", "--sandboxes", str(sandboxes), "--seeds", "1")
    assert found["clean"]["pipeline"]["lost"]["max"] == 0
