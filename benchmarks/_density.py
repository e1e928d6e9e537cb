"""How many sandboxes this machine holds, what an idle one weighs, and how the others answer while some are busy."""

from __future__ import annotations

import gc
import random
import time
from contextlib import AsyncExitStack
from typing import Any

import anyio
from _measure import spread
from _processes import TOKEN, available_bytes, processes_below, proportional_bytes, server

import skyenv

STARTS = 8
WORK = "sleep 0.3; echo worked"


async def density(count: int, busy: float, probes: int, shuffle: random.Random) -> dict[str, Any]:
    """`count` living sandboxes of one client process on one node, `busy` (a share) of them running a command.

    `live_sandboxes` is how many answered at the end, after the probes; the memory is what they add to the node, its
    launcher and their own processes, each shared page counted once (PSS), and beside it what the machine lost.
    """
    arguments = ("serve", "--port", "0", "--token", TOKEN, "--backend", "local", "--slots", str(count + 8))
    with server(*arguments) as (url, pid):
        async with skyenv.connect(url, TOKEN) as client:
            return await _fill(client, pid, count, busy, probes, shuffle)


async def _fill(client: Any, pid: int, count: int, busy: float, probes: int, shuffle: random.Random) -> dict[str, Any]:
    async with client.sandbox() as first:
        await first.exec("true")
    before, free = proportional_bytes(processes_below(pid)), available_bytes()
    async with AsyncExitStack() as stack:
        start = time.perf_counter()
        boxes = await _open(client, stack, count)
        created = time.perf_counter() - start
        gc.collect()
        weight = proportional_bytes(processes_below(pid)) - before
        lost = free - available_bytes()
        seconds = await _probe(boxes, max(1, int(busy * count)), probes, shuffle)
        answered = await _count_answers(boxes)
        start = time.perf_counter()
    closed = time.perf_counter() - start
    return {
        "live_sandboxes": answered,
        "creates_per_second": count / created,
        "deletes_per_second": count / closed,
        "idle_bytes_per_sandbox": weight / len(boxes),
        "machine_bytes_per_sandbox": lost / len(boxes),
        "exec among busy ms": spread(seconds),
    }


async def _open(client: Any, stack: AsyncExitStack, count: int) -> list[Any]:
    boxes: list[Any] = []
    limiter = anyio.Semaphore(STARTS)

    async def create() -> None:
        async with limiter:
            box = await stack.enter_async_context(client.sandbox())
            await box.exec("true")
        boxes.append(box)

    async with anyio.create_task_group() as group:
        for _ in range(count):
            group.start_soon(create)
    return boxes


async def _probe(boxes: list[Any], busy: int, probes: int, shuffle: random.Random) -> list[float]:
    """Seconds of commands in idle sandboxes while `busy` others always run one."""
    order = shuffle.sample(range(len(boxes)), len(boxes))
    working, idle = [boxes[n] for n in order[:busy]], [boxes[n] for n in order[busy:]] or boxes
    seconds: list[float] = []

    async def work(box: Any) -> None:
        while len(seconds) < probes:
            result = await box.exec(WORK)
            assert result.output == "worked\n", result

    async with anyio.create_task_group() as group:
        for box in working:
            group.start_soon(work, box)
        await anyio.sleep(1)
        for _ in range(probes):
            box = shuffle.choice(idle)
            start = time.perf_counter()
            result = await box.exec("echo alive")
            seconds.append(time.perf_counter() - start)
            assert result.output == "alive\n", result
    return seconds


async def _count_answers(boxes: list[Any]) -> int:
    answers = 0
    for box in boxes:
        try:
            result = await box.exec("echo $((6 * 7))")
            answers += result.output.endswith("42\n")
        except skyenv.SkyEnvError as error:
            print(f"a sandbox did not answer: {error!r}")
    return answers
