"""Synchronous callers of asynchronous objects: order, errors, interrupts, and an end that is never forgotten."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import anyio
import pytest

from skyenv.portal import Portal


async def value(of: int) -> int:
    await anyio.sleep(0)
    return of


async def fail() -> None:
    raise ValueError("no")


def test_calls_run_in_one_task() -> None:
    async def task_id() -> int:
        return anyio.get_current_task().id

    with Portal() as portal:
        actor, other = portal.actor(), portal.actor()
        assert actor.call(partial(value, 3)) == 3
        assert actor.call(task_id) == actor.call(task_id) != other.call(task_id)
        with pytest.raises(ValueError, match="no"):
            actor.call(fail)
        assert actor.call(partial(value, 4)) == 4


def test_a_scope_entered_in_one_call_is_left_in_another() -> None:
    stack = AsyncExitStack()

    async def enter() -> None:
        await stack.enter_async_context(anyio.create_task_group())

    with Portal() as portal:
        actor = portal.actor()
        actor.call(enter)
        assert actor.call(partial(value, 1)) == 1
        actor.call(stack.aclose)


def test_finalise_runs_once_however_it_ends() -> None:
    ended: list[str] = []

    async def finalise(name: str) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.sleep(0)
        ended.append(name)

    with Portal() as portal:
        closed = portal.actor(partial(finalise, "closed"))
        portal.actor(partial(finalise, "left"))
        closed.close()
        closed.close()
        assert ended == ["closed"]
        with pytest.raises((anyio.ClosedResourceError, anyio.BrokenResourceError)):
            closed.call(partial(value, 1))
    assert ended == ["closed", "left"]


def test_contexts_are_entered_and_left() -> None:
    states: list[str] = []

    @asynccontextmanager
    async def context() -> AsyncIterator[int]:
        async with anyio.create_task_group():
            states.append("in")
            yield 5
        states.append("out")

    with Portal() as portal, portal.enter(context()) as inside:
        assert inside == 5
        assert states == ["in"]
    assert states == ["in", "out"]


def test_cancelling_ends_the_actor_and_finalises() -> None:
    started, ended = threading.Event(), threading.Event()

    async def wait() -> None:
        started.set()
        await anyio.sleep_forever()

    async def finalise() -> None:
        ended.set()

    with Portal() as portal:
        actor = portal.actor(finalise)
        running, queued = actor.submit(wait), actor.submit(partial(value, 1))
        assert started.wait(100)
        actor.cancel()
        assert ended.wait(100)
        for future in (running, queued):
            with pytest.raises(anyio.ClosedResourceError):
                future.result(100)
        assert actor.ended
        actor.close()


def test_close_ends_waiting_calls_and_is_idempotent() -> None:
    portal = Portal()
    actor = portal.actor()
    running, queued = actor.submit(anyio.sleep_forever), actor.submit(partial(value, 1))
    portal.close()
    portal.close()
    for future in (running, queued):
        assert future.done()


SCRIPT = """
import anyio, sys
from skyenv.portal import Portal
async def finalise():
    with anyio.CancelScope(shield=True):
        await anyio.sleep(0)
    print("finalised", flush=True)
async def work():
    await anyio.to_thread.run_sync(int)
portal = Portal()
actor = portal.actor(finalise)
actor.call(work)
print("ready", flush=True)
"""


def run_script(ending: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", SCRIPT + ending], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("ending", ["", "sys.exit(3)", "1/0"])
def test_a_forgotten_portal_ends_with_the_main_thread(ending: str) -> None:
    with run_script(ending) as process:
        output, _ = process.communicate(timeout=300)
    assert output.split() == ["ready", "finalised"]


def test_an_interrupt_cancels_the_call_that_is_waited_for() -> None:
    ending = "print('waiting', flush=True); actor.call(anyio.sleep_forever)"
    with run_script(ending) as process:
        assert process.stdout is not None
        while process.stdout.readline().strip() != "waiting":
            pass
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=300)
    assert output.split() == ["finalised"]
    assert process.returncode == -signal.SIGINT
