"""The client of a node server, near or far: the one `SandboxProvider` and the one `Sandbox` that skyenv has.

`connect` owns the HTTP client, the node when it runs in this process, and the task that renews leases, and must be
entered and left in one task; sandboxes themselves may be opened and closed in any. Retries live here only: a
request that never left, or one that carries a key or is idempotent by nature, is sent again; a refusal is not.
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, Literal

import anyio
import httpx
import tenacity

from skyenv.errors import ConfigError, SandboxError, SandboxProtocolError, SandboxUnavailable, SkyEnvError
from skyenv.remote.protocol import (
    KEY,
    MAX_WAIT,
    META,
    Spec,
    check_environment,
    decode_error,
    decode_meta,
    encode_query,
    parse_spec,
)
from skyenv.remote.tasks import background_tasks
from skyenv.types import ExecResult, FileInfo

Method = Literal["GET", "PUT", "POST", "DELETE"]
LOG = logging.getLogger(__name__)
ATTEMPTS = 5
PATIENCE = 60.0
REQUEST_GRACE = 15.0
TRANSFER_TIMEOUT = 660.0
DELETE_TIMEOUT = 15.0
LEASE_TICK = 0.2
_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


@asynccontextmanager
async def connect(
    url: str | None = None, token: str | None = None, *, backend: str = "local"
) -> AsyncIterator[SandboxClient]:
    """A client of the node server at `url`, or of one in this process that uses `backend` and ends with the block.

    ConfigError when the backend cannot work on this machine or the URL is not one.
    """
    async with AsyncExitStack() as stack:
        if url is None:
            from skyenv.remote.node import in_process

            app = await stack.enter_async_context(in_process(backend))
            transport: httpx.AsyncBaseTransport = httpx.ASGITransport(app, raise_app_exceptions=False)
            http = httpx.AsyncClient(transport=transport, base_url="http://node", timeout=None)
        else:
            http = _http_client(url, token)
        await stack.enter_async_context(http)
        client = SandboxClient(http)
        group = await stack.enter_async_context(background_tasks())
        group.start_soon(client.keep_leases)
        yield client


def _http_client(url: str, token: str | None) -> httpx.AsyncClient:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"url {url!r}: must start with http:// or https://")
    return httpx.AsyncClient(
        base_url=url,
        headers={"authorization": f"Bearer {token}"} if token is not None else None,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
        timeout=httpx.Timeout(REQUEST_GRACE, pool=None),
        trust_env=False,
        verify=url.startswith("https://"),
    )


def _may_repeat(error: BaseException) -> bool:
    """Whether sending again is safe and may help. Every request of ours is idempotent, by key or by nature."""
    if isinstance(error, SandboxUnavailable):
        return error.retry_after is not None
    return isinstance(error, httpx.TransportError)


def _pause(state: tenacity.RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome else None
    backoff: float = tenacity.wait_random_exponential(multiplier=0.1, max=2.0)(state)
    return max(backoff, error.retry_after or 0.0) if isinstance(error, SandboxUnavailable) else backoff


def _enough(state: tenacity.RetryCallState) -> bool:
    """A node that says when to come back is asked for longer than one that does not answer."""
    error = state.outcome.exception() if state.outcome else None
    if isinstance(error, SandboxUnavailable):
        return (state.seconds_since_start or 0.0) > PATIENCE
    return state.attempt_number >= ATTEMPTS


class SandboxClient:
    """A `SandboxProvider`. Made by `connect`."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self._leases: dict[str, float] = {}

    async def health(self) -> dict[str, Any]:
        """The node's backend, its mode, which limits are active and what is missing."""
        response = await self._send("GET", "/health")
        health: dict[str, Any] = response.json()
        return health

    @asynccontextmanager
    async def sandbox(
        self,
        image: str | None = None,
        *,
        snapshot: str | None = None,
        env: Mapping[str, str] | None = None,
        **spec: Any,
    ) -> AsyncIterator[RemoteSandbox]:
        """Open a sandbox; leaving the block deletes it.

        `spec`: memory_bytes, pids, cpus, file_bytes, disk_bytes, tmpfs_bytes, ttl (seconds without use), shell
        ("bash" or "sh"); see `protocol.Spec`.
        ConfigError naming the nearest key; SandboxUnavailable when none can be had.
        """
        wanted, name = parse_spec(spec), uuid.uuid4().hex
        check_environment(env or {})
        body = {
            "image": image,
            "snapshot": snapshot,
            "env": dict(env or {}),
            "spec": wanted.model_dump(exclude_unset=True),
        }
        try:
            await self.call("PUT", f"/sandboxes/{name}", json.dumps(body).encode(), attach=f"/creations/{name}")
            self._leases[name] = wanted.ttl
            yield RemoteSandbox(self, name, env, wanted)
        finally:
            self._leases.pop(name, None)
            await self._delete(f"/sandboxes/{name}")

    async def _delete(self, path: str) -> None:
        """Delete even when cancelled. What a node that is out of reach keeps ends there with its lease."""
        with anyio.CancelScope(shield=True), anyio.move_on_after(DELETE_TIMEOUT):
            try:
                await self._send("DELETE", path)
            except SandboxError as error:
                LOG.warning("%s could not be deleted: %s", path, error)

    async def delete_snapshot(self, snapshot: str) -> None:
        """Forget a snapshot; sandboxes that were started from it live on. Unknown ids are ignored."""
        await self._send("DELETE", f"/snapshots/{snapshot}")

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
                    await self._send("POST", "/leases", json.dumps(list(self._leases)).encode())
                except SkyEnvError:
                    continue

    async def call(
        self, method: Method, path: str, body: bytes = b"", /, *, attach: str | None = None, **query: Any
    ) -> httpx.Response:
        """One keyed request, followed until it is done however long that takes."""
        key = uuid.uuid4().hex
        full = f"{path}?{encode_query(**query)}" if query else path
        response = await self._send(method, full, body, key)
        follow = attach or f"{path.rpartition('/')[0]}/calls/{key}"
        while response.status_code == 202:
            response = await self._send("GET", follow)
        return response

    async def fetch(self, path: str, /, **query: Any) -> httpx.Response:
        """One reading request that may transfer a lot."""
        return await self._send("GET", f"{path}?{encode_query(**query)}", timeout=TRANSFER_TIMEOUT)

    async def _send(
        self, method: Method, path: str, body: bytes = b"", key: str = "", *, timeout: float = MAX_WAIT + REQUEST_GRACE
    ) -> httpx.Response:
        """Send until an answer comes; an error answer is raised as what it means."""
        headers = {KEY: key} if key else {}
        limits = httpx.Timeout(timeout, connect=REQUEST_GRACE, pool=None)
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(_may_repeat),
            wait=_pause,
            stop=_enough,
            sleep=anyio.sleep,
            reraise=True,
        )
        try:
            response: httpx.Response = await retrying(self._once, method, path, body, headers, limits)
        except _NEVER_SENT as error:
            raise SandboxUnavailable(f"cannot reach the node at {self._http.base_url}: {error}") from error
        except httpx.TransportError as error:
            raise SandboxError(f"the connection to {self._http.base_url} broke: {error!r}") from error
        except httpx.HTTPError as error:
            raise SandboxProtocolError(f"{method} {path}: {error!r}") from error
        return response

    async def _once(
        self, method: Method, path: str, body: bytes, headers: dict[str, str], limits: httpx.Timeout
    ) -> httpx.Response:
        response = await self._http.request(method, path, content=body, headers=headers, timeout=limits)
        if response.status_code >= 300:
            raise decode_error(response.content)
        return response


