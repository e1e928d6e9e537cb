"""Pipes to and from an init, for what is too large for a frame."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import anyio

CHUNK = 1 << 18


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


async def drain(reader: int, chunks: list[bytes], drained: anyio.Event) -> None:
    """Read into `chunks` until the writer has closed, and tell by `drained`."""
    chunks.extend([chunk async for chunk in chunks_of(reader)])
    drained.set()


async def feed(writer: int, data: bytes) -> None:
    """Write all of `data` and close; a reader that stops early says so itself."""
    os.set_blocking(writer, False)
    view = memoryview(data)
    try:
        while view:
            await anyio.wait_writable(writer)
            try:
                view = view[os.write(writer, view[:CHUNK]) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                return
    finally:
        os.close(writer)
