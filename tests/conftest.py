"""Real inference servers for the tests marked `engine`: started once a run, in the background, used by all tests.

SKYENV_VLLM_URL and SKYENV_SGLANG_URL name servers to use instead; they serve a checkpoint that lies on this machine,
and their weights are changed. Else both are started from the environments that `.ci/venvs` makes, as soon as it is
known that a test needs them, and those tests run last.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import anyio
import httpx
import pytest
from hypothesis import HealthCheck, settings

from skyenv.engines.control import control_of
from skyenv.engines.openai import OpenAIEngine
from tests.engines.serve import ENVIRONMENTS, READY_WITHIN

# A job that a script starts in the background, as `.ci/services --lanes` does, ignores interrupts, and so would every
# process that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How fast examples are made says how busy the machine is, not whether the code is right. Each run tries the same
# examples, unless SKYENV_RANDOM_EXAMPLES is set to look for others.
settings.register_profile(
    "busy machine",
    deadline=None,
    derandomize="SKYENV_RANDOM_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("busy machine")

Flavour = Literal["vllm", "sglang"]
VARIABLES = {"vllm": "SKYENV_VLLM_URL", "sglang": "SKYENV_SGLANG_URL"}
STARTED = pytest.StashKey["Started"]()


@dataclass(frozen=True)
class RealServer:
    """A server under test, and the checkpoint whose weights it has when a test begins."""

    flavour: Flavour
    url: str
    model: Path

    def engine(self, *, retry_for: float = 10.0) -> OpenAIEngine:
        """An engine for it, not open yet."""
        return OpenAIEngine(self.url, flavour=self.flavour, retry_for=retry_for)


class Started:
    """The servers of this run: a process that ends with this one, however that ends."""

    def __init__(self, flavours: list[Flavour]) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="skyenv-engines-")
        self.folder = Path(self._temporary.name)
        command = [sys.executable, "-m", "tests.engines.serve", str(self.folder), *flavours]
        with (self.folder / "serve.log").open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, cwd=ENVIRONMENTS.parent
            )

    def url(self, flavour: Flavour) -> str:
        """Where a server answers, once it does."""
        end = time.monotonic() + READY_WITHIN
        while time.monotonic() < end:
            for name in (f"{flavour}.url", f"{flavour}.error"):
                if (self.folder / name).exists():
                    text = (self.folder / name).read_text()
                    assert name.endswith(".url"), text
                    return text
            assert self.process.poll() is None, (self.folder / "serve.log").read_text()[-4000:]
            time.sleep(0.2)
        raise AssertionError(f"{flavour} is not ready after {READY_WITHIN:g} s")

    def stop(self) -> None:
        """End the servers."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.terminate()  # it may still wait for a server to be ready; servers end with their owner
        self.process.wait(60)
        self._temporary.cleanup()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that wait for servers come last, and have the time that servers need."""
    waiting = [item for item in items if item.get_closest_marker("engine") is not None]
    for item in waiting:
        item.add_marker(pytest.mark.timeout(READY_WITHIN))
    items.sort(key=waiting.__contains__)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start what the chosen tests need and nobody named."""
    wanted = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    for item in session.items:
        if item.get_closest_marker("engine") is not None and isinstance(item, pytest.Function):
            chosen = item.callspec.params.values() if hasattr(item, "callspec") else ()
            wanted |= {f"{name}_server" for name in chosen if name in VARIABLES}
    if session.config.option.collectonly:
        return
    flavours: list[Flavour] = [
        flavour
        for flavour in ("vllm", "sglang")
        if f"{flavour}_server" in wanted and not os.environ.get(VARIABLES[flavour])
    ]
    if flavours and all((ENVIRONMENTS / flavour).is_dir() for flavour in flavours):
        session.config.stash[STARTED] = Started(flavours)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End what was started."""
    started = config.stash.get(STARTED, None)
    if started is not None:
        started.stop()


@pytest.fixture(scope="session")
def vllm_server(request: pytest.FixtureRequest) -> RealServer:
    """A running vLLM; a test that changes its weights asks for `vllm`."""
    return _server("vllm", request.config)


@pytest.fixture(scope="session")
def sglang_server(request: pytest.FixtureRequest) -> RealServer:
    """A running SGLang; a test that changes its weights asks for `sglang`."""
    return _server("sglang", request.config)


@pytest.fixture
def vllm(vllm_server: RealServer) -> Iterator[RealServer]:
    """A vLLM that runs nothing and has the weights of its checkpoint, as version 0; they are put back afterwards."""
    anyio.run(as_new, vllm_server)
    yield vllm_server
    anyio.run(as_new, vllm_server)


@pytest.fixture
def sglang(sglang_server: RealServer) -> Iterator[RealServer]:
    """An SGLang that runs nothing and has the weights of its checkpoint, as version 0; they are put back afterwards."""
    anyio.run(as_new, sglang_server)
    yield sglang_server
    anyio.run(as_new, sglang_server)


async def as_new(server: RealServer) -> None:
    async with server.engine() as engine, control_of(engine) as control:
        await control.abort()
        await control.resume()
        await control.load_from_disk(str(server.model), 0)


def _server(flavour: Flavour, config: pytest.Config) -> RealServer:
    url = os.environ.get(VARIABLES[flavour])
    if not url:
        started = config.stash.get(STARTED, None)
        assert started is not None, (
            f"no .engines/{flavour}: run .ci/venvs, or set {VARIABLES[flavour]} to a server's URL"
        )
        url = started.url(flavour)
    page, field = ("/v1/models", "root") if flavour == "vllm" else ("/model_info", "model_path")
    answer = httpx.get(url + page, timeout=100).json()
    return RealServer(flavour, url, Path((answer["data"][0] if flavour == "vllm" else answer)[field]))
