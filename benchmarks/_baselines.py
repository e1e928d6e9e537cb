"""Other ways to roll out the same trace: a naive batch, a bounded batch of coroutines, and a three-queue pipeline.

Each returns when every trajectory is through, or raises or hangs where its original would. `live` is how many
sandboxes there are at once; `done` is called with the index of a trajectory when its evaluation is over.

- `naive_batch`: batches of `live`; all inits, then turn by turn all generations and all tool calls, then all
  evaluations. What a trainer's built-in tool loop does.
- `bounded_batch`: batches of `live`; each trajectory a coroutine through all its stages, the batch waits for its last.
- `bounded_queues`: the pipeline of SkyRL-v0: as many init, run and eval tasks as `live`, each handling one item and
  then starting its successor while its stage still needs some; the queue before init is unbounded, the other two are
  not. A failed init is taken off what the later stages need. Nothing has a deadline and nothing is repeated; a
  trajectory that fails later comes back empty, to be overwritten with a sibling's.
- `three_queues`: the pipeline of its successor as published: three unbounded queues with as many workers each, whose
  bodies catch nothing; a worker that dies takes its item with it, and the end of the queues is waited for. What limits
  it to 32 generations a process (the default thread pool) is left out, in its favour.

The two pipelines hold no more than their queues do: their live sandboxes are counted, not capped. A sandbox that a
baseline gives up stays alive, unless its whole batch ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any

import anyio
from _simulation import Engines
from _traces import Script

from skyenv.errors import EngineError, SandboxLost, SandboxUnavailable, SkyEnvError

Done = Callable[[int], None]


async def all_of(function: Callable[..., Awaitable[None]], arguments: Iterable[tuple[Any, ...]]) -> None:
    """Run one function side by side; one exception ends all of them, as `asyncio.gather` does without more."""
    async with anyio.create_task_group() as group:
        for each in arguments:
            group.start_soon(function, *each)


async def start(script: Script, engines: Engines) -> None:
    """Init."""
    engines.live.add(1)
    await script.spend("init", script.init, SandboxUnavailable("no sandbox", 1.0))


async def call_tool(script: Script, number: int) -> None:
    """The tool call of a turn."""
    await script.spend(f"tool{number}", script.tool[number], SandboxLost("it died"))


async def judge(script: Script, engines: Engines) -> None:
    """Evaluation, and the end of the sandbox."""
    await script.spend("evaluate", script.evaluate, SandboxLost("it died"))
    engines.live.add(-1)


async def take_turns(script: Script, engines: Engines) -> None:
    """All turns of a trajectory, one after the other."""
    for number in range(len(script.generate)):
        await engines.serve(script, number)
        await call_tool(script, number)


async def naive_batch(trace: Sequence[Script], engines: Engines, live: int, done: Done) -> None:
    """See the module."""
    for batch in batches(trace, live):
        await all_of(start, [(script, engines) for _, script in batch])
        for number in range(max(len(script.generate) for _, script in batch)):
            going = [(script, number) for _, script in batch if number < len(script.generate)]
            await all_of(engines.serve, going)
            await all_of(call_tool, going)
        await all_of(judge, [(script, engines) for _, script in batch])
        for index, _script in batch:
            done(index)


async def bounded_batch(trace: Sequence[Script], engines: Engines, live: int, done: Done) -> None:
    """See the module."""

    async def one(index: int, script: Script) -> None:
        await start(script, engines)
        await take_turns(script, engines)
        await judge(script, engines)
        done(index)

    for batch in batches(trace, live):
        await all_of(one, batch)


async def bounded_queues(trace: Sequence[Script], engines: Engines, live: int, done: Done) -> None:
    """See the module."""
    waiting = list(range(len(trace)))[::-1]
    to_run, runs = anyio.create_memory_object_stream[int](live)
    to_judge, judgements = anyio.create_memory_object_stream[int](live)
    left = {"run": len(trace) - live, "eval": len(trace) - live}  # beyond those that are started at once

    async with anyio.create_task_group() as group:

        async def init() -> None:
            index = waiting.pop()
            try:
                await start(trace[index], engines)
                await to_run.send(index)
            except SkyEnvError:
                left["run"] -= 1
                left["eval"] -= 1
            if waiting:
                group.start_soon(init)

        async def run() -> None:
            index = await runs.receive()
            try:
                await take_turns(trace[index], engines)
            except SkyEnvError:
                trace[index].trouble["lost"] = "fault"
            await to_judge.send(index)
            if left["run"] > 0:
                left["run"] -= 1
                group.start_soon(run)

        async def evaluate() -> None:
            index = await judgements.receive()
            if "lost" not in trace[index].trouble:
                with contextlib.suppress(SkyEnvError):
                    await judge(trace[index], engines)
                    done(index)
            if left["eval"] > 0:
                left["eval"] -= 1
                group.start_soon(evaluate)

        for _task in range(live):
            group.start_soon(run)
            group.start_soon(evaluate)
        for _task in range(min(live, len(waiting))):
            group.start_soon(init)
    for stream in (to_run, runs, to_judge, judgements):
        stream.close()


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
        lambda index: start(trace[index], engines),
        lambda index: take_turns(trace[index], engines),
        lambda index: judge(trace[index], engines),
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