class RemoteSandbox:
    """A `Sandbox` on a node. Made and deleted by `SandboxClient.sandbox`. Not safe to share between tasks."""

    def __init__(self, client: SandboxClient, name: str, env: Mapping[str, str] | None, spec: Spec) -> None:
        self.name = name
        self._client = client
        self._env = env
        self._spec = spec
        self._base = f"/sandboxes/{name}"

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
        response = await self._client.call(
            "POST",
            f"{self._base}/exec",
            command.encode("utf-8", "surrogateescape"),
            timeout=timeout,
            soft_timeout=soft_timeout,
            max_output_bytes=max_output_bytes,
            terminal=terminal or None,
        )
        return _exec_result(response)

    async def poll(self, *, soft_timeout: float | None = None) -> ExecResult:
        """See `core.Shell.poll`."""
        return _exec_result(await self._client.call("POST", f"{self._base}/poll", soft_timeout=soft_timeout))

    async def interrupt(self) -> ExecResult:
        """See `core.Shell.interrupt`."""
        return _exec_result(await self._client.call("POST", f"{self._base}/interrupt"))

    async def send_input(self, text: str, *, soft_timeout: float | None = None) -> ExecResult:
        """See `core.Shell.send_input`."""
        data = text.encode("utf-8", "surrogateescape")
        return _exec_result(await self._client.call("POST", f"{self._base}/poll", data, soft_timeout=soft_timeout))

    async def stat(self, path: str) -> FileInfo:
        """See `core.FileOps.stat`."""
        response = await self._client.fetch(f"{self._base}/info", path=path)
        return FileInfo(*decode_meta(response.headers.get(META))["info"])

    async def read_file(self, path: str, *, offset: int = 0, max_bytes: int | None = None) -> bytes:
        """See `core.FileOps.read_file`."""
        query = {"path": path, "offset": offset, "max_bytes": max_bytes}
        return (await self._client.fetch(f"{self._base}/file", **query)).content

    async def write_file(self, path: str, data: bytes, *, expected: bytes | None = None) -> None:
        """See `core.FileOps.write_file`."""
        length = None if expected is None else len(expected)
        body = data if expected is None else expected + data
        await self._client.call("PUT", f"{self._base}/file", body, path=path, expected_bytes=length)

    async def list_dir(self, path: str, *, depth: int = 1) -> list[FileInfo]:
        """See `core.FileOps.list_dir`."""
        response = await self._client.fetch(f"{self._base}/entries", path=path, depth=depth)
        return [FileInfo(*entry) for entry in json.loads(response.content)]

    async def remove(self, path: str) -> None:
        """See `core.FileOps.remove`."""
        await self._client.call("DELETE", f"{self._base}/file", path=path)

    async def download(self, path: str, *, exclude: Sequence[str] = ()) -> bytes:
        """See `core.Sandbox.download`. Files that change meanwhile may be caught in between."""
        query = {"path": path, "exclude": json.dumps(list(exclude))}
        return (await self._client.fetch(f"{self._base}/archive", **query)).content

    async def upload(self, path: str, archive: bytes) -> None:
        """See `core.Sandbox.upload`. A refused member raises `SandboxPathError`; what came before it stays."""
        await self._client.call("PUT", f"{self._base}/archive", archive, path=path)

    async def kill_processes(self) -> None:
        """See `core.Sandbox.kill_processes`. Working directory and exported variables are kept."""
        await self._client.call("POST", f"{self._base}/kill")

    async def snapshot(self, *, shell: bool = True, drop: bool = False) -> str:
        """See `core.Sandbox.snapshot`. Files in /run and /dev/shm, which are memory, travel with the shell."""
        response = await self._client.call("POST", f"{self._base}/snapshot", shell=shell, drop=drop)
        return str(decode_meta(response.headers.get(META))["snapshot"])

    async def rollback(self, snapshot: str, *, drop: bool = False) -> None:
        """See `core.Sandbox.rollback`."""
        await self._client.call("POST", f"{self._base}/rollback", snapshot=snapshot, drop=drop)

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


def _exec_result(response: httpx.Response) -> ExecResult:
    meta, data = decode_meta(response.headers.get(META)), response.content
    total, head = meta["output_bytes"], meta["head"]
    left_out = total - len(data)
    if left_out > 0:
        note = f"\n[... {left_out} bytes left out ...]\n"
        output = data[:head].decode(errors="replace") + note + data[head:].decode(errors="replace")
    else:
        output = data.decode(errors="replace")
    return ExecResult(
        exit_code=meta["exit_code"],
        output=output,
        timed_out=meta.get("timed_out", False),
        truncated=left_out > 0,
        oom=meta.get("oom", False),
        session_restarted=meta.get("session_restarted", False),
        seconds=meta["seconds"],
        running=meta.get("running", False),
        cwd=os.fsencode(meta["cwd"]).decode(errors="replace"),
        cwd_missing=meta.get("cwd_missing", False),
        output_bytes=total,
    )
