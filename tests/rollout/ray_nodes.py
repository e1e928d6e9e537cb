"""A Ray cluster of this machine's loopback: each node a process tree of its own, which a test may kill.

Ray reads the environment when it is imported, so this module stands before that in every test that uses Ray.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

# As for anybody else: a token that all processes of a cluster share, here those of this test session.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

LOOPBACK = "127.0.0.1"
STORE_BYTES = 80 << 20
START_SECONDS = 300.0
HEAD = ("--head", "--port=0", "--include-dashboard=false")
SETTINGS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "5",
    "RAY_memory_monitor_refresh_ms": "0",  # what else the machine does is no reason to kill workers
}


class RayNode:
    """One node: `ray start --block` and everything below it."""

    def __init__(self, folder: Path, *arguments: str, cpus: int = 1, resources: str = "{}") -> None:
        self._log = folder / f"node-{secrets.token_hex(4)}.log"
        common = (
            f"--node-ip-address={LOOPBACK}", f"--num-cpus={cpus}", f"--object-store-memory={STORE_BYTES}",
            f"--resources={resources}", "--block", "--disable-usage-stats",
        )  # fmt: skip
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(Path(sys.executable).parent / "ray"), "start", *arguments, *common],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **SETTINGS},
            )  # fmt: skip

    def wait_for(self, pattern: str) -> str:
        """The first group of what it prints when it is up."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            found = re.search(pattern, self._log.read_text(errors="replace"))
            if found:
                return found[1]
            time.sleep(0.05)
        raise AssertionError(f"no Ray node: {self._log.read_text(errors='replace')}")

    def processes(self) -> list[psutil.Process]:
        """Everything that runs on it."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self._process.pid).children(recursive=True)
        return []

    def kill(self) -> None:
        """All its processes at once, without a word to anybody, as a machine does that loses power."""
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(self._process.pid)
            dead = [top, *top.children(recursive=True)]
            for process in dead:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGSTOP)  # so that none starts another meanwhile
            for process in {*dead, *top.children(recursive=True)}:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self._process.wait()


@contextlib.contextmanager
def ray_nodes(second: str = "{}", cpus: int = 1) -> Iterator[tuple[str, list[RayNode]]]:
    """The address of a head and its nodes, the head first; `second` are the custom resources of the other one."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # sockets lie below it: the path must be short
    nodes: list[RayNode] = []
    try:
        nodes.append(RayNode(folder, *HEAD, f"--temp-dir={folder}", cpus=cpus))
        address = nodes[0].wait_for(r"--address='([^']+)'")
        nodes.append(RayNode(folder, f"--address={address}", cpus=cpus, resources=second))
        nodes[1].wait_for(r"(Ray runtime started)")
        yield address, nodes
    finally:
        for node in reversed(nodes):
            node.kill()
        shutil.rmtree(folder, ignore_errors=True)
