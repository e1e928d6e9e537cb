"""What a gateway passes through, it passes through while it comes, in both directions; so does the end of a side."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import httpx
import pytest
from serving import serving
from starlette.types import Receive, Scope, Send

from skyenv.remote.fleet import Fleet
from skyenv.remote.gateway import gateway_app
from skyenv.remote.http1 import Pool
from skyenv.remote.protocol import NodeReport

BOX = f"/sandboxes/{'a' * 32}.one"


@dataclass
class SlowNode:
    """A node that does one thing at a time, when the test says so."""

    headers: dict[bytes, bytes] = field(default_factory=dict)
    path: str = ""
    arrived: int = 0
    heard: anyio.Event = field(default_factory=anyio.Event)
    go_on: anyio.Event = field(default_factory=anyio.Event)
    left_alone: anyio.Event = field(default_factory=anyio.Event)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers, self.path = dict(scope["headers"]), scope["path"]
        start = {"type": "http.response.start", "status": 200, "headers": [(b"skyenv-meta", b"{}")]}
        more = True
        while more:
            message = await receive()
            self.arrived += len(message.get("body", b""))
            more = message.get("more_body", False)
            if self.arrived:
                self.heard.set()
        self.heard.set()
        if scope["path"].endswith("/exec"):
            assert (await receive())["type"] == "http.disconnect"
            self.left_alone.set()
            return
        await send(start)
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        await self.go_on.wait()
        if scope["path"].endswith("/info"):
            raise ConnectionError("the node dies in the middle of its answer")
        await send({"type": "http.response.body", "body": b"last"})


@asynccontextmanager
async def behind_a_gateway(node: SlowNode) -> AsyncIterator[httpx.AsyncClient]:
    async with Pool() as pool, serving(node) as node_url:
        fleet = Fleet()
        fleet.report("one", NodeReport(url=node_url, instance="i", slots=1))
        async with serving(gateway_app(fleet, pool, clients=None, join_token="join")) as url:
            async with httpx.AsyncClient(base_url=url, timeout=100) as http:
                yield http


async def test_an_answer_comes_while_it_is_made() -> None:
    node = SlowNode()
    async with behind_a_gateway(node) as http, http.stream("GET", f"{BOX}/file?path=/x") as answer:
        parts = answer.aiter_raw()
        assert await anext(parts) == b"first"
        node.go_on.set()
        assert [part async for part in parts] == [b"last"]


async def test_a_body_is_passed_on_while_it_comes() -> None:
    node, sent_all = SlowNode(), False
    node.go_on.set()

    async def body() -> AsyncIterator[bytes]:
        nonlocal sent_all
        yield b"x" * 100_000
        with anyio.fail_after(100):
            await node.heard.wait()
        assert node.arrived <= 100_000
        yield b"y" * 3_000_000
        sent_all = True

    async with behind_a_gateway(node) as http:
        assert (await http.put(f"{BOX}/file?path=/x", content=body())).content == b"firstlast"
    assert sent_all
    assert node.arrived == 3_100_000


async def test_a_client_that_leaves_is_gone_for_the_node_too() -> None:
    node = SlowNode()
    async with behind_a_gateway(node) as http:
        with anyio.fail_after(100):
            async with anyio.create_task_group() as group:
                group.start_soon(http.post, f"{BOX}/exec?timeout=60")
                await node.heard.wait()
                group.cancel_scope.cancel()
            await node.left_alone.wait()


async def test_an_answer_that_breaks_off_is_not_taken_for_a_whole_one() -> None:
    node = SlowNode()
    async with behind_a_gateway(node) as http:
        async with http.stream("GET", f"{BOX}/info?path=/x") as answer:
            node.go_on.set()
            with pytest.raises(httpx.RemoteProtocolError):
                await answer.aread()


async def test_the_node_sees_its_own_names_and_not_the_clients_token() -> None:
    node = SlowNode()
    node.go_on.set()
    async with behind_a_gateway(node) as http:
        headers = {
            "authorization": "Bearer clients-own", "idempotency-key": "k", "skyenv-sandbox-token": "s",
            "connection": "x-private", "te": "trailers", "x-future": "1",
        }  # fmt: skip
        await http.get(f"{BOX}/entries?path=/x%20y&depth=1", headers=headers)
    assert node.path == f"/sandboxes/{'a' * 32}/entries"
    assert node.headers[b"authorization"] == b"Bearer join"
    assert [node.headers[name] for name in (b"idempotency-key", b"skyenv-sandbox-token", b"x-future")] == [
        b"k",
        b"s",
        b"1",
    ]
    assert b"te" not in node.headers
