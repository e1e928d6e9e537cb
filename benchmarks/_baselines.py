"""Other ways to roll out the same trace: a naive batch, a bounded batch of coroutines, and a three-queue pipeline.

Each returns when every trajectory is through, or raises or hangs where its original would. `live` is how many
sandboxes there are at once; `done` is called with the index of a trajectory when its evaluation is over.

- `naive_batch`: batches of `live`; all inits, then turn by turn all generations and all tool calls, then all
  evaluations. What a trainer's built-in tool loop does.
- `bounded_batch`: batches of `live`; each trajectory a coroutine through all its stages, the batch waits for its last.
- `three_queues`: the pipeline of SkyRL-v0's successor as published: three unbounded queues with as many workers each,
  whose bodies catch nothing; a worker that dies takes its item with it, and the end of the queues is waited for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any

import anyio
from _simulation import Engines, Script

from skyenv.errors import EngineError, SandboxLost, SandboxUnavailable, SkyEnvError

Done = Callable[[int], None]


async def all_of(function: Callable[..., Awaitable[None]], arguments: Iterable[tuple[Any, ...]]) -> None:
    """Run one function side by side; one exception ends all of them, as `asyncio.gather` does without more."""
    async with anyio.create_task_group() as group:
        for each in arguments:
            group.start_soon(function, *each)


async def start(script: Script) -> None:
    """Init."""
    await script.spend("init", script.init, SandboxUnavailable("no sandbox", 1.0))


async def call_tool(script: Script, number: int) -> None:
    """The tool call of a turn."""
    await script.spend(f"tool{number}", script.tool[number], SandboxLost("it died"))


async def judge(script: Script) -> None:
    """Evaluation."""
    await script.spend("evaluate", script.evaluate, SandboxLost("it died"))


async def take_turns(script: Script, engines: Engines) -> None:
    """All turns of a trajectory, one after the other."""
    for number in range(len(script.generate)):
        await engines.serve(script, number)
        await call_tool(script, number)


async def naive_batch(trace: Sequence[Script], engines: Engines, live: int, done: Done) -> None:
    """See the module."""
    for batch in batches(trace, live):
        await all_of(start, [(script,) for _, script in batch])
        for number in range(max(len(script.generate) for _, script in batch)):
            going = [(script, number) for _, script in batch if number < len(script.generate)]
            await all_of(engines.serve, going)
            await all_of(call_tool, going)
        await all_of(judge, [(script,) for _, script in batch])
        for index, _script in batch:
            done(index)


async def bounded_batch(trace: Sequence[Script], engines: Engines, live: int, done: Done) -> None:
    """See the module."""

    async def one(index: int, script: Script) -> None:
        await start(script)
        await take_turns(script, engines)
        await judge(script)
        done(index)

    for batch in batches(trace, live):
        await all_of(one, batch)


async def three_queues(trace: Sequence[Script], engines: Engines, live: int, done: Done) -> None:
    """See the module."""
    senders, receivers = zip(*(anyio.create_memory_object_stream[int](float("inf")) for _ in range(3)), strict=True)
    left, finished = len(trace), anyio.Event()

    async def worker(stage: int, work: Callable[[int], Awaitable[None]]) -> None:
        nonlocal left
        with contextlib.suppress(SkyEnvError):  # the task dies unseen, as an un-awaited asyncio task does
            async for index in receivers[stage]:
                await work(index)
                if stage < 2:
                    senders[stage + 1].send_nowait(index)
                else:
                    left -= 1
                    done(index)
                    if not left:
                        finished.set()

    stages: tuple[Callable[[int], Awaitable[None]], ...] = (
        lambda index: start(trace[index]),
        lambda index: take_turns(trace[index], engines),
        lambda index: judge(trace[index]),
    )
    for index in range(len(trace)):
        senders[0].send_nowait(index)
    async with anyio.create_task_group() as group:
        for stage, work in enumerate(stages):
            for _worker in range(live):
                group.start_soon(worker, stage, work)
        if trace:
            await finished.wait()
        group.cancel_scope.cancel()
    for stream in (*senders, *receivers):
        stream.close()


def batches(trace: Sequence[Script], size: int) -> Iterator[list[tuple[int, Script]]]:
    """Consecutive trajectories with their indices."""
    for start_ in range(0, len(trace), size):
        yield list(enumerate(trace[start_ : start_ + size], start_))


FAILURES = (EngineError, SandboxLost, SandboxUnavailable)
