"""What a sandbox costs: exec in a live session, create + first exec, fork, delete; in milliseconds.

Baselines in the same process and minute: a command through a bare pipe to bash (the limit), and a fresh `bash -c` for
each command (what a tool without a session pays).
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import anyio
from _measure import parse, report, spread

import skyenv


async def timed(operation: Callable[[], Awaitable[Any]], times: int) -> list[float]:
    """Run an operation again and again; seconds of each."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        await operation()
        seconds.append(time.perf_counter() - start)
    return seconds


def bare_pipe(times: int) -> list[float]:
    """Round trips of `echo` through one bash fed by a pipe."""
    seconds = []
    with subprocess.Popen(["bash", "--norc"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as bash:
        assert bash.stdin is not None
        assert bash.stdout is not None
        for _ in range(times):
            start = time.perf_counter()
            bash.stdin.write("echo alive\n")
            bash.stdin.flush()
            bash.stdout.readline()
            seconds.append(time.perf_counter() - start)
        bash.stdin.close()
    return seconds


def fresh_shell(times: int) -> list[float]:
    """A new `bash -c` for each command."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        subprocess.run(["bash", "-c", "echo alive"], check=True, capture_output=True)
        seconds.append(time.perf_counter() - start)
    return seconds


async def measure(times: int, creates: int) -> dict[str, Any]:
    """All figures; the node server runs in this process."""
    results: dict[str, Any] = {}
    created, deleted, forked = [], [], []
    async with skyenv.connect() as client:
        async with client.sandbox() as box:
            await timed(lambda: box.exec("echo alive"), 20)
            results["exec"] = spread(await timed(lambda: box.exec("echo alive"), times))
            results["bare_pipe"] = spread(bare_pipe(times))
            results["fresh_bash"] = spread(fresh_shell(times))
            await box.exec("head -c 5000000 /dev/urandom > /root/five_megabytes")
            for _ in range(creates):
                start = time.perf_counter()
                async with box.fork() as twin:
                    await twin.exec("true")
                    forked.append(time.perf_counter() - start)
        for _ in range(creates):
            async with AsyncExitStack() as stack:
                start = time.perf_counter()
                box = await stack.enter_async_context(client.sandbox())
                await box.exec("echo alive")
                created.append(time.perf_counter() - start)
                start = time.perf_counter()
            deleted.append(time.perf_counter() - start)
    results["create_and_first_exec"] = spread(created)
    results["fork_and_first_exec"] = spread(forked)
    results["delete"] = spread(deleted)
    results["exec_vs_bare_pipe"] = results["exec"]["p50"] / results["bare_pipe"]["p50"]
    results["exec_vs_fresh_bash"] = results["exec"]["p50"] / results["fresh_bash"]["p50"]
    return results


if __name__ == "__main__":
    options = parse(__doc__ or "", times=500, creates=40)
    report(anyio.run(measure, options.times, options.creates), options.json)
