"""Servers of ours as processes of their own, started by the commands that a user would type, and what processes use."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from skyenv.remote.inside.processes import descendants, scan

TOKEN = "benchmark"
CLI = (sys.executable, "-m", "skyenv.cli")


@contextmanager
def server(*arguments: str) -> Iterator[tuple[str, int]]:
    """A server of ours until the block ends: the URL that it printed, and its process id."""
    process = subprocess.Popen([*CLI, *arguments, "--log-level", "warning"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        url = next((word for word in line.split() if word.startswith("http://")), "")
        if not url:
            raise RuntimeError(f"{' '.join(arguments)} ended with status {process.wait()}")
        yield url, process.pid
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


@contextmanager
def node_server(*arguments: str) -> Iterator[str]:
    """One node; its URL."""
    with server("serve", "--port", "0", "--token", TOKEN, *arguments) as (url, _pid):
        yield url


def processes_below(root: int) -> list[int]:
    """A process and all its descendants."""
    return [root, *descendants(root, scan())]


def proportional_bytes(pids: Sequence[int]) -> int:
    """The memory of processes, what they share divided among those who share it (PSS)."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def available_bytes() -> int:
    """What the kernel could still give to programs."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))


@contextmanager
def gateway_with(nodes: int) -> Iterator[str]:
    """A gateway and so many nodes behind it; the gateway's URL."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        join = Path(folder, "join")
        join.write_text("join-benchmark\n")
        joining = ("--port", "0", "--token", TOKEN, "--join-token-file", str(join))
        url, _pid = stack.enter_context(server("gateway", *joining))
        for number in range(nodes):
            named = ("--name", f"node-{number}", "--gateway", url)
            stack.enter_context(server("serve", "--backend", "local", *joining, *named))
        yield url
