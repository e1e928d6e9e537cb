"""`sky_trainer train` with a section `launch:`: a real vLLM that the run starts, updates, starts again and ends."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from sky_trainer.models import load_model
from tests.engines.serve import ENVIRONMENTS, OPTIONS
from tests.trainer.test_launch import TRAIN

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
PATIENCE = 600.0
CONFIG = {
    **TRAIN,
    "model": {**TRAIN["model"], "hidden": 128},
    "engine": {"kind": "vllm", "sync": "disk"},
    "launch": {"servers": 1, "environment": str(ENVIRONMENTS / "vllm"), "device": "cpu", "options": OPTIONS["vllm"]},
    "grpo": {**TRAIN["grpo"], "entropy_coef": 0.1},
}


def rows(out: Path) -> list[dict[str, float]]:
    path = out / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def session(run: subprocess.Popen[str]) -> list[psutil.Process]:
    """The server and everything that it forked."""
    leaders = [p for p in psutil.Process(run.pid).children() if "vllm.entrypoints.openai.api_server" in p.cmdline()]
    return [process for leader in leaders for process in (leader, *leader.children(recursive=True))]


def test_a_run_starts_its_vllm_and_starts_it_again_when_it_is_killed(tmp_path: Path) -> None:
    """Weights go over the disk before each step; entropy alone moves them, and every step's logprobs agree."""
    out, path = tmp_path / "run", tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, "out": str(out)}))
    command = [sys.executable, "-m", "sky_trainer.cli", "train", str(path)]
    with (tmp_path / "log").open("w") as log:
        run = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + PATIENCE
        while not rows(out) and run.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        first = session(run)
        assert first, (tmp_path / "log").read_text()
        for process in first:
            process.kill()
        assert run.wait(PATIENCE) == 0, (tmp_path / "log").read_text()
    finally:
        run.kill()
        run.wait()
    steps = rows(out)
    assert len(steps) == 3
    for step in steps:
        assert step["grad_norm"] > 0
        assert step["sampling/sampling_logp_difference/max"] < 1e-4
    server = (out / "engines" / "0.log").read_text()
    assert server.count("Application startup complete") == 2
    assert "started again (1 of 3)" in (tmp_path / "log").read_text()
    assert not psutil.wait_procs(first, timeout=10)[1]
    assert sorted(path.name for path in (out / "weights").iterdir()) == ["v00000001", "v00000002"]
    given = load_file(out / "weights" / "v00000002" / "model.safetensors")
    began = load_model(str(out / "warm_start")).state_dict()
    assert max((given[name] - value).abs().max() for name, value in began.items()) > 1e-3
