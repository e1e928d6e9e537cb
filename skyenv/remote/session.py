"""One sandbox as the node sees it: the channel to its init, its lease, whether it is frozen, and its keyed calls.

A call that changes something runs in a task of the node's, under its key; whoever asks with the same key waits for
the same call. The init keeps its own log of keys, which outlives this process: the one here spares a round trip and
holds what never reached the init. A sandbox is thawed before anything is asked of it.
"""

from __future__ import annotations

import os
import socket
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import anyio
from anyio.abc import TaskGroup

from skyenv.errors import (
    EnvError,
    SandboxConflict,
    SandboxError,
    SandboxLost,
    SandboxPathError,
    SandboxProtocolError,
    SandboxUnavailable,
    SkyEnvError,
    boundary,
)
from skyenv.remote.backends import Backend, Record
from skyenv.remote.channel import Channel
from skyenv.remote.inside.wire import Frame
from skyenv.remote.protocol import ExecParameters
from skyenv.remote.tasks import background_tasks

KEPT_CALLS = 64
KEPT_BYTES = 4 << 20
ENDED = "the sandbox's first process ended (killed, or out of memory)"
INLINE = 1 << 20
CHUNK = 1 << 18
FILE_TIMEOUT = 600.0
END_GRACE = 15.0
LONGEST = 8 * 86400.0
_FIELDS = (
    *("exit_code", "timed_out", "oom", "session_restarted", "running"),
    *("cwd", "cwd_missing", "seconds", "head", "output_bytes"),
)


class Result(NamedTuple):
    """What a call came to: small fields and raw bytes."""

    meta: dict[str, Any]
    body: bytes = b""


Work = Callable[[str], Awaitable[Result]]
"""What a call does, given its key."""


@dataclass(slots=True)
class Call:
    """One keyed call. `done` is set once `result` or `error` is."""

    done: anyio.Event = field(default_factory=anyio.Event)
    result: Result | None = None
    error: SkyEnvError | None = None

    async def run(self, key: str, work: Work) -> None:
        """Do the work and keep what it came to; never raises but on cancellation."""
        try:
            with boundary(SandboxError, "the node failed"):
                self.result = await work(key)
        except SkyEnvError as error:
            self.error = error
        finally:
            if self.result is None and self.error is None:
                self.error = SandboxLost("the node is closing")
            self.done.set()

    async def wait(self, seconds: float) -> Result | None:
        """Its result, or None when it goes on for longer than `seconds`. Raises the call's error."""
        with anyio.move_on_after(seconds):
            await self.done.wait()
        if self.error is not None:
            raise self.error
        return self.result


class CallLog:
    """Keyed calls, running ones and the last finished ones."""

    def __init__(self, group: TaskGroup) -> None:
        self._group = group
        self._calls: OrderedDict[str, Call] = OrderedDict()

    def start(self, key: str, work: Work) -> Call:
        """The call with this key; started now if there was none."""
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = Call()
            self._group.start_soon(self._run, key, call, work)
            self._forget()
        return call

    async def _run(self, key: str, call: Call, work: Work) -> None:
        """A call that was refused for now or never made is not kept: asking again with its key is a new try."""
        await call.run(key, work)
        if isinstance(call.error, (SandboxUnavailable, SandboxProtocolError)):
            self._calls.pop(key, None)

    def find(self, key: str) -> Call | None:
        """The call with this key, if it is known."""
        return self._calls.get(key)

    def drop(self, key: str) -> None:
        """Let a finished call go: its client has the answer."""
        call = self._calls.get(key)
        if call is not None and call.done.is_set():
            del self._calls[key]

    @property
    def busy(self) -> bool:
        """Whether any call is running."""
        return any(not call.done.is_set() for call in self._calls.values())

    def _forget(self) -> None:
        count, size = 0, 0
        for key, call in reversed(list(self._calls.items())):
            if call.done.is_set():
                count, size = count + 1, size + (len(call.result.body) if call.result else 0)
                if count > KEPT_CALLS or (size > KEPT_BYTES and count > 1):
                    del self._calls[key]


