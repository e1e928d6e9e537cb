"""The client of a node server or a gateway: the one `SandboxProvider` and the one `Sandbox` that skyenv has.

`connect` owns the HTTP client, the node when it runs in this process, and the task that renews leases, and must be
entered and left in one task; sandboxes themselves may be opened and closed in any.

Three clocks run apart. A *request* waits at most `MAX_WAIT` seconds for its answer, which then says how far things are,
and is followed by the next one. A *command* runs for its own `timeout`, kept by the node and reaching over as many
requests as it takes. A *lease* is the sandbox's `ttl`, renewed by every use and by `connect` while the block is open.
"""

from __future__ import annotations

import json
import logging
import secrets
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx

from skyenv.errors import SandboxError, SandboxLost, SkyEnvError
from skyenv.remote.creation import Creation
from skyenv.remote.protocol import (
    ACK,
    KEY,
    META,
    SECRET,
    Spec,
    check_environment,
    decode_meta,
    encode_query,
    parse_spec,
)
from skyenv.remote.results import Pieces, exec_result
from skyenv.remote.sending import PATIENCE, Headers, Method, Sender, sender_to
from skyenv.remote.tasks import background_tasks
from skyenv.types import ExecResult, FileInfo, SandboxStats

LOG = logging.getLogger(__name__)
TRANSFER_TIMEOUT = 660.0
DELETE_TIMEOUT = 15.0
LEASE_TICK = 0.2


@asynccontextmanager
async def connect(
    url: str | None = None,
    token: str | None = None,
    *,
    backend: str = "local",
    verify: bool | str | Path = True,
    patience: float = PATIENCE,
) -> AsyncIterator[SandboxClient]:
    """A client of the server at `url`, or of a node in this process that uses `backend` and ends with the block.

    `verify`: for https, a file of certificates to trust instead of the system's, or False. `patience`: for how many
    seconds to ask again a server that answered before and is busy or away now.
    ConfigError when the backend cannot work on this machine or the URL is not one.
    """
    async with AsyncExitStack() as stack:
        if url is None:
            from skyenv.remote.node import in_process

            app = await stack.enter_async_context(in_process(backend))
            transport: httpx.AsyncBaseTransport = httpx.ASGITransport(app, raise_app_exceptions=False)
            sender = Sender(transport, "http://node", {}, patience=patience)
        else:
            sender = sender_to(url, token, verify, patience=patience)
        client = SandboxClient(await stack.enter_async_context(sender))
        group = await stack.enter_async_context(background_tasks())
        group.start_soon(client.keep_leases)
        yield client


