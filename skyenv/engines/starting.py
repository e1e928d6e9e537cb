"""Inference servers as processes of this machine: what to call them with, when they are ready, how they end.

A server lives in an environment of its own (its pins rarely agree with a trainer's) and is told nothing of ours. It
runs in a session of its own with a lifeline: when the process that started it goes away, however that dies, the whole
session is killed, so no server outlives its run and keeps a GPU. Everything here blocks.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Literal

import httpx

from skyenv.errors import ConfigError, EngineUnavailable

_LIFELINE = 'exec 3<&0; (read -r _ <&3; kill -KILL 0) & exec "$@" </dev/null 3<&-'
_VLLM_ENV = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
_VLLM_CPU_ENV = {
    "TORCH_COMPILE_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
_RANK_ENV = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_RANK_PREFIXES = ("GROUP_", "ROLE_", "TORCHELASTIC_", "ACCELERATE_", "FSDP_")
"""What launchers of training ranks set: a server would take itself for one of them."""
_SGLANG_CPU_ENV = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """A server to start. `python` is the interpreter of the environment that vLLM or SGLang is installed in.

    `model` is a directory or a hub's name, served as `name` (default: the same). `options` go onto the command line as
    they are, after ours, and `env` over the environment. On `device` "cpu" everything is float32 and eager.
    """

    flavour: Literal["vllm", "sglang"]
    python: str
    model: str
    name: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    device: Literal["cuda", "cpu"] = "cuda"
    options: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    def command(self) -> list[str]:
        """The command line."""
        vllm = self.flavour == "vllm"
        return [self.python, "-m", *(_vllm_arguments(self) if vllm else _sglang_arguments(self)), *self.options]

    def environment(self) -> dict[str, str]:
        """What this process has but a rank's own, what the server needs, then `env`.

        Byte code is kept, for imports are slow.
        """
        left_out = ("PYTHONDONTWRITEBYTECODE", *_RANK_ENV)
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in left_out and not name.startswith(_RANK_PREFIXES)
        }
        cpu = self.device == "cpu"
        needed = (_VLLM_ENV | (_VLLM_CPU_ENV if cpu else {})) if self.flavour == "vllm" else {}
        needed |= _SGLANG_CPU_ENV if cpu and self.flavour == "sglang" else {}
        needed |= {"HF_HUB_OFFLINE": "1"} if Path(self.model).is_dir() else {}
        return inherited | needed | dict(self.env)


class RunningServer:
    """A started server: its process is the leader of a session that holds all it forks."""

    def __init__(self, spec: ServerSpec, log: IO[bytes]) -> None:
        self.spec = spec
        self.url = f"http://{spec.host}:{spec.port}"
        self._process = subprocess.Popen(
            ["bash", "-c", _LIFELINE, spec.flavour, *spec.command()],
            env=spec.environment(),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The leader's process id, which is the session's and the group's."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Of the leader; None while it runs."""
        return self._process.poll()

    def ready(self) -> bool:
        """Whether it answers its health page; blocks for two seconds at most. EngineUnavailable when it ended."""
        if self.exit_code is not None:
            raise EngineUnavailable(f"{self.spec.flavour} ended with status {self.exit_code} before it was ready")
        try:
            return httpx.get(f"{self.url}/health", timeout=2.0).status_code == 200
        except httpx.HTTPError:
            return False

    def stop(self, patience: float = 10.0) -> None:
        """Ask it to end, then kill the whole session; blocks for `patience` seconds at most."""
        if self.exit_code is None and patience > 0:
            self._process.terminate()
            try:
                self._process.wait(patience)
            except subprocess.TimeoutExpired:
                pass
        self.kill()

    def kill(self) -> None:
        """Kill the whole session at once, as an out-of-memory killer or a lost machine would."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on now."""
    with closing(socket.socket()) as listener:
        listener.bind((host, 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def started(spec: ServerSpec, log: Path, *, deadline: float = 900.0) -> Iterator[RunningServer]:
    """Start a server, wait until it is ready, stop it when the block ends; it writes to the file `log`.

    Port 0 takes a free one. EngineUnavailable with the log's last lines when it ends early or is not ready `deadline`
    seconds after the start; ConfigError when there is no such interpreter.
    """
    server = start(spec, log)
    try:
        wait_until_ready(server, log, deadline)
        yield server
    finally:
        server.stop()


def start(spec: ServerSpec, log: Path) -> RunningServer:
    """Start a server without waiting for it; the caller stops it."""
    if not Path(spec.python).exists():
        raise ConfigError(f"engine.python: there is no {spec.python}; docs/engines.md says how to make its environment")
    with log.open("ab") as file:
        return RunningServer(spec if spec.port else replace(spec, port=free_port(spec.host)), file)


def wait_until_ready(server: RunningServer, log: Path, deadline: float = 900.0) -> None:
    """Return once the server is ready; raises as `started` does."""
    end = time.monotonic() + deadline
    try:
        while not server.ready():
            if time.monotonic() > end:
                raise EngineUnavailable(f"{server.url} is not ready after {deadline:g} s")
            time.sleep(0.5)
    except EngineUnavailable as error:
        raise EngineUnavailable(f"{error}: {last_lines(log)}") from error


def last_lines(log: Path, count: int = 20) -> str:
    """The end of a log, for an error message."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 16384))
        return "\n" + "\n".join(file.read().decode(errors="replace").splitlines()[-count:])


def _vllm_arguments(spec: ServerSpec) -> list[str]:
    """Logprobs of the distribution that is sampled from; cached tokens reported."""
    on_cpu = ["--dtype", "float32", "--enforce-eager"] if spec.device == "cpu" else []
    return [
        "vllm.entrypoints.openai.api_server",
        *("--model", spec.model, "--served-model-name", spec.name or spec.model),
        *("--host", spec.host, "--port", str(spec.port)),
        *("--logprobs-mode", "processed_logprobs", "--enable-prompt-tokens-details"),
        *on_cpu,
    ]


def _sglang_arguments(spec: ServerSpec) -> list[str]:
    """Idle schedulers sleep; cached tokens reported."""
    on_cpu = [
        *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
        *("--disable-cuda-graph", "--skip-server-warmup"),
    ]
    return [
        "sglang.launch_server",
        *("--model-path", spec.model, "--served-model-name", spec.name or spec.model),
        *("--host", spec.host, "--port", str(spec.port)),
        *("--enable-cache-report", "--sleep-on-idle"),
        *(on_cpu if spec.device == "cpu" else []),
    ]
