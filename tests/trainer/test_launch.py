"""Servers that a run starts by itself: watched, started again, given up with their last words, never left behind."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from sky_trainer.config import from_mapping
from sky_trainer.environments import ensure_environment
from sky_trainer.supervise import EngineServers, OwnServerSpec, server_specs
from skyenv.errors import ConfigError, EngineUnavailable

pytestmark = pytest.mark.timeout(1800)

ROOT = Path(__file__).parents[2]
PATIENCE = 500.0


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A very small model of a few words, on the disk."""
    from sky_trainer import tiny

    path = tmp_path_factory.mktemp("policy")
    tokenizer = tiny.make_tokenizer(["one", "two"], 300)
    tiny.make_model(tokenizer, hidden=32, layers=1, seed=0).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def own(policy: Path) -> OwnServerSpec:
    return OwnServerSpec("sglang", sys.executable, str(policy), device="cpu", options=("--threads", "1"))


def eventually(what: Callable[[], Any]) -> Any:
    """The first true answer; a failure after `PATIENCE` seconds."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if found := what():
            return found
        time.sleep(0.05)
    raise AssertionError("it did not happen")


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=20.0).status_code == 200
    except httpx.HTTPError:
        return False


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def session_of(pid: int) -> int:
    """The session of a process; 0 when it is gone meanwhile."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def test_a_server_is_watched_started_again_and_given_up(policy: Path, tmp_path: Path) -> None:
    lost = threading.Event()
    servers = EngineServers([own(policy)], tmp_path, restarts=1, health_timeout=8.0, on_lost=lost.set)
    dead: list[int] = []

    def run() -> None:
        with servers:
            (url,), (first,) = servers.urls, servers.pids
            eventually(lambda: healthy(url))
            os.killpg(first, signal.SIGSTOP)  # it hangs: the port is open and nobody answers
            second = eventually(lambda: next((pid for pid in servers.pids if pid != first), 0))
            eventually(lambda: healthy(url))
            os.killpg(second, signal.SIGKILL)
            assert lost.wait(PATIENCE)
            dead.extend([first, second])
            raise InterruptedError  # what the run makes of it

    with pytest.raises(EngineUnavailable, match=r"(?s)no engine server is left.*status -9, after 1 restarts.*serving"):
        run()
    assert servers.pids == ()
    assert not any(alive(pid) for pid in dead)


def test_a_server_that_cannot_start_says_why(policy: Path, tmp_path: Path) -> None:
    spec = OwnServerSpec("sglang", sys.executable, str(policy), options=("--thread-count", "1"))
    servers = EngineServers([spec], tmp_path, restarts=1)
    with pytest.raises(EngineUnavailable, match=r"(?s)ended with status 2, after 1 restarts.*--thread-count"):
        servers.__enter__()
    assert servers.pids == ()


KILLED = """
import sys, time
from pathlib import Path
from sky_trainer.supervise import EngineServers, OwnServerSpec
spec = OwnServerSpec("sglang", sys.executable, sys.argv[1], device="cpu", options=("--threads", "1"))
with EngineServers([spec], Path(sys.argv[2])) as servers:
    print(servers.pids[0], flush=True)
    time.sleep(600)
"""


def test_a_killed_run_leaves_no_server(policy: Path, tmp_path: Path) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(policy), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    leader = int(run.stdout.readline())
    session = [p.pid for p in psutil.process_iter() if alive(p.pid) and session_of(p.pid) == leader]
    assert leader in session
    run.kill()
    run.wait()
    run.stdout.close()
    eventually(lambda: not any(alive(pid) for pid in session))


# A whole run with its own server.