class Session:
    """A living sandbox. The node makes it, serves its channel and closes that.

    `record` is what is kept with the sandbox for the next node: `name`, `ttl`, `freeze_after`, and whatever else the
    node adds.
    """

    def __init__(self, sandbox: str, sock: socket.socket, record: Record, backend: Backend, group: TaskGroup) -> None:
        self.name: str = record["name"]
        self.sandbox = sandbox
        self.record = record
        self.channel = Channel(sock, ENDED)
        self.calls = CallLog(group)
        self.frozen = False
        self._backend = backend
        self._last_use = time.monotonic()
        self._acknowledged: list[str] = []
        self._askers = 0
        self._turning = anyio.Lock()
        self._clocks: set[anyio.CancelScope] = set()

    def touch(self) -> None:
        """Renew the lease."""
        self._last_use = time.monotonic()

    @property
    def idle_seconds(self) -> float:
        """For how long nobody used it; a running call counts as use."""
        if self.calls.busy or self._askers:
            self.touch()
        return time.monotonic() - self._last_use

    @property
    def expired(self) -> bool:
        """Whether nobody used it for `ttl` seconds."""
        ttl: float = self.record["ttl"]
        return self.idle_seconds > ttl

    def acknowledge(self, key: str) -> None:
        """The client has the answer of this call; the init is told with the next request."""
        self.calls.drop(key)
        self._acknowledged.append(key)

    async def freeze(self) -> None:
        """Let nothing inside run until something is asked of it or `thaw`. The time of a running command stands still.

        SandboxUnavailable when something does not stop. Idempotent.
        """
        async with self._turning:
            await self._freeze()

    async def _freeze(self) -> None:
        if not self.frozen:
            self.frozen = True
            try:
                await self._backend.freeze(self.sandbox)
            except SandboxError:
                self.frozen = False
                raise

    async def freeze_when_idle(self) -> bool:
        """`freeze` unless something is being asked of it right now."""
        async with self._turning:
            idle = not self._askers
            if idle:
                await self._freeze()
            return idle

    async def thaw(self) -> None:
        """Let everything inside go on. Idempotent."""
        async with self._turning:
            if self.frozen:
                await self._backend.thaw(self.sandbox)
                self.frozen = False

    @asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """Nothing inside moves for the block."""
        async with self._turning:
            await self._freeze()
            try:
                yield
            finally:
                with anyio.CancelScope(shield=True):
                    await self._backend.thaw(self.sandbox)
                    self.frozen = False

    async def ask(
        self,
        op: str,
        header: dict[str, Any] | None = None,
        payload: bytes = b"",
        fds: tuple[int, ...] = (),
        *,
        timeout: float = 30.0,
    ) -> Frame:
        """One request to the init, thawed for it; its refusal is raised as the matching error.

        A `key` in the header makes it a call that the init runs once, however often it is asked.
        """
        wanted = {"op": op, **(header or {})}
        self._askers += 1
        try:
            if self.frozen:
                await self.thaw()
            if self._acknowledged:
                wanted["acks"], self._acknowledged = self._acknowledged, []
            frame = await self.channel.request(wanted, payload, fds, timeout=timeout)
        finally:
            self._askers -= 1
        if (error := frame.header.get("error")) is not None:
            raise _refusal(error)
        return frame

    async def begin(self, env: dict[str, str]) -> None:
        """Let the init start its shell."""
        await self.ask("begin", {"env": env})

    async def status(self) -> dict[str, Any]:
        """Whether the init was begun, and what moves inside: `begun`, `running`, `processes`."""
        return (await self.ask("status")).header

    async def follow(self, key: str) -> Result:
        """What a call that an earlier node made came or comes to. SandboxProtocolError when none is known."""
        return _any_result(await self.ask("follow", {"call": key}, timeout=LONGEST))

    async def exec(self, key: str, command: bytes, parameters: ExecParameters) -> Result:
        """Run a command; returns when it ended or, with a soft timeout, fell silent."""
        header = {**parameters.model_dump(), "key": key}
        return _any_result(await self.ask("exec", header, command, timeout=parameters.timeout + END_GRACE))

    async def poll(self, key: str, soft_timeout: float | None, typed: bytes = b"") -> Result:
        """Wait for the running command, once `typed` is on its terminal."""
        op, header = "input" if typed else "poll", {"soft_timeout": soft_timeout, "key": key}
        return _any_result(await self.ask(op, header, typed, timeout=LONGEST))

    async def interrupt(self, key: str) -> Result:
        """End the running command."""
        return _any_result(await self.ask("interrupt", {"key": key}, timeout=END_GRACE))

    async def kill_processes(self, key: str) -> Result:
        """Kill everything inside."""
        return _any_result(await self.ask("kill", {"key": key}))

    async def info(self, path: str) -> Result:
        """Describe a path."""
        return Result({"info": (await self.ask("stat", {"path": path})).header["info"]})

    async def list_dir(self, path: str, depth: int) -> list[Any]:
        """List a directory."""
        entries: list[Any] = (await self.ask("list", {"path": path, "depth": depth})).header["entries"]
        return entries

    async def remove(self, key: str, path: str) -> Result:
        """Delete a file or symlink."""
        return _any_result(await self.ask("remove", {"path": path, "key": key}))

    async def read_file(self, path: str, offset: int, max_bytes: int | None) -> bytes:
        """Read a file; a large one is streamed by a child of the init."""
        header = {"path": path, "offset": offset, "max_bytes": max_bytes, "streamed": False}
        frame = await self.ask("read", header)
        if not frame.header["large"]:
            return frame.payload
        return await self._receive("read", {**header, "streamed": True})

    async def write_file(self, key: str, path: str, data: bytes, expected_bytes: int | None) -> Result:
        """Write a file; with `expected_bytes`, so many leading bytes of `data` are what it must hold now."""
        header = {"path": path, "expected_bytes": expected_bytes, "key": key}
        header |= {"size": len(data), "streamed": len(data) > INLINE}
        if header["streamed"]:
            await self._deliver("write", header, data)
        else:
            await self.ask("write", header, data)
        return Result({})

    async def download(self, path: str, exclude: list[str]) -> bytes:
        """A tree as a tar."""
        return await self._receive("pack", {"path": path, "exclude": exclude})

    async def upload(self, key: str, path: str, archive: bytes) -> Result:
        """Unpack a tar."""
        await self._deliver("unpack", {"path": path, "size": len(archive), "key": key}, archive)
        return Result({})

    async def _receive(self, op: str, header: dict[str, Any]) -> bytes:
        """Ask for something that comes through a pipe; all of it."""
        reader, writer = os.pipe()
        chunks: list[bytes] = []
        try:
            async with background_tasks() as group:
                drained = anyio.Event()
                group.start_soon(_drain, reader, chunks, drained)
                try:
                    await self.ask(op, header, fds=(writer,), timeout=FILE_TIMEOUT)
                finally:
                    os.close(writer)
                await drained.wait()
        finally:
            os.close(reader)
        return b"".join(chunks)

    async def _deliver(self, op: str, header: dict[str, Any], data: bytes) -> None:
        """Ask for something that takes its input from a pipe, and feed it."""
        reader, writer = os.pipe()
        try:
            async with background_tasks() as group:
                group.start_soon(_feed, writer, data)
                await self.ask(op, header, fds=(reader,), timeout=FILE_TIMEOUT)
        finally:
            os.close(reader)


async def _drain(reader: int, chunks: list[bytes], drained: anyio.Event) -> None:
    os.set_blocking(reader, False)
    while True:
        await anyio.wait_readable(reader)
        try:
            chunk = os.read(reader, CHUNK)
        except BlockingIOError:
            continue
        if not chunk:
            drained.set()
            return
        chunks.append(chunk)


async def _feed(writer: int, data: bytes) -> None:
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


def _any_result(frame: Frame) -> Result:
    """The answer to any call: that of a command has fields, that of a file operation none."""
    return Result({key: frame.header[key] for key in _FIELDS if key in frame.header}, frame.payload)


def _refusal(error: dict[str, Any]) -> SkyEnvError:
    """An error object of the init as our type."""
    code, message = error.get("code"), str(error.get("message"))
    if code in ("path", "conflict"):
        kind = SandboxConflict if code == "conflict" else SandboxPathError
        return kind(int(error.get("errno", 0)), message)
    if code in ("unknown", "answered"):
        return SandboxProtocolError(message)
    if code == "cut":
        return SandboxUnavailable(message, retry_after=0.0)
    return EnvError(message) if code in ("busy", "idle") else SandboxError(message)
