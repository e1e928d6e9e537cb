"""Warm pools: filled in the background, claimed once, never in anybody's way, never more than was asked for."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio

from skyenv.errors import SandboxUnavailable
from skyenv.remote.admission import Admission
from skyenv.remote.backends import get
from skyenv.remote.client import connect
from skyenv.remote.protocol import CreateRequest, PoolRequest, Spec
from skyenv.remote.sandboxes import Node


@asynccontextmanager
async def opened(slots: int) -> AsyncIterator[Node]:
    node = Node(get("local"), admission=Admission(slots=slots))
    async with node.open():
        yield node


async def eventually(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(100):
        while not condition():
            await anyio.sleep(0.01)


async def test_a_matching_creation_gets_a_warm_sandbox(local_url: str) -> None:
    async with connect(local_url, "secret") as client:
        await client.prefetch(count=2, env={"A": "1"})

        async def ready() -> int:
            return sum(pool["ready"] for pool in (await client.health())["pools"])

        with anyio.fail_after(100):
            while await ready() < 2:
                await anyio.sleep(0.01)
        async with client.sandbox(env={"A": "1"}, ttl=77.0) as box:
            assert (await box.exec("echo $A; touch x")).output == "1\n"
            async with client.sandbox(env={"A": "1"}) as other, client.sandbox(env={"A": "2"}) as cold:
                assert (await other.exec("ls; echo $A")).output == "1\n"
                assert (await cold.exec("echo $A")).output == "2\n"
        await client.prefetch(count=0, env={"A": "1"})
        with anyio.fail_after(100):
            while (await client.health())["pools"]:
                await anyio.sleep(0.01)


async def test_a_pool_of_a_snapshot_starts_in_its_session(local_url: str) -> None:
    async with connect(local_url, "secret") as client, client.sandbox() as box:
        await box.exec("mkdir d; cd d; v=1")
        snapshot = await box.snapshot()
        await client.prefetch(snapshot=snapshot, count=1)
        with anyio.fail_after(100):
            while not sum(pool["ready"] for pool in (await client.health())["pools"]):
                await anyio.sleep(0.01)
        async with client.sandbox(snapshot=snapshot) as twin:
            assert (await twin.exec("pwd; echo $v")).output == "/root/d\n1\n"
        await client.prefetch(snapshot=snapshot, count=0)


async def test_no_warm_sandbox_is_handed_out_twice() -> None:
    async with opened(56) as node:
        await node.prefetch(PoolRequest(count=50))
        await eventually(lambda: node.pools.ready == 50)
        names = [uuid.uuid4().hex for _number in range(200)]
        taken: list[str] = []
        refused: list[str] = []

        async def claim(name: str) -> None:
            try:
                await node.create(name, CreateRequest(spec=Spec(ttl=30.0)), wait=False)
                taken.append(name)
            except SandboxUnavailable:
                refused.append(name)

        async with anyio.create_task_group() as group:
            for name in names:
                group.start_soon(claim, name)
        assert len({node.session(name).sandbox for name in taken}) == len(taken) == 56
        assert len(refused) == 200 - 56
        assert {node.session(name).record["ttl"] for name in taken} == {30.0}


async def test_a_pool_that_never_gets_ready_costs_nobody_anything() -> None:
    async with opened(20) as node:
        await node.prefetch(PoolRequest(snapshot="0" * 32, count=10))
        await eventually(lambda: node.pools.describe()[0]["failures"] >= 2)
        await node.create("a" * 32, CreateRequest())
        assert (node.pools.ready, node.admission.used) == (0, 1)
        assert node.pools.describe()[0]["failures"] <= 3
        assert len(node.living()) == 1


async def test_a_pool_leaves_room_and_gives_way() -> None:
    async with opened(6) as node:
        await node.prefetch(PoolRequest(count=50))
        await eventually(lambda: node.pools.ready == 5)
        for number in range(6):
            request = CreateRequest(env={"N": str(number)})
            await node.create(f"{number}" * 32, request, wait=False)
            assert node.admission.used <= 6
        assert node.pools.ready == 0
        for number in range(6):
            await node.delete(f"{number}" * 32)
        await eventually(lambda: node.pools.ready == 5)


async def test_a_pool_ends_when_nobody_asks() -> None:
    async with opened(6) as node:
        await node.prefetch(PoolRequest(count=2, keep=1.0))
        await eventually(lambda: node.pools.ready == 2)
        await eventually(lambda: node.pools.describe() == [])
        assert node.admission.used == 0