TRAIN = {
    "steps": 3,
    "save_every": 3,
    "micro_batch": 4,
    "cpu_threads": 1,
    "model": {"path": "tiny", "hidden": 32, "layers": 1, "vocab": 600},
    "tasks": {"source": "builtin", "level": 1, "limit": 2},
    "env": {"options": {"prompt": "brief", "observation_max_chars": 200}},
    "rollout": {
        "format": "hermes", "describe_tools": "names", "group_size": 2, "groups_per_step": 2, "max_turns": 2,
        "max_tokens_per_turn": 24, "max_context": 768, "concurrency": 4,
    },
    "warm_start": {"steps": 6, "batch_size": 8},
    "engine": {"kind": "sglang"},
    "launch": {"servers": 1, "program": "transformers", "device": "cpu", "options": ["--threads", "1"]},
    "grpo": {"use_cpu": True, "learning_rate": 1e-3},
}  # fmt: skip


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `sky_trainer train` with these values over those above; ended with the test."""
    started: list[subprocess.Popen[str]] = []

    def run(under: Sequence[str] = (), **values: Any) -> subprocess.Popen[str]:
        path = tmp_path / "config.yaml"
        path.write_text(json.dumps({**TRAIN, **values}))
        command = [sys.executable, *under, "-m", "sky_trainer.cli", "train", str(path)]
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def server_of(run: subprocess.Popen[str]) -> psutil.Process | None:
    for process in psutil.Process(run.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # others come and go
            if "serve-engine" in process.cmdline():
                return process
    return None


def steps_of(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_a_run_outlives_its_server_once_and_stops_when_it_is_lost(
    train: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    run = train(out=str(out))
    eventually(lambda: steps_of(out) >= 1 or run.poll() is not None)
    server = server_of(run)
    assert server is not None, run.communicate()
    server.kill()
    said, errors = run.communicate(timeout=PATIENCE)
    assert run.returncode == 0, said + errors
    assert steps_of(out) == 3
    log = (out / "engines" / "0.log").read_text()
    assert log.count("serving at") == 2
    assert not server.is_running()

    run = train(out=str(out), launch={**TRAIN["launch"], "restarts": 0}, steps=50)  # type: ignore[dict-item]
    eventually(lambda: steps_of(out) >= 4 or run.poll() is not None)
    server = server_of(run)
    assert server is not None, run.communicate()
    server.kill()
    said, errors = run.communicate(timeout=PATIENCE)
    assert run.returncode == 1, said + errors
    assert "no engine server is left" in errors
    assert "serving at" in errors  # the server's last words


def test_two_ranks_outlive_the_server_of_the_first(train: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    """The line that a dry run prints for several GPUs, on processors."""
    out = tmp_path / "run"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run = train(torchrun, out=str(out), micro_batch=2, grpo={**TRAIN["grpo"], "entropy_coef": 0.1})  # type: ignore[dict-item]
    eventually(lambda: steps_of(out) >= 1 or run.poll() is not None)
    server = server_of(run)
    assert server is not None, run.communicate()
    server.kill()
    said, errors = run.communicate(timeout=PATIENCE)
    assert run.returncode == 0, said + errors
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["sampling/sampling_logp_difference/max"] < 1e-4 for row in rows)
    assert (out / "engines" / "0.log").read_text().count("serving at") == 2
    assert said.count("mean reward") == 1


# The environment of an engine, and the section of the configuration.


def wheel(folder: Path, version: str) -> Path:
    """A package as an index serves it, of one module that says its version."""
    files = {
        "little.py": f"print({version!r})\n",
        f"little-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: little\nVersion: {version}\n",
        f"little-{version}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = []
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(text)}")
    record = f"little-{version}.dist-info/RECORD"
    path = folder / f"little-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**files, record: "\n".join([*lines, f"{record},,"]) + "\n"}.items():
            archive.writestr(name, text)
    return path


@pytest.mark.parametrize("installer", ["uv", "pip"])
def test_an_engine_s_environment_is_made_once_and_anew_when_its_list_changes(installer: Any, tmp_path: Path) -> None:
    place = tmp_path / "engine"
    one, two = (str(wheel(tmp_path, version)) for version in ("1.0", "2.0"))
    python = ensure_environment(place, [one], installer)
    (place / "kept").touch()
    assert ensure_environment(place, [one], installer) == python
    assert (place / "kept").exists()

    def says() -> str:
        return subprocess.run([python, "-m", "little"], capture_output=True, text=True, check=True).stdout.strip()

    assert says() == "1.0"
    if installer == "uv":
        ensure_environment(place, [two], installer)
        assert says() == "2.0"
        with pytest.raises(ConfigError, match=r"(?s)launch.install.*failed.*nowhere"):
            ensure_environment(tmp_path / "other", [str(tmp_path / "nowhere-1-py3-none-any.whl")], installer)


def test_environments_of_others_are_left_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no .*bin/python"):
        ensure_environment(tmp_path / "none", [], "uv")
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(ConfigError, match="was not made by"):
        ensure_environment(tmp_path, ["x"], "uv")
    assert (tmp_path / "thesis.txt").exists()


@pytest.mark.parametrize(
    ("engine", "launch", "message"),
    [
        ({}, {"servers": 1}, "engine.kind is embedded"),
        ({"kind": "vllm", "urls": ["http://a"]}, {"servers": 1, "environment": "e"}, "run already"),
        ({"kind": "vllm"}, {"servers": 1}, "launch.environment is empty"),
        ({"kind": "vllm"}, {"servers": 1, "program": "transformers"}, "SGLang's dialect"),
        ({"kind": "vllm"}, {"servers": 2, "environment": "e", "gpus": ["0"]}, "1 sets of devices for 2"),
        ({"kind": "vllm"}, {"servers": -1}, "launch.servers"),
        ({"kind": "vllm"}, {}, "launch.servers"),
    ],
)
def test_sections_that_do_not_fit_are_refused(engine: Any, launch: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_mapping({"engine": engine, "launch": launch})


def test_each_server_gets_its_devices_and_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "of the trainer")
    config = from_mapping(
        {
            "engine": {"kind": "vllm", "token": "secret"},
            "launch": {
                "servers": 2,
                "environment": "/opt/vllm",
                "gpus": ["0,1", "2,3"],
                "options": ["--tensor-parallel-size", "2"],
                "env": {"VLLM_LOGGING_LEVEL": "WARNING"},
            },
        }
    )
    specs = server_specs(config, "Qwen/Qwen3-8B", "/opt/vllm/bin/python")
    assert not {"WORLD_SIZE", "TORCHELASTIC_RUN_ID"} & specs[0].environment().keys()
    assert [spec.environment()["CUDA_VISIBLE_DEVICES"] for spec in specs] == ["0,1", "2,3"]
    for spec in specs:
        command = spec.command()
        assert command[:3] == ["/opt/vllm/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
        assert command[-2:] == ["--tensor-parallel-size", "2"]
        assert "secret" not in command
        assert spec.environment()["VLLM_LOGGING_LEVEL"] == "WARNING"
