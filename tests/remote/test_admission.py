"""Places and the queue of a node, and what those are told who get none."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from skyenv.errors import SandboxLost, SandboxUnavailable
from skyenv.remote.admission import Admission


async def refused(admission: Admission, name: str = "x", *, wait: bool = True) -> str | None:
    with pytest.raises(SandboxUnavailable) as caught:
        await admission.enter(name, wait=wait)
    assert caught.value.retry_after
    return caught.value.reason


async def test_places_are_given_in_order_of_arrival() -> None:
    admission, served = Admission(slots=1), []
    await admission.enter("first")

    async def come(name: str) -> None:
        await admission.enter(name)
        served.append(name)

    async with anyio.create_task_group() as group:
        for name in "abc":
            group.start_soon(come, name)
            await anyio.wait_all_tasks_blocked()
        assert (admission.used, admission.waiting) == (1, 3)
        for leaving in ("first", "a", "b"):
            admission.leave(leaving)
            await anyio.wait_all_tasks_blocked()
    assert served == ["a", "b", "c"]
    admission.leave("c")
    admission.leave("c")
    assert (admission.used, admission.waiting) == (0, 0)


async def test_every_refusal_says_why() -> None:
    admission = Admission(slots=1, queue=0, timeout=0.01)
    await admission.enter("first")
    assert await refused(admission, wait=False) == "full"
    assert await refused(admission) == "queue_full"
    admission.queue = 1
    assert await refused(admission) == "queue_timeout"
    assert admission.waiting == 0
    admission.drain()
    assert await refused(admission) == "draining"


async def test_a_full_disk_refuses_new_sandboxes_only(tmp_path: Path) -> None:
    admission = Admission(disk=tmp_path, disk_limit=1.0)
    await admission.enter("first")
    admission.disk_limit = 0.0
    assert await refused(admission) == "disk_full"
    assert admission.used == 1


async def test_a_drain_tells_who_waits_and_ends_with_the_last_sandbox() -> None:
    admission = Admission(slots=1)
    await admission.enter("first")
    async with anyio.create_task_group() as group:
        group.start_soon(refused, admission, "waits")
        await anyio.wait_all_tasks_blocked()
        admission.drain()
    assert not await admission.emptied(0.0)
    async with anyio.create_task_group() as group:
        group.start_soon(admission.emptied, 5.0)
        await anyio.wait_all_tasks_blocked()
        admission.leave("first")
    assert await admission.emptied(0.0)


async def test_who_gives_up_waiting_takes_no_place() -> None:
    admission = Admission(slots=1)
    await admission.enter("first")
    async with anyio.create_task_group() as group:
        group.start_soon(admission.enter, "cancelled")
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    assert admission.waiting == 0

    async def withdrawn() -> None:
        with pytest.raises(SandboxLost):
            await admission.enter("deleted")

    async with anyio.create_task_group() as group:
        group.start_soon(withdrawn)
        await anyio.wait_all_tasks_blocked()
        admission.withdraw("deleted")
    admission.leave("first")
    assert admission.used == 0
