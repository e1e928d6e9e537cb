"""Gateways and their nodes as processes, started by the command as people start them."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from skyenv.remote.client import SandboxClient
from tests.ports import free_port


@dataclass
class Fleet:
    """Processes by name; `url` is the gateway's. `folder` holds the join token."""

    folder: Path
    port: int = field(default_factory=free_port)
    running: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    urls: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.urls["gateway"]

    def start(self, name: str, *arguments: str) -> str:
        """Start `skyenv ARGUMENTS`; returns the URL that it prints once it listens."""
        command = [sys.executable, "-m", "skyenv.cli", *arguments]
        process = self.running[name] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        line = process.stdout.readline()
        (self.urls[name],) = [word for word in line.split() if word.startswith("http")] or [""]
        assert self.urls[name], f"{name} ended with status {process.wait()}"
        return self.urls[name]

    def gateway(self, *arguments: str, name: str = "gateway") -> str:
        join = str(self.folder / "join")
        port = str(self.port) if name == "gateway" else "0"
        return self.start(name, "gateway", "--port", port, "--join-token-file", join, *arguments)

    def node(self, name: str, *arguments: str, backend: str = "process") -> str:
        join, gateway = str(self.folder / "join"), ("--gateway", self.url)
        own = ("serve", "--port", "0", "--backend", backend, "--name", name, "--join-token-file", join)
        return self.start(name, *own, *gateway, *arguments)

    def end(self, name: str, number: signal.Signals = signal.SIGINT) -> int:
        process = self.running.pop(name)
        process.send_signal(number)
        assert process.stdout is not None
        process.stdout.close()
        return process.wait(timeout=300)


@contextlib.contextmanager
def fleet_in(folder: Path) -> Iterator[Fleet]:
    """A fleet without any process yet; what still runs at the end is interrupted, the gateway last."""
    (folder / "join").write_text("the nodes' own secret\n".replace(" ", "-"))
    fleet = Fleet(folder)
    try:
        yield fleet
    finally:
        for name in sorted(fleet.running, key=lambda name: name == "gateway"):
            assert fleet.end(name) in (0, -signal.SIGKILL)


async def nodes_known(client: SandboxClient, count: int) -> None:
    """Return once the gateway has heard of so many nodes."""
    with anyio.fail_after(100):
        while (await client.health())["nodes"] != count:
            await anyio.sleep(0.05)
