"""Servers of ours as processes of their own, started by the commands that a user would type, and what processes use."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread

TOKEN = "benchmark"
CLI = (sys.executable, "-m", "skyenv.cli")


@asynccontextmanager
async def server(*arguments: str) -> AsyncIterator[tuple[str, int]]:
    """A server of ours until the block ends: the URL that it printed, and its process id."""
    process = subprocess.Popen([*CLI, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = await anyio.to_thread.run_sync(process.stdout.readline)
        url = next((word for word in line.split() if word.startswith("http://")), "")
        if not url:
            raise RuntimeError(f"{' '.join(arguments)} ended with status {process.wait()}")
        yield url, process.pid
    finally:
        process.terminate()
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(process.wait)
        process.stdout.close()


@asynccontextmanager
async def node_server(*arguments: str) -> AsyncIterator[str]:
    """One node; its URL."""
    async with server("serve", "--port", "0", "--token", TOKEN, *arguments) as (url, _pid):
        yield url


def processes_below(root: int) -> list[int]:
    """A process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        found.append(pid)
        todo += children.get(pid, [])
    return found


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


@asynccontextmanager
async def gateway_with(nodes: int) -> AsyncIterator[str]:
    """A gateway and so many nodes behind it; the gateway's URL."""
    async with AsyncExitStack() as stack:
        join = await stack.enter_async_context(_join_token())
        url, _pid = await stack.enter_async_context(
            server("gateway", "--port", "0", "--token", TOKEN, "--join-token-file", join)
        )
        for number in range(nodes):
            await stack.enter_async_context(
                server(
                    "serve", "--port", "0", "--token", TOKEN, "--backend", "local",
                    "--name", f"node-{number}", "--gateway", url, "--join-token-file", join,
                )  # fmt: skip
            )
        yield url


@asynccontextmanager
async def _join_token() -> AsyncIterator[str]:
    path = Path(f"/tmp/skyenv-bench-join-{os.getpid()}")
    path.touch(0o600)
    path.write_text("join-benchmark\n")
    try:
        yield str(path)
    finally:
        path.unlink()
