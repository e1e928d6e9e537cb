"""`sky_trainer launch` on a Ray cluster of two nodes of this machine: rank, server and workers in own processes."""

from __future__ import annotations

import contextlib
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
import torch

from sky_trainer.cluster import rank_variables, with_whole_paths
from sky_trainer.config import from_mapping
from sky_trainer.models import load_model
from skyenv.errors import ConfigError
from skyenv.trajectory_io import read_trajectories
from skyenv.vector.timeline import read_timeline
from tests.rollout.ray_nodes import RayNode, ray_nodes
from tests.trainer.test_launch import PATIENCE, ROOT, TRAIN

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1800)]

ROLES = {"ray::RankActor": 1, "ray::ServerActor": 1, "serve-engine": 1, "ray::RayShard": 2}


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[str, list[RayNode]]]:
    with ray_nodes(cpus=2) as found:
        yield found


@pytest.fixture
def address(cluster: tuple[str, list[RayNode]]) -> str:
    return cluster[0]


@pytest.fixture
def nodes(cluster: tuple[str, list[RayNode]]) -> list[RayNode]:
    return cluster[1]


def launch(address: str, folder: Path, values: dict[str, Any]) -> subprocess.Popen[str]:
    path = folder / "config.yaml"
    path.write_text(json.dumps({**TRAIN, **values}))
    command = [sys.executable, "-m", "sky_trainer.cli", "launch", str(path), "--ray", address, "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip


def roles(nodes: list[RayNode]) -> dict[str, int]:
    """How many processes there are of each role; one that has just forked looks like two."""
    found: dict[int, tuple[int, str]] = {}
    for process in (process for node in nodes for process in node.processes()):
        with contextlib.suppress(psutil.NoSuchProcess):
            found[process.pid] = process.ppid(), " ".join(process.cmdline())
    lines = [(line, found.get(parent, (0, ""))[1]) for parent, line in found.values() if "bash" not in line]
    return {role: sum(role in line and role not in above for line, above in lines) for role in ROLES}


def finished(run: subprocess.Popen[str], nodes: list[RayNode], end: float) -> tuple[dict[str, int], str]:
    """How many processes of each role there were at most while it ran, and what it said."""
    seen = dict.fromkeys(ROLES, 0)
    try:
        while run.poll() is None and time.monotonic() < end:
            seen = {role: max(count, seen[role]) for role, count in roles(nodes).items()}
            time.sleep(0.5)
    finally:
        if run.poll() is None:
            run.kill()
    said, _ = run.communicate()
    assert run.returncode == 0, said
    return seen, said


@pytest.fixture(scope="module")
def kinds() -> dict[int, Any]:
    """What came of the runs, by their number of ranks: tasks, names of weights, names of numbers."""
    return {}


@pytest.mark.parametrize("ranks", [2, 1])
def test_a_run_over_two_nodes(
    ranks: int, address: str, nodes: list[RayNode], kinds: dict[int, Any], tmp_path: Path
) -> None:
    """With a server and rollout workers. What comes of two ranks is, in kind, what comes of one."""
    end, out = time.monotonic() + 5 * PATIENCE, tmp_path / "run"
    ray = {"ranks": ranks, "workers": 2, "worker_cpus": 0.5, "start_timeout": 600.0}
    values = {"out": str(out), "steps": 2, "save_every": 2, "micro_batch": 2, "ray": ray}
    values["grpo"] = {**TRAIN["grpo"], "entropy_coef": 0.1}  # moves weights whatever the rewards are
    seen, said = finished(launch(address, tmp_path, values), nodes, end)
    assert seen == {**ROLES, "ray::RankActor": ranks}, said
    assert json.loads(said.strip().splitlines()[-1])["run_dir"] == str(out)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    for row in rows:
        assert row["shards/up"] in (1, 2)  # the first step does not wait for the second worker
        assert row["trajectories/done"] == 4
        assert row["stage/run/service_p50"] > 0
        assert row["engine/sampled_tokens_per_second"] > 0
        assert row["sampling/sampling_logp_difference/max"] < 1e-4
    found = list(read_trajectories(out / "trajectories.jsonl"))
    assert len(found) == len(read_timeline(out / "timeline.jsonl")) == 8
    assert sorted({turn.policy_version for t in found for turn in t.turns}) == [0, 1]
    policy, start = (load_model(str(out / name)).state_dict() for name in ("final", "warm_start"))
    assert any(not torch.equal(value, start[name]) for name, value in policy.items())
    tasks = [json.loads(line)["tasks"] for line in (out / "tasks.jsonl").read_text().splitlines()]
    chance = ("failures/", "count/")  # there once something happened
    numbers = {name for row in rows for name in row if not name.startswith(chance)}
    kinds[ranks] = (tasks, set(policy), numbers)
    assert all(kind == kinds[ranks] for kind in kinds.values())
    while any(roles(nodes).values()):
        assert time.monotonic() < end
        time.sleep(0.1)


def test_no_room_is_said_with_what_there_is(address: str, tmp_path: Path) -> None:
    run = launch(address, tmp_path, {"out": str(tmp_path / "run"), "ray": {"rank_gpus": 8.0, "start_timeout": 2.0}})
    said, _ = run.communicate(timeout=PATIENCE)
    assert run.returncode == 2, said
    assert "no room for the ranks within 2 s" in said
    assert "4 CPU, 0 GPU in all" in said


def test_a_dry_run_lays_the_roles_onto_the_cluster(
    address: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**TRAIN, "out": str(tmp_path / "run"), "ray": {"ranks": 2, "workers": 1}}))
    words = [sys.executable, "-m", "sky_trainer.cli", "launch", str(path), "--ray", address, "--dry-run"]
    done = subprocess.run(words, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "layout     1 machine(s) with 2 ranks; 1 machine(s) with 1 server, 1 worker" in done.stdout
    more = subprocess.run([*words, "--ray.ranks", "5"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert more.returncode == 1
    assert "ray: no room for rank 4 of 5, which takes 1 CPUs and 0 GPUs" in more.stdout


def test_paths_are_named_from_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is there or will be; names of a hub and of task sets stay names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    given = {**TRAIN, "out": "runs/x", "model": {"path": "mine"}, "engine": {"kind": "sglang", "directory": "w"}}
    whole = with_whole_paths(from_mapping(given))
    assert whole.out == str(tmp_path / "runs/x")
    assert whole.model.path == str(tmp_path / "mine")
    assert whole.engine.directory == str(tmp_path / "w")
    assert (whole.tasks.source, whole.launch.environment) == ("builtin", "")


def test_workers_need_servers() -> None:
    with pytest.raises(ConfigError, match=r"engine\.kind is embedded"):
        from_mapping({"ray": {"workers": 2}})


def test_ranks_find_each_other_as_torch_expects() -> None:
    assert rank_variables(0, 1, "10.0.0.1", 29500) == {}
    second = rank_variables(1, 2, "10.0.0.1", 29500)
    assert (second["RANK"], second["WORLD_SIZE"], second["MASTER_ADDR"]) == ("1", "2", "10.0.0.1")
