"""`sky_trainer train` with a section `launch:`: a real server that the run starts, updates, starts again and ends."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from sky_trainer.models import load_model
from tests.engines.serve import ENVIRONMENTS, OPTIONS
from tests.trainer.test_launch import TRAIN

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
PATIENCE = 600.0
PROGRAMS = {"vllm": "vllm.entrypoints.openai.api_server", "sglang": "sglang.launch_server"}


def config(flavour: str, out: Path) -> dict[str, Any]:
    environment = str(ENVIRONMENTS / flavour)
    return {
        **TRAIN,
        "out": str(out),
        "model": {**TRAIN["model"], "hidden": 128},
        "engine": {"kind": flavour, "sync": "disk"},
        "launch": {"servers": 1, "environment": environment, "device": "cpu", "options": OPTIONS[flavour]},
        "grpo": {**TRAIN["grpo"], "entropy_coef": 0.1},
    }


def rows(out: Path) -> list[dict[str, float]]:
    path = out / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def session(run: subprocess.Popen[str], flavour: str) -> list[psutil.Process]:
    """The server and everything that it forked."""
    found: list[psutil.Process] = []
    for child in psutil.Process(run.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it may end while it is looked at
            if PROGRAMS[flavour] in child.cmdline():
                found += [child, *child.children(recursive=True)]
    return found


@contextmanager
def training(flavour: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A run in `folder`/run, whose output goes to `folder`/log."""
    path = folder / "config.json"
    path.write_text(json.dumps(config(flavour, folder / "run")))
    command = [sys.executable, "-m", "sky_trainer.cli", "train", str(path)]
    with (folder / "log").open("w") as log:
        run = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield run
    finally:
        run.kill()
        run.wait()


def after_the_first_step(run: subprocess.Popen[str], flavour: str, folder: Path) -> list[psutil.Process]:
    """The server's processes, once a step was taken with it."""
    end = time.monotonic() + PATIENCE
    while not rows(folder / "run") and run.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    found = session(run, flavour)
    assert found, (folder / "log").read_text()
    return found


def trained_by_what_was_delivered(out: Path) -> None:
    """Three steps, of which each had the logprobs of the weights that went over the disk before it."""
    steps = rows(out)
    assert len(steps) == 3
    for step in steps:
        assert step["grad_norm"] > 0
        assert step["sampling/sampling_logp_difference/max"] < 1e-4
    assert sorted(path.name for path in (out / "weights").iterdir()) == ["v00000001", "v00000002"]
    given = load_file(out / "weights" / "v00000002" / "model.safetensors")
    began = load_model(str(out / "warm_start")).state_dict()
    assert max((given[name] - value).abs().max() for name, value in began.items()) > 1e-3


def test_a_run_starts_its_vllm_and_starts_it_again_when_it_is_killed(tmp_path: Path) -> None:
    """Weights go over the disk before each step; entropy alone moves them, and every step's logprobs agree."""
    with training("vllm", tmp_path) as run:
        first = after_the_first_step(run, "vllm", tmp_path)
        for process in first:
            process.kill()
        assert run.wait(PATIENCE) == 0, (tmp_path / "log").read_text()
    trained_by_what_was_delivered(tmp_path / "run")
    server = (tmp_path / "run" / "engines" / "0.log").read_text()
    assert server.count("Application startup complete") == 2
    assert "started again (1 of 3)" in (tmp_path / "log").read_text()
    assert not psutil.wait_procs(first, timeout=100)[1]


def test_a_run_starts_its_sglang_and_ends_it(tmp_path: Path) -> None:
    with training("sglang", tmp_path) as run:
        processes = after_the_first_step(run, "sglang", tmp_path)
        assert run.wait(PATIENCE) == 0, (tmp_path / "log").read_text()
    trained_by_what_was_delivered(tmp_path / "run")
    assert not psutil.wait_procs(processes, timeout=60)[1]
