"""Applications on real sockets, in the test's own process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from starlette.types import ASGIApp

from skyenv.remote.listen import Listening, serve_app


@asynccontextmanager
async def serving(app: ASGIApp) -> AsyncIterator[str]:
    """The URL of a real server on loopback that ends with the block."""
    stop, ready, urls = anyio.Event(), anyio.Event(), []

    def on_ready(url: str) -> None:
        urls.append(url)
        ready.set()

    listening = Listening(port=0)
    with listening.bind() as listener:
        async with anyio.create_task_group() as group:
            group.start_soon(serve_app, app, listening, listener, stop, on_ready)
            await ready.wait()
            try:
                yield urls[0]
            finally:
                stop.set()
