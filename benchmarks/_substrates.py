"""Places in which an agent's commands can run, ours and other people's, behind one interface that a benchmark drives.

A `Substrate` is opened once; each `episode` is a fresh place with its own files, and ends with everything in it gone.
All of them take the same command text and every one must exit with status 0, or the benchmark stops.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

import anyio
import anyio.to_thread
from _processes import TOKEN, node_server

import skyenv

Execute = Callable[[str], Awaitable[None]]
DRIVER = Path(__file__).with_name("peers") / "swerex_driver.py"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # as in a sandbox
SWEREX = "swe-rex==1.4.0"


class CannotRun(Exception):
    """A substrate cannot run on this machine; the text says why."""


class Substrate(Protocol):
    """See the module."""

    name: str

    def opened(self) -> AbstractAsyncContextManager[None]: ...

    def episode(self) -> AbstractAsyncContextManager[Execute]: ...


@contextmanager
def _piped(*command: str) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """A process in a fresh directory, and its pipes; killed at the end."""
    folder = tempfile.mkdtemp(prefix="skyenv-bench-")
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=folder, env={**os.environ, "PATH": PATH}
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process.stdin, process.stdout
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
        shutil.rmtree(folder)


class BarePipe:
    """One bash fed through a pipe, a new one for each episode. No isolation, no server: what nothing can beat."""

    name = "bare_pipe"

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        yield

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[Execute]:
        with _piped("bash", "--noprofile", "--norc") as (source, sink):

            async def execute(command: str) -> None:
                source.write(f"{command}\nprintf '\\n\\001%s\\n' $?\n".encode())
                source.flush()
                while not (line := sink.readline()).startswith(b"\1"):
                    if not line:
                        raise RuntimeError("the shell ended")
                if line != b"\x010\n":
                    raise RuntimeError(f"{command!r} ended with status {line!r}")

            yield execute


class FreshBash:
    """A new `bash -c` for each command: what a tool without a session pays."""

    name = "fresh_bash"

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        yield

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[Execute]:
        folder, run = tempfile.mkdtemp(prefix="skyenv-bench-"), subprocess.run

        async def execute(command: str) -> None:
            run(["bash", "-c", command], check=True, capture_output=True, cwd=folder)

        try:
            yield execute
        finally:
            shutil.rmtree(folder)


class Ours:
    """Our client and a server of ours in a process of its own, over HTTP on loopback."""

    def __init__(
        self,
        name: str,
        server: Callable[[], AbstractContextManager[str]],
        image: str | None = None,
        **spec: Any,
    ) -> None:
        self.name = name
        self._server = server
        self._image = image
        self._spec = spec
        self.client: Any = None

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        with self._server() as url:
            async with skyenv.connect(url, TOKEN) as self.client:
                yield

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[Execute]:
        async with self.client.sandbox(self._image, **self._spec) as box:

            async def execute(command: str) -> None:
                result = await box.exec(command)
                if result.exit_code:
                    raise RuntimeError(f"{command!r} ended with status {result.exit_code}: {result.output[-300:]}")

            yield execute


def local() -> Ours:
    """The `local` backend, isolated, on one node."""
    return Ours("local", lambda: node_server("--backend", "local"), cpus=1.0, memory_bytes=1 << 30)


class SweRex:
    """SWE-ReX from PyPI in a virtual environment of its own, local deployment: no HTTP, no container in its way."""

    name = "swerex"

    def __init__(self, folder: Path) -> None:
        self._python = folder / "bin" / "python"
        self._pipes: tuple[IO[bytes], IO[bytes]]

    @staticmethod
    def install(folder: Path) -> None:
        """Create the virtual environment."""
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(folder / "bin" / "pip"), "install", "--quiet", SWEREX], check=True)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        if not self._python.exists():
            raise CannotRun(f"no SWE-ReX in {self._python.parent.parent}; run with --install-swerex")
        # Its imports happen here, once, as they would in a trainer.
        with _piped(str(self._python), str(DRIVER)) as self._pipes:
            yield

    async def _ask(self, **request: str) -> None:
        source, sink = self._pipes
        source.write(json.dumps(request).encode() + b"\n")
        source.flush()
        line = sink.readline()
        if line.strip() != b"0":
            raise RuntimeError(f"SWE-ReX: {request} ended with {line!r}")

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[Execute]:
        folder = tempfile.mkdtemp(prefix="skyenv-bench-")
        await self._ask(op="start", folder=folder)
        try:
            yield lambda command: self._ask(op="exec", command=command)
        finally:
            await self._ask(op="stop")
            shutil.rmtree(folder)


class DockerExec:
    """`docker exec` over the engine's API for each command, in a container with the same limits."""

    name = "docker_exec"

    def __init__(self, image: str) -> None:
        self._image = image
        self._engine: Any = None

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        import docker

        self._engine = docker.from_env(timeout=120)
        try:
            yield
        finally:
            self._engine.close()

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[Execute]:
        def start() -> Any:
            return self._engine.containers.run(
                self._image, ["sleep", "1000000"], detach=True, init=True, network_disabled=True,
                mem_limit="1g", nano_cpus=1_000_000_000, pids_limit=1024, working_dir="/root",
            )  # fmt: skip

        container = await anyio.to_thread.run_sync(start)

        async def execute(command: str) -> None:
            code, output = await anyio.to_thread.run_sync(
                lambda: container.exec_run(["bash", "-c", command], workdir="/root")
            )
            if code:
                raise RuntimeError(f"docker exec: {command!r} ended with status {code}: {output[-300:]!r}")

        try:
            yield execute
        finally:
            await anyio.to_thread.run_sync(lambda: container.remove(force=True))


def docker_reason() -> str | None:
    """Why there is no engine to measure, or None when one answers at DOCKER_HOST."""
    if "DOCKER_HOST" not in os.environ:
        return "DOCKER_HOST is not set; .ci/services starts an engine"
    try:
        import docker
        from docker.errors import DockerException
    except ImportError:
        return "the docker SDK is not installed"
    try:
        docker.from_env(timeout=10).close()
    except DockerException as error:
        return f"no engine answers: {error}"
    return None
