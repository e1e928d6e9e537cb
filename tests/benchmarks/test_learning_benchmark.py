"""The learning benchmark: its variants are configurations that exist, and it reads runs as they were recorded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sky_trainer.config import load
from sky_trainer.grpo import grpo_config

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from learning import JOB, RECIPE, STEPS, VARIANTS  # noqa: E402


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_a_configuration(name: str, tmp_path: Path) -> None:
    variant = VARIANTS[name]
    served = ("--engine.urls", "http://127.0.0.1:8000") if variant.served else ()
    config = load(RECIPE, [*JOB, "--out", str(tmp_path / "run"), *variant.overrides, *served])
    assert grpo_config(config).max_steps == STEPS


def test_runs_are_summed_up_and_drawn(tmp_path: Path) -> None:
    """Two seeds that learned and one that did not; a run that was cut short does not count."""
    for seed, gain in enumerate((0.5, 0.4, 0.1)):
        record(tmp_path / f"sync-{seed}", STEPS, gain)
    record(tmp_path / "lora-0", STEPS - 1, 0.5)
    words = ["--out", str(tmp_path), "--only", "", "--json", "--plot", str(tmp_path / "curves.svg")]
    script = [sys.executable, str(ROOT / "benchmarks" / "learning.py")]
    result = subprocess.run([*script, *words], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    found = json.loads(result.stdout.splitlines()[-1])
    assert (found["sync"]["seeds"], found["sync"]["learned"]) == (3, 2)
    assert found["sync"]["first"] == pytest.approx(0.2)
    assert found["sync"]["last_min"] == pytest.approx(0.3)
    assert found["sync"]["last_max"] == pytest.approx(0.7)
    assert "lora" not in found
    assert (tmp_path / "curves.svg").read_text().count("sync (3 seeds)") >= 1


def record(run: Path, steps: int, gain: float) -> None:
    """A run's files: 0.2 at first, from the middle on higher by `gain`; a line that a kill cut short at the end."""
    run.mkdir()
    rows = [{"step": n + 1, "rollout/resolved": 0.2 + gain * (n >= steps // 2)} for n in range(steps)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 9')
    (run / "wall.json").write_text('{"seconds": 1.0}')