class SandboxClient:
    """A `SandboxProvider`. Made by `connect`."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._leases: dict[str, float] = {}

    async def overview(self) -> dict[str, Any]:
        """The nodes and sandboxes behind this address, a line each: `nodes` and `sandboxes`; see `overview`."""
        response = await self._sender.send("GET", "/sandboxes")
        overview: dict[str, Any] = response.json()
        return overview

    async def health(self) -> dict[str, Any]:
        """The node's backend, its mode, which limits are active and what is missing."""
        response = await self._sender.send("GET", "/health")
        health: dict[str, Any] = response.json()
        return health

    @asynccontextmanager
    async def sandbox(
        self,
        image: str | None = None,
        *,
        snapshot: str | None = None,
        env: Mapping[str, str] | None = None,
        on_state: Callable[[str], None] | None = None,
        **spec: Any,
    ) -> AsyncIterator[RemoteSandbox]:
        """Open a sandbox; leaving the block deletes it.

        `spec`: memory_bytes, pids, cpus, file_bytes, disk_bytes, tmpfs_bytes, ttl (seconds without use), shell
        ("bash" or "sh"); see `protocol.Spec`. `on_state` gets "queued", "pulling", "starting" when it takes long.
        ConfigError naming the nearest key; SandboxUnavailable when none can be had.
        """
        wanted, name, secret = parse_spec(spec), uuid.uuid4().hex, {SECRET: secrets.token_hex(16)}
        check_environment(env or {})
        body = {
            "image": image,
            "snapshot": snapshot,
            "env": dict(env or {}),
            "spec": wanted.model_dump(exclude_unset=True),
        }
        creation = Creation(self._sender, name, json.dumps(body).encode(), secret, on_state)
        try:
            await creation.finish()
            self._leases[creation.id] = wanted.ttl
            yield RemoteSandbox(self, creation.id, env, wanted, secret)
        finally:
            self._leases.pop(creation.id, None)
            await self._delete(f"/sandboxes/{creation.id}", secret)

    async def _delete(self, path: str, headers: Headers | None = None) -> None:
        """Delete even when cancelled. What a node that is out of reach keeps ends there with its lease."""
        with anyio.CancelScope(shield=True), anyio.move_on_after(DELETE_TIMEOUT):
            try:
                await self._sender.send("DELETE", path, headers=headers)
            except SandboxLost:
                return
            except SandboxError as error:
                LOG.warning("%s could not be deleted: %s", path, error)

    async def prefetch(
        self,
        image: str | None = None,
        *,
        snapshot: str | None = None,
        env: Mapping[str, str] | None = None,
        count: int = 0,
        keep: float = 600.0,
        **spec: Any,
    ) -> None:
        """Have `count` sandboxes ready for those who will open ones with the same arguments, and the image in any case.

        Returns at once. A node makes them while it has nothing better to do, and keeps them until nobody has opened one
        for `keep` seconds; a count of 0 ends that.
        """
        body = {
            **{"image": image, "snapshot": snapshot, "env": dict(env or {}), "count": count, "keep": keep},
            "spec": parse_spec(spec).model_dump(exclude_unset=True),
        }
        sent = {key: value for key, value in body.items() if value is not None}
        headers = {KEY: uuid.uuid4().hex}
        await self._sender.send("POST", "/pools?wait=0", json.dumps(sent).encode(), headers)

    async def delete_snapshot(self, snapshot: str) -> None:
        """Forget a snapshot; sandboxes that were started from it live on. Unknown ids are ignored."""
        try:
            await self._sender.send("DELETE", f"/snapshots/{snapshot}")
        except SandboxLost:
            return  # with its node

    async def discard_snapshot(self, snapshot: str) -> None:
        """`delete_snapshot` that also works while being cancelled and does not mind a node that is out of reach."""
        await self._delete(f"/snapshots/{snapshot}")

    async def keep_leases(self) -> None:
        """Renew the leases of open sandboxes until cancelled; run by `connect`."""
        renewed = anyio.current_time()
        while True:
            await anyio.sleep(LEASE_TICK)
            if self._leases and anyio.current_time() - renewed >= min(self._leases.values()) / 4:
                renewed = anyio.current_time()
                try:
                    await self._sender.send("POST", "/leases", json.dumps(list(self._leases)).encode())
                except SkyEnvError:
                    continue

    async def call(
        self, method: Method, path: str, body: bytes = b"", /, *, headers: Headers, **query: Any
    ) -> httpx.Response:
        """One keyed request, followed until it is done however long that takes."""
        key = uuid.uuid4().hex
        full = f"{path}?{encode_query(**query)}" if query else path
        response = await self._sender.send(method, full, body, {**headers, KEY: key})
        if response.status_code == 202:
            follow = f"{path.rpartition('/')[0]}/calls/{key}"
            while response.status_code == 202:
                response = await self._sender.send("GET", follow, headers=headers)
        headers[ACK] = key
        return response

    async def fetch(self, path: str, /, *, headers: Headers, **query: Any) -> httpx.Response:
        """One reading request that may transfer a lot."""
        full = f"{path}?{encode_query(**query)}"
        return await self._sender.send("GET", full, headers=headers, timeout=TRANSFER_TIMEOUT)


