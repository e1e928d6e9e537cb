"""Pipes to and from an init, for what is too large for a frame.

Whoever opens a pipe closes both ends; the init gets copies of the one that it is sent.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager

import anyio

from skyenv.remote.tasks import background_tasks

CHUNK = 1 << 18


@asynccontextmanager
async def receiving(take: Callable[[bytes], Awaitable[object]]) -> AsyncIterator[int]:
    """The end to send things to; a block that succeeds ends when `take` has had all that came."""
    reader, writer = os.pipe()
    try:
        async with background_tasks() as group:
            drained = anyio.Event()

            async def drain() -> None:
                async for chunk in chunks_of(reader):
                    await take(chunk)
                drained.set()

            group.start_soon(drain)
            try:
                yield writer
            finally:
                os.close(writer)
            await drained.wait()
    finally:
        os.close(reader)


@asynccontextmanager
async def sending(chunks: AsyncGenerator[bytes, None]) -> AsyncIterator[int]:
    """The end from which to read `chunks`, and then the end of file, inside the block."""
    reader, writer = os.pipe()
    try:
        async with background_tasks() as group:
            group.start_soon(_feed, writer, chunks)
            yield reader
    finally:
        os.close(reader)


async def chunks_of(reader: int) -> AsyncIterator[bytes]:
    """What comes through a pipe, until the writer has closed."""
    os.set_blocking(reader, False)
    while True:
        await anyio.wait_readable(reader)
        try:
            chunk = os.read(reader, CHUNK)
        except BlockingIOError:
            continue
        if not chunk:
            return
        yield chunk


async def put(writer: int, data: bytes) -> None:
    """Write all of `data`. BrokenPipeError when nobody reads any more."""
    os.set_blocking(writer, False)
    view = memoryview(data)
    while view:
        await anyio.wait_writable(writer)
        try:
            view = view[os.write(writer, view[:CHUNK]) :]
        except BlockingIOError:
            continue


async def _feed(writer: int, chunks: AsyncGenerator[bytes, None]) -> None:
    """Write everything and close; a reader that stops early says so itself."""
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                await put(writer, chunk)
    except BrokenPipeError:
        return
    finally:
        os.close(writer)
