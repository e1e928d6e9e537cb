"""What one HTTP hop costs: httpx, aiohttp, httpx over our pool, and our pool alone, against the same server.

The server is a process of its own and answers at once, so what is measured is the client's side of a hop: what the
gateway adds, and what the client's own share of a command is. One request at a time, then 64 and 1 000 at a time.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anyio
import httpx
from _measure import parse, report, spread

from skyenv.remote.fleet import origin_of
from skyenv.remote.http1 import Pool, Request
from skyenv.remote.sending import PoolTransport

Hop = Callable[[], Awaitable[bytes]]
PATH = f"/sandboxes/{'a' * 32}/exec?timeout=60.0&max_output_bytes=1048576"
HEADERS = {"authorization": "Bearer secret", "idempotency-key": "k" * 32}
COMMAND = b"echo hi"
SERVER = """
import socket, uvicorn
META = b'{"exit_code":0,"cwd":"/root","seconds":0.001,"head":2,"output_bytes":2}'
async def app(scope, receive, send):
    while (await receive()).get("more_body"):
        pass
    headers = [(b"content-length", b"2"), (b"skyenv-meta", META)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"hi"})
listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
print("http://127.0.0.1:%d" % listener.getsockname()[1], flush=True)
config = uvicorn.Config(app, loop="uvloop", http="httptools", lifespan="off", log_config=None, access_log=False)
uvicorn.Server(config).run([listener])
"""


@asynccontextmanager
async def by_httpx(url: str) -> AsyncIterator[Hop]:
    """Httpx with a pool that is large enough."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=1024)
    timeout = httpx.Timeout(60, pool=None)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=timeout, trust_env=False, verify=False) as http:
        yield lambda: _content(http)


async def _content(http: httpx.AsyncClient) -> bytes:
    return (await http.post(PATH, content=COMMAND, headers=HEADERS)).content


@asynccontextmanager
async def by_httpx_over_our_pool(url: str) -> AsyncIterator[Hop]:
    """Httpx with our transport below it."""
    async with httpx.AsyncClient(base_url=url, transport=PoolTransport(Pool())) as http:
        yield lambda: _content(http)


@asynccontextmanager
async def by_aiohttp(url: str) -> AsyncIterator[Hop]:
    """aiohttp, which http1 could have been."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def hop() -> bytes:
            async with session.post(url + PATH, data=COMMAND, headers=HEADERS) as answer:
                return await answer.read()

        yield hop


@asynccontextmanager
async def by_our_pool(url: str) -> AsyncIterator[Hop]:
    """What the client and the gateway use."""
    origin = origin_of(url)
    headers = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
    async with Pool() as pool:

        async def hop() -> bytes:
            async with pool.exchange(origin, Request(b"POST", PATH.encode(), headers, COMMAND), timeout=60) as answer:
                return await answer.read()

        yield hop


async def rate(hop: Hop, width: int, each: int) -> float:
    """Requests a second with `width` at a time."""

    async def some() -> None:
        for _number in range(each):
            await hop()

    started = time.perf_counter()
    async with anyio.create_task_group() as group:
        for _task in range(width):
            group.start_soon(some)
    return width * each / (time.perf_counter() - started)


async def measure(url: str, count: int) -> dict[str, Any]:
    """All clients in turn."""
    results: dict[str, Any] = {}
    for client in (by_httpx, by_aiohttp, by_httpx_over_our_pool, by_our_pool):
        name = client.__name__.removeprefix("by_")
        async with client(url) as hop:
            await rate(hop, 1, 20)
            times = []
            for _number in range(count):
                started = time.perf_counter()
                await hop()
                times.append(time.perf_counter() - started)
            results[f"{name}_ms"] = spread(times)
            results[f"{name}_per_second_64"] = await rate(hop, 64, 20)
            results[f"{name}_per_second_1000"] = await rate(hop, 1000, 2)
    return results


def main() -> None:
    """Run and report."""
    options = parse(__doc__ or "", count=1000)
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        results = anyio.run(measure, url, options.count, backend_options={"use_uvloop": True})
    finally:
        server.terminate()
        server.wait()
    report(results, options.json)


if __name__ == "__main__":
    main()
