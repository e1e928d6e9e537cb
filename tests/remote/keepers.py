"""Containers that nobody can enter, without any cluster: a keeper in namespaces of its own, relays beside it.

`KeeperBackend` makes one for each sandbox, in a copy of a root file system that holds the portable directory, and
reaches it by nothing but the standard input and output of a relay: all that a held exec gives.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx
from anyio.abc import ByteStream, Process, TaskGroup

from skyenv.errors import ConfigError, SandboxUnavailable
from skyenv.remote import portable
from skyenv.remote.backends import Held, Record, Stats
from skyenv.remote.client import SandboxClient
from skyenv.remote.link import Line, Link
from skyenv.remote.node import app_for
from skyenv.remote.protocol import CreateRequest
from skyenv.remote.sandboxes import Node
from skyenv.remote.sending import Sender
from skyenv.remote.tasks import background_tasks

KEY = b"k" * 32
SPACES = ("unshare", "--pid", "--fork", "--kill-child", "--net", "--ipc", "--mount")
CAPABILITIES = "chown dac_override fowner fsetid kill net_bind_service setgid setuid sys_chroot"
SETUP = """
mount -t tmpfs none "$1"; mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay none -o "lowerdir=$0,upperdir=$1/upper,workdir=$1/work" "$1/root"
cd "$1/root"; shift
mount -t proc proc proc; mount -t tmpfs none dev; mkdir dev/pts
mount -t devpts none dev/pts -o newinstance,ptmxmode=666
mknod -m 666 dev/null c 1 3; mknod -m 666 dev/zero c 1 5; mknod -m 666 dev/urandom c 1 9
ln -s pts/ptmx dev/ptmx; ln -s /proc/self/fd dev/fd
exec setpriv --inh-caps=-all --bounding-set="$0" --no-new-privs chroot . "$@"
"""


class Relay(ByteStream):
    """Standard input and output of a relay."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout

    async def send(self, item: bytes) -> None:
        await self._stdin.send(item)

    async def receive(self, max_bytes: int = 65536) -> bytes:
        return await self._stdout.receive(max_bytes)

    async def send_eof(self) -> None:
        await self._stdin.aclose()

    async def aclose(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


class Pod:
    """A running keeper. `relays` counts the lines that were opened; `cut` breaks the one that is."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process, self.relays = process, 0
        self._relay: Relay | None = None

    @property
    def pid(self) -> int:
        """The keeper's pid out here."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        if not children:
            raise SandboxUnavailable("the pod is starting")
        return int(children[0])

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    @contextlib.asynccontextmanager
    async def relay(self) -> AsyncIterator[ByteStream]:
        """What a held exec is for a pod."""
        if not self.is_alive:
            raise SandboxUnavailable("the pod is gone")
        enter = ["nsenter", "-t", str(self.pid), "-p", "-n", "-m", "-i", "--root", "--wd"]
        process = await anyio.open_process(
            [*enter, *portable.command("relay")], stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            self._relay = Relay(process)
            self.relays += 1
            yield self._relay
        finally:
            with anyio.CancelScope(shield=True):
                await self._relay.aclose()
                await process.aclose()

    async def cut(self) -> None:
        """Break the line, as a restarted API server would."""
        if self._relay is not None:
            await self._relay.aclose()

    async def verdict(self) -> str | None:
        return None if self.is_alive else "the pod is gone"

    def line(self, key: bytes = KEY, patience: float = 60.0) -> Line:
        return Line(self.relay, self.verdict, key, patience)


@contextlib.contextmanager
def keeper(
    image: Path, work: Path, *, patience: float = 60.0, shells: tuple[str, ...] = ("/bin/bash",)
) -> Iterator[Pod]:
    """A keeper as process 1, in a root over `image`, which holds the portable directory; `work` is an empty folder."""
    config = {
        "run_dir": "/run/skyenv", "home": "/root", "shells": shells, "file_bytes": None, "patience": patience,
        "python": portable.python(),
    }  # fmt: skip
    bounding = ",".join(("-all", *(f"+{name}" for name in CAPABILITIES.split())))
    setup = SETUP.replace('"$0" --no', f"'{bounding}' --no")
    command = [*SPACES, "sh", "-ec", setup, str(image), str(work), *portable.command("keeper", json.dumps(config))]
    process = subprocess.Popen(command, env={"PATH": os.environ["PATH"], "OF_IMAGE": "yes", "SKYENV_X": "no"})
    try:
        yield Pod(process)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


class KeeperBackend:
    """See the module."""

    name = "keeper"

    def __init__(self, image: Path, work: Path) -> None:
        self._image, self._work = image, work
        self._stack = contextlib.ExitStack()
        self._group: TaskGroup | None = None
        self.pods: dict[str, Pod] = {}
        self._links: dict[str, Link] = {}
        self._env: dict[str, str] = {}

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        with self._stack:
            async with background_tasks() as self._group:
                yield

    def held(self) -> list[Held]:
        return []

    def describe(self) -> dict[str, Any]:
        return {"backend": self.name}

    def environment(self, sandbox: str) -> dict[str, str]:
        return {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/root", **self._env}

    def images(self) -> list[str]:
        return []

    async def pull(self, image: str) -> None:
        raise ConfigError("no images")

    async def create(self, sandbox: str, request: CreateRequest, record: Record) -> socket.socket:
        work = self._work / sandbox
        work.mkdir()
        self.pods[sandbox] = self._stack.enter_context(keeper(self._image, work))
        return await self.attach(sandbox)

    async def attach(self, sandbox: str) -> socket.socket:
        assert self._group is not None
        link = self._links[sandbox] = Link(self.pods[sandbox].line())
        self._group.start_soon(link.run)
        await link.meet(100.0)
        self._env = (await link.ask("environ"))["env"] | {"PATH": "/usr/local/bin:/usr/bin:/bin"}
        return link.socket

    async def note(self, sandbox: str, record: Record) -> None:
        return

    async def stats(self, sandbox: str) -> Stats:
        return Stats()

    async def freeze(self, sandbox: str) -> None:
        await self._links[sandbox].ask("stop")

    async def thaw(self, sandbox: str) -> None:
        await self._links[sandbox].ask("go")

    async def snapshot(self, sandbox: str, shell: bytes, *, idle: bool = False) -> str:
        raise ConfigError("no snapshots")

    def shell_state(self, snapshot: str) -> bytes:
        return b""

    async def delete_snapshot(self, snapshot: str) -> None:
        return

    async def destroy(self, sandbox: str) -> None:
        if sandbox in self._links:
            self._links.pop(sandbox).close("deleted")
            self.pods[sandbox].process.kill()


@contextlib.asynccontextmanager
async def client_of(backend: KeeperBackend) -> AsyncIterator[SandboxClient]:
    """A client of a node in this process that uses the backend."""
    node = Node(backend)
    async with node.open():
        transport = httpx.ASGITransport(app_for(node), raise_app_exceptions=False)
        async with Sender(transport, "http://node", {}) as sender:
            yield SandboxClient(sender)
