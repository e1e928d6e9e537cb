"""`sky_trainer launch` on a Ray cluster of two nodes of this machine: rank, server and workers in own processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sky_trainer.cluster import rank_variables
from sky_trainer.config import from_mapping
from skyenv.errors import ConfigError
from skyenv.trajectory_io import read_trajectories
from tests.rollout.ray_nodes import ray_nodes
from tests.trainer.test_launch import PATIENCE, ROOT, TRAIN

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

ROLES = {"ray::RankActor": 1, "ray::ServerActor": 1, "serve-engine": 1, "ray::RayShard": 2}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ray_nodes(cpus=2) as (address, _nodes):
        yield address


def launch(address: str, folder: Path, values: dict[str, Any]) -> subprocess.Popen[str]:
    path = folder / "config.yaml"
    path.write_text(json.dumps({**TRAIN, **values}))
    command = [sys.executable, "-m", "sky_trainer.cli", "launch", str(path), "--ray", address, "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip


def roles() -> dict[str, int]:
    """How many processes there are of each role."""
    lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    return {role: sum(role in line for line in lines if "bash" not in line) for role in ROLES}


def test_a_run_over_two_nodes(address: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run = launch(
        address, tmp_path, {"out": str(out), "steps": 2, "save_every": 2, "ray": {"workers": 2, "start_timeout": 300.0}}
    )
    seen = dict.fromkeys(ROLES, 0)
    end = time.monotonic() + 2 * PATIENCE
    try:
        while run.poll() is None and time.monotonic() < end:
            seen = {role: max(count, seen[role]) for role, count in roles().items()}
            time.sleep(0.5)
    finally:
        if run.poll() is None:
            run.kill()
    said, _ = run.communicate()
    assert run.returncode == 0, said
    assert seen == ROLES, said
    assert json.loads(said.strip().splitlines()[-1])["run_dir"] == str(out)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    found = [
        t for path in sorted(out.rglob("*.jsonl")) if path.name != "metrics.jsonl" for t in read_trajectories(path)
    ]
    versions = [turn.policy_version for t in found for turn in t.turns]
    assert sorted(set(versions)) == [0, 1]
    while any(roles().values()):
        assert time.monotonic() < end
        time.sleep(0.1)


def test_no_room_is_said_with_what_there_is(address: str, tmp_path: Path) -> None:
    run = launch(address, tmp_path, {"out": str(tmp_path / "run"), "ray": {"rank_gpus": 8.0, "start_timeout": 2.0}})
    said, _ = run.communicate(timeout=PATIENCE)
    assert run.returncode == 2, said
    assert "no room for the ranks within 2 s" in said
    assert "4 CPU, 0 GPU in all" in said


def test_workers_need_servers() -> None:
    with pytest.raises(ConfigError, match=r"engine\.kind is embedded"):
        from_mapping({"ray": {"workers": 2}})


def test_ranks_find_each_other_as_torch_expects() -> None:
    assert rank_variables(0, 1, "10.0.0.1", 29500) == {}
    second = rank_variables(1, 2, "10.0.0.1", 29500)
    assert (second["RANK"], second["WORLD_SIZE"], second["MASTER_ADDR"]) == ("1", "2", "10.0.0.1")
