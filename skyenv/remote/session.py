"""One sandbox as the node sees it: the channel to its init, its lease, whether it is frozen, and its keyed calls.

What changes something carries a key. The init keeps the log of keys, which outlives this process; the one in `calls`
spares a round trip and holds what never reached the init. A sandbox is thawed before anything is asked of it.
"""

from __future__ import annotations

import logging
import math
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
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
)
from skyenv.remote.backends import Backend, Record
from skyenv.remote.calls import CallLog, Result
from skyenv.remote.channel import Channel
from skyenv.remote.inside.state import Saved
from skyenv.remote.inside.wire import Frame
from skyenv.remote.metrics import Metrics
from skyenv.remote.pipes import receiving, sending
from skyenv.remote.protocol import ExecParameters, PollParameters
from skyenv.remote.records import lease_end, lease_slack
from skyenv.types import SandboxStats

LOG = logging.getLogger(__name__)
ENDED = "the sandbox's first process ended (killed, or out of memory)"
INLINE = 1 << 20
FILE_TIMEOUT = 600.0
END_GRACE = 15.0
LONGEST = 8 * 86400.0
MOST_ACKNOWLEDGED = 64  # between two requests to the init
_FIELDS = (
    *("exit_code", "timed_out", "oom", "session_restarted", "running"),
    *("cwd", "cwd_missing", "seconds", "head", "output_bytes"),
)


class Kept(NamedTuple):
    """A snapshot of a sandbox as it still is, and whether its session is part of it."""

    snapshot: str
    shell: bool


