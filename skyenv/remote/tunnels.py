"""Ways out of sandboxes: a port of a sandbox's loopback whose connections lead to one address, and nowhere else.

The node decides which addresses that may be; it opens every connection itself, so a sandbox needs no network. A
tunnel ends with its sandbox, with a rollback of it, and with the node server.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress

import anyio
from anyio.abc import ByteStream, TaskGroup

from skyenv.errors import ConfigError, SandboxLost, SandboxPathError
from skyenv.remote.calls import Result
from skyenv.remote.channel import Channel
from skyenv.remote.pipes import chunks_of, put
from skyenv.remote.protocol import TunnelParameters
from skyenv.remote.session import Session

CONNECTIONS = 64
CONNECT_TIMEOUT = 10.0


class Tunnels:
    """The tunnels of a node. `allowed` are targets `HOST:PORT` or `HOST:*`; None allows any."""

    def __init__(self, allowed: Sequence[str] | None = ()) -> None:
        for target in allowed or ():
            split_target(target.replace(":*", ":1"))
        self._allowed = allowed
        self._open: dict[tuple[Channel, int], str] = {}

    async def open(self, session: Session, key: str, wanted: TunnelParameters, group: TaskGroup) -> Result:
        """Listen in the sandbox and lead what connects there to the target. ConfigError when that is not allowed."""
        host, port = split_target(wanted.target)
        self._check(wanted.target)
        try:
            frame = await session.ask("listen", {"port": wanted.port, "key": key})
        except SandboxPathError as error:
            raise ConfigError(f"port: {wanted.port} in the sandbox: {error.strerror}") from error
        inside, channel = int(frame.header["port"]), session.channel
        known = self._open.get((channel, inside))
        if known not in (None, wanted.target):
            raise ConfigError(f"port: {inside} of this sandbox leads to {known} already")
        if known is None:
            self._open[channel, inside] = wanted.target
            group.start_soon(self._keep, channel, inside, host, port)
        return Result({"port": inside})

    def _check(self, target: str) -> None:
        wildcard = f"{target.rpartition(':')[0]}:*"
        if self._allowed is not None and not {target, wildcard} & set(self._allowed):
            raise ConfigError(f"target: this node leads nothing to {target}; it would need --tunnel {target}")

    async def _keep(self, channel: Channel, inside: int, host: str, port: int) -> None:
        """Take connections until the sandbox is gone."""
        limit = anyio.Semaphore(CONNECTIONS)
        try:
            async with anyio.create_task_group() as group:
                while True:
                    await limit.acquire()
                    reader, writer = await _accept(channel, inside)
                    group.start_soon(_lead, reader, writer, host, port, limit)
        except* SandboxLost:
            del self._open[channel, inside]


async def _accept(channel: Channel, inside: int) -> tuple[int, int]:
    """The next connection, as the ends of two pipes: what it says, and what is said to it. SandboxLost."""
    with ExitStack() as ours, ExitStack() as theirs:
        source, writer = _pipe(theirs, ours)
        reader, sink = _pipe(ours, theirs)
        await channel.request({"op": "accept", "port": inside}, fds=(source, sink), timeout=None)
        ours.pop_all()
        return reader, writer


def _pipe(reading: ExitStack, writing: ExitStack) -> tuple[int, int]:
    reader, writer = os.pipe()
    reading.callback(os.close, reader)
    writing.callback(os.close, writer)
    return reader, writer


async def _lead(reader: int, writer: int, host: str, port: int, limit: anyio.Semaphore) -> None:
    """Copy both ways between a connection of a sandbox and one to the target; a target that refuses ends the first."""
    with ExitStack() as stack:
        stack.callback(limit.release)
        stack.callback(os.close, reader)
        stack.callback(os.close, writer)
        try:
            with anyio.fail_after(CONNECT_TIMEOUT):
                stream = await anyio.connect_tcp(host, port)
        except (OSError, TimeoutError):
            return
        async with stream, anyio.create_task_group() as group:
            group.start_soon(_outwards, reader, stream)
            await _inwards(stream, writer)
            group.cancel_scope.cancel()


async def _outwards(reader: int, stream: ByteStream) -> None:
    try:
        async for data in chunks_of(reader):
            await stream.send(data)
        await stream.send_eof()
    except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
        return


async def _inwards(stream: ByteStream, writer: int) -> None:
    """What the target says, until it has said all."""
    try:
        async for data in stream:
            with suppress(BrokenPipeError):
                await put(writer, data)
    except (OSError, anyio.BrokenResourceError):
        return


def split_target(target: str) -> tuple[str, int]:
    """Host and port. ConfigError naming what is wrong."""
    host, colon, port = target.rpartition(":")
    if not (host and colon and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError(f"target: {target!r} is no HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)
