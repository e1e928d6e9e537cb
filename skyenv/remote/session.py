"""One sandbox as the node sees it: the channel to its init, its lease, and the log of calls that makes retries safe.

A call that changes something runs in a task of the node's, under its key; whoever asks with the same key waits for
the same call. The last finished calls are kept (256 of them, 16 MiB in all), so a lost answer can be fetched again.
"""

from __future__ import annotations

import os
import socket
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
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
    SandboxUnavailable,
    SkyEnvError,
    boundary,
)
from skyenv.remote.channel import Channel
from skyenv.remote.inside.wire import Frame
from skyenv.remote.metrics import Metrics
from skyenv.remote.protocol import ExecParameters
from skyenv.remote.tasks import background_tasks

KEPT_CALLS = 256
KEPT_BYTES = 16 << 20
ENDED = "the sandbox's first process ended (killed, or out of memory)"
INLINE = 1 << 20
CHUNK = 1 << 18
FILE_TIMEOUT = 600.0
END_GRACE = 15.0
_FIELDS = (
    *("exit_code", "timed_out", "oom", "session_restarted", "running"),
    *("cwd", "cwd_missing", "seconds", "head", "output_bytes"),
)


class Result(NamedTuple):
    """What a call came to: small fields and raw bytes."""

    meta: dict[str, Any]
    body: bytes = b""


Work = Callable[[], Awaitable[Result]]


@dataclass(slots=True)
class Call:
    """One keyed call. `done` is set once `result` or `error` is."""

    done: anyio.Event = field(default_factory=anyio.Event)
    result: Result | None = None
    error: SkyEnvError | None = None

    async def run(self, work: Work) -> None:
        """Do the work and keep what it came to; never raises but on cancellation."""
        try:
            with boundary(SandboxError, "the node failed"):
                self.result = await work()
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
        """A call that was refused for now is not kept: asking again with its key is a new try."""
        await call.run(work)
        if isinstance(call.error, SandboxUnavailable):
            self._calls.pop(key, None)

    def find(self, key: str) -> Call | None:
        """The call with this key, if it is known."""
        return self._calls.get(key)

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
    """A living sandbox. Made by `open_session`; the node serves its channel and closes it."""

    def __init__(self, name: str, sock: socket.socket, ttl: float, group: TaskGroup, metrics: Metrics) -> None:
        self.name = name
        self._metrics = metrics
        self.channel = Channel(sock, ENDED)
        self.calls = CallLog(group)
        self._ttl = ttl
        self._last_use = time.monotonic()

    def touch(self) -> None:
        """Renew the lease."""
        self._last_use = time.monotonic()

    @property
    def expired(self) -> bool:
        """Whether nobody used it for `ttl` seconds; a running call counts as use."""
        if self.calls.busy:
            self.touch()
        return time.monotonic() - self._last_use > self._ttl

    async def ask(
        self,
        op: str,
        header: dict[str, Any] | None = None,
        payload: bytes = b"",
        fds: tuple[int, ...] = (),
        *,
        timeout: float = 30.0,
    ) -> Frame:
        """One request to the init; its refusal is raised as the matching error."""
        frame = await self.channel.request({"op": op, **(header or {})}, payload, fds, timeout=timeout)
        if (error := frame.header.get("error")) is not None:
            raise _refusal(error)
        return frame

    async def begin(self, env: dict[str, str]) -> None:
        """Let the init start its shell."""
        await self.ask("begin", {"env": env})

    async def exec(self, command: bytes, parameters: ExecParameters) -> Result:
        """Run a command; returns when it ended or, with a soft timeout, fell silent."""
        limit = parameters.timeout + END_GRACE
        return self._ended(await self.ask("exec", parameters.model_dump(), command, timeout=limit))

    async def poll(self, soft_timeout: float | None, typed: bytes = b"") -> Result:
        """Wait for the running command, once `typed` is on its terminal."""
        op = "input" if typed else "poll"
        return self._ended(await self.ask(op, {"soft_timeout": soft_timeout}, typed, timeout=8 * 86400.0))

    async def interrupt(self) -> Result:
        """End the running command."""
        return self._ended(await self.ask("interrupt", timeout=END_GRACE))

    def _ended(self, frame: Frame) -> Result:
        """What a command came to, counted once it has ended."""
        result = _exec_result(frame)
        meta, seconds = result.meta, result.meta.get("seconds")
        if isinstance(seconds, float) and not meta.get("running"):
            self._metrics.executed(
                seconds,
                oom=bool(meta.get("oom")),
                timed_out=bool(meta.get("timed_out")),
                failed=meta.get("exit_code") != 0,
            )
        return result

    async def kill_processes(self) -> Result:
        """Kill everything inside."""
        await self.ask("kill")
        return Result({})

    async def info(self, path: str) -> Result:
        """Describe a path."""
        return Result({"info": (await self.ask("stat", {"path": path})).header["info"]})

    async def list_dir(self, path: str, depth: int) -> list[Any]:
        """List a directory."""
        entries: list[Any] = (await self.ask("list", {"path": path, "depth": depth})).header["entries"]
        return entries

    async def remove(self, path: str) -> Result:
        """Delete a file or symlink."""
        await self.ask("remove", {"path": path})
        return Result({})

    async def read_file(self, path: str, offset: int, max_bytes: int | None) -> bytes:
        """Read a file; a large one is streamed by a child of the init."""
        header = {"path": path, "offset": offset, "max_bytes": max_bytes, "streamed": False}
        frame = await self.ask("read", header)
        if not frame.header["large"]:
            return frame.payload
        return await self._receive("read", {**header, "streamed": True})

    async def write_file(self, path: str, data: bytes, expected_bytes: int | None) -> Result:
        """Write a file; with `expected_bytes`, so many leading bytes of `data` are what it must hold now."""
        header = {"path": path, "expected_bytes": expected_bytes, "size": len(data), "streamed": len(data) > INLINE}
        if header["streamed"]:
            await self._deliver("write", header, data)
        else:
            await self.ask("write", header, data)
        return Result({})

    async def download(self, path: str, exclude: list[str]) -> bytes:
        """A tree as a tar."""
        return await self._receive("pack", {"path": path, "exclude": exclude})

    async def upload(self, path: str, archive: bytes) -> Result:
        """Unpack a tar."""
        await self._deliver("unpack", {"path": path}, archive)
        return Result({})

    async def freeze(self) -> None:
        """Stop everything inside."""
        await self.ask("freeze")

    async def thaw(self) -> None:
        """Let it go on."""
        await self.ask("thaw")

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


def _exec_result(frame: Frame) -> Result:
    return Result({key: frame.header[key] for key in _FIELDS if key in frame.header}, frame.payload)


def _refusal(error: dict[str, Any]) -> SkyEnvError:
    """An error object of the init as our type."""
    code, message = error.get("code"), str(error.get("message"))
    if code in ("path", "conflict"):
        kind = SandboxConflict if code == "conflict" else SandboxPathError
        return kind(int(error.get("errno", 0)), message)
    return EnvError(message) if code in ("busy", "idle") else SandboxError(message)