class RemoteSandbox:
    """A `Sandbox` on a node. Made and deleted by `SandboxClient.sandbox`. Not safe to share between tasks.

    Requests for it must carry `secret` in the header `skyenv-sandbox-token`, whoever sends them.
    """

    def __init__(
        self, client: SandboxClient, name: str, env: Mapping[str, str] | None, spec: Spec, headers: Headers
    ) -> None:
        self.name = name
        self.secret = headers[SECRET]
        self._headers = dict(headers)
        self._client = client
        self._env = env
        self._spec = spec
        self._base = f"/sandboxes/{name}"

    async def _call(self, method: Method, path: str, body: bytes = b"", /, **query: Any) -> httpx.Response:
        return await self._client.call(method, path, body, headers=self._headers, **query)

    async def _fetch(self, path: str, /, **query: Any) -> httpx.Response:
        return await self._client.fetch(path, headers=self._headers, **query)

    async def exec(
        self,
        command: str,
        *,
        timeout: float = 60.0,
        soft_timeout: float | None = None,
        max_output_bytes: int = 1 << 20,
        terminal: bool = False,
    ) -> ExecResult:
        """See `core.Shell.exec`."""
        response = await self._call(
            "POST",
            f"{self._base}/exec",
            command.encode("utf-8", "surrogateescape"),
            timeout=timeout,
            soft_timeout=soft_timeout,
            max_output_bytes=max_output_bytes,
            terminal=terminal or None,
        )
        return exec_result(response)

    async def poll(self, *, soft_timeout: float | None = None) -> ExecResult:
        """See `core.Shell.poll`."""
        return exec_result(await self._call("POST", f"{self._base}/poll", soft_timeout=soft_timeout))

    async def stream(
        self, command: str, *, timeout: float = 60.0, flush: float = 0.1, max_output_bytes: int = 1 << 20
    ) -> AsyncIterator[ExecResult]:
        """Run a command and yield what it prints as it does, each piece once, the last with how it ended.

        Output waits at most `flush` seconds for more; of a piece at most `max_output_bytes` come. Whoever stops to
        listen leaves the command running, for `poll` or `interrupt`.
        """
        pieces = Pieces()
        query = {"timeout": timeout, "flush": flush, "max_output_bytes": max_output_bytes}
        data = command.encode("utf-8", "surrogateescape")
        piece = pieces.next(await self._call("POST", f"{self._base}/exec", data, **query))
        while piece.running:
            yield piece
            piece = pieces.next(await self._call("POST", f"{self._base}/poll", flush=flush))
        yield piece

    async def interrupt(self) -> ExecResult:
        """See `core.Shell.interrupt`."""
        return exec_result(await self._call("POST", f"{self._base}/interrupt"))

    async def send_input(self, text: str, *, soft_timeout: float | None = None) -> ExecResult:
        """See `core.Shell.send_input`."""
        data = text.encode("utf-8", "surrogateescape")
        return exec_result(await self._call("POST", f"{self._base}/poll", data, soft_timeout=soft_timeout))

    async def stat(self, path: str) -> FileInfo:
        """See `core.FileOps.stat`."""
        response = await self._fetch(f"{self._base}/info", path=path)
        return FileInfo(*decode_meta(response.headers.get(META))["info"])

    async def read_file(self, path: str, *, offset: int = 0, max_bytes: int | None = None) -> bytes:
        """See `core.FileOps.read_file`."""
        query = {"path": path, "offset": offset, "max_bytes": max_bytes}
        return (await self._fetch(f"{self._base}/file", **query)).content

    async def write_file(self, path: str, data: bytes, *, expected: bytes | None = None) -> None:
        """See `core.FileOps.write_file`."""
        length = None if expected is None else len(expected)
        body = data if expected is None else expected + data
        await self._call("PUT", f"{self._base}/file", body, path=path, expected_bytes=length)

    async def list_dir(self, path: str, *, depth: int = 1) -> list[FileInfo]:
        """See `core.FileOps.list_dir`."""
        response = await self._fetch(f"{self._base}/entries", path=path, depth=depth)
        return [FileInfo(*entry) for entry in json.loads(response.content)]

    async def remove(self, path: str) -> None:
        """See `core.FileOps.remove`."""
        await self._call("DELETE", f"{self._base}/file", path=path)

    async def download(self, path: str, *, exclude: Sequence[str] = ()) -> bytes:
        """See `core.Sandbox.download`. Files that change meanwhile may be caught in between."""
        query = {"path": path, "exclude": json.dumps(list(exclude))}
        return (await self._fetch(f"{self._base}/archive", **query)).content

    async def upload(self, path: str, archive: bytes) -> None:
        """See `core.Sandbox.upload`. A refused member raises `SandboxPathError`; what came before it stays."""
        await self._call("PUT", f"{self._base}/archive", archive, path=path)

    async def kill_processes(self) -> None:
        """See `core.Sandbox.kill_processes`. Working directory and exported variables are kept."""
        await self._call("POST", f"{self._base}/kill")

    async def pause(self) -> None:
        """Let nothing inside run, and no time pass for a running command, until `resume` or whatever else is asked."""
        await self._call("POST", f"{self._base}/pause")

    async def resume(self) -> None:
        """Go on after `pause`. Idempotent."""
        await self._call("POST", f"{self._base}/resume")

    async def stats(self) -> SandboxStats:
        """What it uses now. A paused sandbox stays paused."""
        response = await self._fetch(f"{self._base}/stats")
        return SandboxStats(**decode_meta(response.headers.get(META)))

    async def snapshot(self, *, shell: bool = True, drop: bool = False) -> str:
        """See `core.Sandbox.snapshot`. Files in /run and /dev/shm, which are memory, travel with the shell."""
        response = await self._call("POST", f"{self._base}/snapshot", shell=shell, drop=drop)
        return str(decode_meta(response.headers.get(META))["snapshot"])

    async def rollback(self, snapshot: str, *, drop: bool = False) -> None:
        """See `core.Sandbox.rollback`."""
        await self._call("POST", f"{self._base}/rollback", snapshot=snapshot, drop=drop)

    async def tunnel(self, target: str, *, port: int = 0) -> int:
        """See `core.Sandbox.tunnel`."""
        response = await self._call("POST", f"{self._base}/tunnel", target=target, port=port)
        return int(decode_meta(response.headers.get(META))["port"])

    def fork(self, *, shell: bool = True, drop: bool = False) -> AbstractAsyncContextManager[RemoteSandbox]:
        """See `core.Sandbox.fork`. The twin has the same limits; without `shell`, the variables of the creation."""
        return self._fork(shell, drop)

    @asynccontextmanager
    async def _fork(self, shell: bool, drop: bool) -> AsyncIterator[RemoteSandbox]:
        async with AsyncExitStack() as stack:
            snapshot = await self.snapshot(shell=shell, drop=drop)
            try:
                spec = self._spec.model_dump(exclude_unset=True)
                opening = self._client.sandbox(snapshot=snapshot, env=None if shell else self._env, **spec)
                twin = await stack.enter_async_context(opening)
            finally:
                await self._client.discard_snapshot(snapshot)
            yield twin