class Session:
    """A living sandbox. The node makes it, serves its channel and closes that.

    `record` is what is kept with the sandbox for the next node: `name`, `ttl`, `freeze_after` and `expires`, when its
    lease ends at the latest by this machine's monotonic clock. Uses are noted there once in a while, so a lease that no
    node watched ends up to an eighth of it late, never early.
    """

    def __init__(
        self,
        sandbox: str,
        sock: socket.socket,
        record: Record,
        backend: Backend,
        group: TaskGroup,
        metrics: Metrics,
    ) -> None:
        self.name: str = record["name"]
        self.sandbox = sandbox
        self.record = record
        self.ttl: float = record["ttl"]
        self._metrics = metrics
        self.channel = Channel(sock, ENDED)
        self.calls = CallLog(group)
        self.frozen = False
        self.kept: Kept | None = None
        self._backend = backend
        self._last_use: float = min(time.monotonic(), record["expires"] - self.ttl)
        self._acknowledged: list[str] = []
        self._last_acknowledged = ""
        self._askers = 0
        self.last_seconds: float | None = None
        self._turning = anyio.Lock()
        self._clocks: dict[anyio.CancelScope, float] = {}

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
        return self.idle_seconds > self.ttl

    @property
    def last_use(self) -> float:
        """When it was used last, by the monotonic clock."""
        return self._last_use

    async def stats(self) -> SandboxStats:
        """What it uses now; does not thaw it."""
        return replace(await self._backend.stats(self.sandbox), frozen=self.frozen)

    async def note_use(self) -> None:
        """Write down how long the lease lasts now, when that has changed enough."""
        expires = lease_end(self._last_use, self.ttl)
        if expires - self.record["expires"] >= lease_slack(self.ttl):
            self.record["expires"] = expires
            await self._backend.note(self.sandbox, self.record)

    def acknowledge(self, key: str) -> None:
        """The client has the answer of this call; the init is told with the next request."""
        self.calls.drop(key)
        if key != self._last_acknowledged and len(self._acknowledged) < MOST_ACKNOWLEDGED:
            self._acknowledged.append(key)
            self._last_acknowledged = key

    async def freeze(self) -> None:
        """Let nothing inside run until something is asked of it or `thaw`. The time of a running command stands still.

        SandboxUnavailable when something does not stop. Idempotent.
        """
        async with self._turning:
            await self._freeze()

    async def _freeze(self) -> None:
        if not self.frozen:
            self.frozen = True
            now = anyio.current_time()
            for scope in self._clocks:
                self._clocks[scope], scope.deadline = scope.deadline - now, math.inf
            try:
                await self._backend.freeze(self.sandbox)
            except SandboxError:
                self._thawed()
                raise

    def _thawed(self) -> None:
        self.frozen, now = False, anyio.current_time()
        for scope, left in self._clocks.items():
            scope.deadline = now + left

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
                self._thawed()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Whoever asks something waits for the end of the block, in which only `save_state` and the like are asked."""
        async with self._turning:
            if self.frozen:
                await self._backend.thaw(self.sandbox)
            self.frozen = True
            try:
                yield
            finally:
                self.frozen = False

    @asynccontextmanager
    async def stopped(self) -> AsyncIterator[None]:
        """Inside `alone`: nothing in the sandbox moves for the block."""
        await self._backend.freeze(self.sandbox)
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                await self._backend.thaw(self.sandbox)

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
                    self._thawed()

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
            self.kept = None
            return await self._put(wanted, payload, fds, timeout)
        finally:
            self._askers -= 1

    async def _put(
        self, wanted: dict[str, Any], payload: bytes = b"", fds: tuple[int, ...] = (), timeout: float = 30.0
    ) -> Frame:
        """`ask` without waiting for a turn."""
        if self._acknowledged:
            wanted["acks"], self._acknowledged = self._acknowledged, []
        frame = await self._request(wanted, payload, fds, timeout)
        if (error := frame.header.get("error")) is not None:
            raise _refusal(error)
        return frame

    async def _request(self, header: dict[str, Any], payload: bytes, fds: tuple[int, ...], timeout: float) -> Frame:
        """A request whose clock stands still while the sandbox is frozen."""
        with anyio.CancelScope(deadline=anyio.current_time() + timeout) as scope:
            self._clocks[scope] = timeout
            try:
                return await self.channel.request(header, payload, fds, timeout=None)
            finally:
                del self._clocks[scope]
        raise SandboxLost(f"no answer to {header['op']!r} within {timeout} s")

    async def begin(self, env: dict[str, str], state: bytes = b"", overrides: Mapping[str, str] | None = None) -> None:
        """Let the init start its shell; with another session's state, in that and with variables on top."""
        await self._put({"op": "begin", "env": env, "overrides": dict(overrides or {})}, state)

    async def save_state(self, shell: bool) -> Saved:
        """What lives inside besides an idle shell and, if it is wanted, the state of that. Inside `alone`."""
        frame = await self._put({"op": "save_state", "shell": shell})
        return Saved(frame.payload, list(frame.header["moving"]), list(frame.header["lost"]))

    async def settle(self) -> None:
        """The root was exchanged: let the shell go on in the new one. Inside `alone`."""
        await self._put({"op": "settle"})

    def exchange(self, sandbox: str, sock: socket.socket) -> None:
        """Go on with another instance, which the node serves; the former channel is closed."""
        self.kept = None
        former, self.channel, self.sandbox = self.channel, Channel(sock, ENDED), sandbox
        former.close("the sandbox was rolled back")

    async def status(self) -> dict[str, Any]:
        """Whether the init was begun, and what moves inside: `begun`, `running`, `processes`. Not when frozen."""
        return (await self.channel.request({"op": "status"})).header

    async def follow(self, key: str) -> Result:
        """What a call that an earlier node made came or comes to. SandboxProtocolError when none is known."""
        return _any_result(await self.ask("follow", {"call": key}, timeout=LONGEST))

    async def exec(self, key: str, command: bytes, parameters: ExecParameters) -> Result:
        """Run a command; returns when it ended or, with a soft timeout, fell silent."""
        header = {**parameters.model_dump(), "key": key}
        self._metrics.moved("in", len(command))
        return self._ended(key, await self.ask("exec", header, command, timeout=parameters.timeout + END_GRACE))

    async def poll(self, key: str, parameters: PollParameters, typed: bytes = b"") -> Result:
        """Wait for the running command, once `typed` is on its terminal."""
        op, header = "input" if typed else "poll", {**parameters.model_dump(), "key": key}
        return self._ended(key, await self.ask(op, header, typed, timeout=LONGEST))

    async def interrupt(self, key: str) -> Result:
        """End the running command."""
        return self._ended(key, await self.ask("interrupt", {"key": key}, timeout=END_GRACE))

    def _ended(self, key: str, frame: Frame) -> Result:
        """What a command came to, counted once it has ended."""
        result = _any_result(frame)
        if isinstance(seconds := result.meta.get("seconds"), float) and not result.meta.get("running"):
            self.last_seconds = seconds
            outcome = self._metrics.executed(result.meta, seconds, len(result.body))
            level = logging.INFO if outcome in ("oom", "timeout") else logging.DEBUG
            if LOG.isEnabledFor(level):
                fields = {"sandbox": self.name, "exec": key, "outcome": outcome, "seconds": round(seconds, 6)}
                LOG.log(level, "command ended", extra=fields)
        return result

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
        chunks: list[bytes] = []

        async def take(chunk: bytes) -> None:
            chunks.append(chunk)

        async with receiving(take) as writer:
            await self.ask(op, header, fds=(writer,), timeout=FILE_TIMEOUT)
        return b"".join(chunks)

    async def _deliver(self, op: str, header: dict[str, Any], data: bytes) -> None:
        """Ask for something that takes its input from a pipe, and feed it."""

        async def chunks() -> AsyncGenerator[bytes, None]:
            yield data

        async with sending(chunks()) as reader:
            await self.ask(op, header, fds=(reader,), timeout=FILE_TIMEOUT)


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
