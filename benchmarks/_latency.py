"""How long single operations take: commands, creation, fork, snapshot, rollback, burst. Seconds in, spreads out.

What is compared is measured in rounds: in each round every substrate has its turn, in an order that a seed shuffles,
so that a busy minute of the machine hits all of them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import anyio
from _measure import spread
from _substrates import Execute, Substrate

import skyenv

Results = dict[str, Any]
COMMAND = "echo alive"
ROUNDS = 10
WARM_UPS = 3
FAILURES = (RuntimeError, OSError, skyenv.SkyEnvError)


async def timed(operation: Callable[[], Awaitable[Any]], times: int = 1) -> list[float]:
    """Run an operation again and again; seconds of each."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        await operation()
        seconds.append(time.perf_counter() - start)
    return seconds


async def exec_latency(
    substrates: Sequence[Substrate], times: int, shuffle: random.Random, reasons: dict[str, str]
) -> Results:
    """A command in a living session of each substrate. Slow substrates run fewer, at least five a round.

    What fails is left out from then on, and `reasons` tells why.
    """
    seconds: dict[str, list[float]] = {each.name: [] for each in substrates}
    async with AsyncExitStack() as stack:
        sessions: dict[str, Execute] = {}
        for each in substrates:
            sessions[each.name] = await stack.enter_async_context(each.episode())
            await timed(lambda: sessions[each.name](COMMAND), 10)  # noqa: B023
        for _ in range(ROUNDS):
            for name in shuffle.sample(list(sessions), len(sessions)):
                try:
                    first = await timed(lambda: sessions[name](COMMAND), 5)  # noqa: B023
                    more = 0 if sum(first) > 0.1 else max(0, times // ROUNDS - 5)
                    seconds[name] += first + await timed(lambda: sessions[name](COMMAND), more)  # noqa: B023
                except FAILURES as error:
                    del sessions[name]
                    reasons[f"exec {name}"] = repr(error)
    return {f"exec {name} ms": spread(values) for name, values in seconds.items() if values}


async def create_latency(
    substrates: Sequence[Substrate], times: int, shuffle: random.Random, reasons: dict[str, str]
) -> Results:
    """From the wish for a fresh place to the end of its first command, and from its deletion to nothing left."""
    created: dict[str, list[float]] = {each.name: [] for each in substrates}
    deleted: dict[str, list[float]] = {each.name: [] for each in substrates}
    left = list(substrates)
    for number in range(times + WARM_UPS):
        for each in shuffle.sample(left, len(left)):
            try:
                ready, gone = await _cycle(each)
            except FAILURES as error:
                left.remove(each)
                reasons[f"create {each.name}"] = repr(error)
                continue
            if number >= WARM_UPS:
                created[each.name].append(ready)
                deleted[each.name].append(gone)
    found = {f"create + first exec {name} ms": spread(values) for name, values in created.items() if values}
    return found | {f"teardown {name} ms": spread(values) for name, values in deleted.items() if values}


async def _cycle(substrate: Substrate) -> tuple[float, float]:
    async with AsyncExitStack() as stack:
        start = time.perf_counter()
        execute = await stack.enter_async_context(substrate.episode())
        await execute(COMMAND)
        ready = time.perf_counter() - start
        start = time.perf_counter()
    return ready, time.perf_counter() - start


PREPARE = (
    "mkdir -p repo && cd repo && for d in $(seq 40); do mkdir d$d; for f in $(seq 50); do "
    'echo "value = $f" > d$d/f$f.py; done; done && git init -q . && git add -A && '
    "git -c user.name=a -c user.email=a@b commit -qm base && head -c 5000000 /dev/urandom > big"
)


async def fork_latency(client: Any, times: int) -> Results:
    """A prepared sandbox (a repository of 2 000 files, 5 MB more) and its twins, each ready when it answered.

    `group_fork_vs_one` is what a group of 8 costs, prepared once and forked, over preparing a single one.
    """
    one, eight, twenty, group, ratio = [], [], [], [], []
    for _ in range(max(3, times // 8)):
        start = time.perf_counter()
        async with client.sandbox() as parent:
            result = await parent.exec(PREPARE)
            assert result.exit_code == 0, result.output
            prepared = time.perf_counter() - start
            one += await timed(lambda: _forks(parent, 1), 5)
            eight += await timed(lambda: _forks(parent, 8))
            twenty += await timed(lambda: _forks(parent, 20))
            group.append(prepared)
            ratio.append((prepared + eight[-1]) / prepared)
    creates = await timed(lambda: _creates(client, 8), 3)
    return {
        "init of a prepared sandbox ms": spread(group),
        "fork + first exec ms": spread(one),
        "8 forks at once ms": spread(eight),
        "20 forks at once ms": spread(twenty),
        "8 independent inits at once ms": spread(creates),
        "group_fork_vs_one": sorted(ratio)[len(ratio) // 2],
    }


async def _forks(parent: Any, count: int) -> None:
    """So many twins that are alive at the same time, all made and asked at once; gone afterwards."""
    async with AsyncExitStack() as stack:

        async def fork() -> None:
            twin = await stack.enter_async_context(parent.fork())
            result = await twin.exec("cat /root/repo/d1/f1.py")
            assert result.output == "value = 1\n", result

        async with anyio.create_task_group() as group:
            for _ in range(count):
                group.start_soon(fork)


async def _creates(client: Any, count: int) -> None:
    async def create() -> None:
        async with client.sandbox() as box:
            result = await box.exec(PREPARE)
            assert result.exit_code == 0, result.output

    async with anyio.create_task_group() as group:
        for _ in range(count):
            group.start_soon(create)


async def snapshot_latency(client: Any, times: int) -> Results:
    """Files and shell state kept, and a living session put back to them."""
    kept, put_back = [], []
    async with client.sandbox() as box:
        await box.exec(PREPARE + "; export A=1; f() { echo f; }")
        for number in range(times):
            await box.exec(f"echo {number} > state; export B={number}")
            start = time.perf_counter()
            snapshot = await box.snapshot()
            kept.append(time.perf_counter() - start)
            await box.exec("echo changed > state; export B=changed")
            start = time.perf_counter()
            await box.rollback(snapshot)
            put_back.append(time.perf_counter() - start)
            result = await box.exec("cat state; echo $B; f")
            assert result.output == f"{number}\n{number}\nf\n", result
            await client.delete_snapshot(snapshot)
    return {"snapshot ms": spread(kept), "rollback ms": spread(put_back)}


async def pause_latency(client: Any, times: int) -> Results:
    """Everything in a sandbox stopped, memory kept, and let go on; then the command that it had been asked."""
    paused, resumed = [], []
    async with client.sandbox() as box:
        await box.exec(COMMAND)
        for _ in range(times):
            paused += await timed(box.pause)
            resumed += await timed(box.resume)
            assert (await box.exec(COMMAND)).output == "alive\n"
    return {"pause ms": spread(paused), "resume ms": spread(resumed)}


async def warm_latency(client: Any, times: int) -> Results:
    """A sandbox from a pool that had one ready, to the end of its first command."""
    spec = {"pids": 777}  # a kind of its own
    claimed: list[float] = []
    await client.prefetch(count=times, **spec)
    with anyio.fail_after(60 + times):
        while sum(pool["ready"] for pool in (await client.health())["pools"]) < times:  # noqa: ASYNC110
            await anyio.sleep(0.1)
    async with AsyncExitStack() as stack:

        async def claim() -> None:
            box = await stack.enter_async_context(client.sandbox(**spec))
            await box.exec(COMMAND)

        claimed += await timed(claim, times)
    await client.prefetch(count=0, **spec)
    return {"warm claim + first exec ms": spread(claimed)}


async def burst(client: Any, count: int) -> Results:
    """So many creations at once; how long until the last one answered its first command, and how many failed."""
    failed: list[str] = []
    seconds: list[float] = []
    async with AsyncExitStack() as stack:

        async def create() -> None:
            start = time.perf_counter()
            try:
                box = await stack.enter_async_context(client.sandbox())
                await box.exec("true")
            except skyenv.SkyEnvError as error:
                failed.append(repr(error))
            seconds.append(time.perf_counter() - start)

        async with anyio.create_task_group() as group:
            for _ in range(count):
                group.start_soon(create)
    times = spread(seconds)
    return {"burst ms": times, "burst_max_ms": max(seconds) * 1000, "burst_failed": len(failed)}


async def throughput(client: Any, sandboxes: int, seconds: float) -> float:
    """Commands a second in all, each sandbox one after the other."""
    done = 0
    async with AsyncExitStack() as stack:
        boxes = [await stack.enter_async_context(client.sandbox()) for _ in range(sandboxes)]

        async def work(box: Any) -> None:
            nonlocal done
            while True:
                await box.exec(COMMAND)
                done += 1

        start = time.perf_counter()
        with anyio.move_on_after(seconds):
            async with anyio.create_task_group() as group:
                for box in boxes:
                    group.start_soon(work, box)
        return done / (time.perf_counter() - start)
