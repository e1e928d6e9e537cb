"""The benchmark of rollouts on real sandboxes, cut short: every figure is there, and all play the plan alike."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from skyenv.vector.timeline import read_timeline

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "rollouts.py"


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_all_figures_of_a_short_run(tmp_path: Path) -> None:
    words = ["--tasks", "2", "--samples", "2", "--seeds", "1", "--latency", "0.02", "--sizes", "3", "--turns", "2"]
    command = [sys.executable, str(SCRIPT), *words, "--json", "--timeline", str(tmp_path / "timeline.jsonl")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout.splitlines()[-1])
    for name in ("pipeline", "bounded_batch", "naive_batch"):
        assert 0 < told[name]["share_of_bound"]["median"] <= 1
        assert told[name]["cpu"]["median"] > 0
    assert 0 < told["share_of_plan"]["median"] <= 1
    assert told["share_of_bound"] == told["pipeline"]["share_of_bound"]
    assert told["vs_naive_batch"]["n"] == 1
    assert told["live_3"]["turns"] == 6
    assert told["live_3"]["cpu_ms_per_turn"] > 0
    assert len(read_timeline(tmp_path / "timeline.jsonl")) == 4
