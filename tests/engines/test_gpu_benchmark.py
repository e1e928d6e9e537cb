"""The benchmark of servers beside a trainer, whose code is the same on a GPU and here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import RealServer

ROOT = Path(__file__).parents[2]
SCRIPT = [sys.executable, str(ROOT / "benchmarks" / "gpu" / "servers.py"), "--json"]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([*SCRIPT, *words], capture_output=True, text=True, check=False, env=environment)


@pytest.mark.engine
@pytest.mark.timeout(1200)
def test_every_part_runs_against_a_real_server(vllm: RealServer) -> None:
    """The server is that of the session; nothing is left out, and rounding is all that differs."""
    words = ["--device", "cpu", "--url", vllm.url, "--model", str(vllm.model), "--rounds", "3", "--minutes", "60"]
    done = run(*words)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["left_out"] == []
    assert found["sync"]["updates"] == 3
    assert found["sync"]["largest_gap_nats"] < 1e-4
    assert found["agreement"]["tokens"] > 100
    assert found["agreement"]["max_abs_nats"] < 1e-4
    assert set(found["tokens_per_second"]) == {"1", "16"}


def test_a_server_without_its_checkpoint_is_refused() -> None:
    done = run("--device", "cpu", "--url", "http://127.0.0.1:9")
    assert done.returncode == 1
    assert "--url needs --model" in done.stderr
