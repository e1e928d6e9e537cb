"""A connection to a Kubernetes API: a watched set of pods, and held execs. Loads kubernetes_asyncio lazily.

`Cluster` owns its HTTP client. Every wait has a deadline; failures come out as our errors.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterable, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from anyio.abc import ByteStream

from skyenv.errors import ConfigError, SandboxError, SandboxLost, SandboxUnavailable
from skyenv.remote.backends.pods import CONTAINER, MANAGED, NODE, Pod

REQUEST_TIMEOUT = 30.0
WATCH_SECONDS = 240
FRAME = 1 << 15
SELECTOR = f"{MANAGED}=skyenv"
_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_MERGE = "application/merge-patch+json"


class Cluster:
    """Pods of one namespace that carry our label. Made by `connect`."""

    def __init__(self, api: Any, namespace: str) -> None:
        self._api = api
        self._host: str = api.configuration.host
        self._session = api.rest_client.pool_manager
        self.namespace = namespace
        self.pods: dict[str, Pod] = {}
        self._changed = anyio.Event()

    async def call(
        self, method: str, path: str, *, body: Any = None, query: dict[str, Any] | None = None, kind: str | None = None
    ) -> dict[str, Any]:
        """One request to the API; its JSON. SandboxUnavailable, or ConfigError when asking again would not help."""
        import aiohttp

        try:
            with anyio.fail_after(REQUEST_TIMEOUT):
                async with await self._request(method, path, body, query or {}, kind or "application/json") as answer:
                    text = await answer.text()
                    if answer.status >= 400:
                        raise refusal(answer.status, text)
        except (OSError, TimeoutError, aiohttp.ClientError) as error:
            raise SandboxUnavailable(f"the Kubernetes API does not answer: {error!r}", 2.0) from error
        value: dict[str, Any] = json.loads(text)
        return value

    async def _request(self, method: str, path: str, body: Any, query: dict[str, Any], kind: str) -> Any:
        import aiohttp

        headers = {"Accept": "application/json", "Content-Type": kind}
        await self._api.update_params_for_auth(headers, [], ["BearerToken"])
        data = None if body is None else json.dumps(body)
        return await self._session.request(
            method, self._host + path, params=query, data=data, headers=headers, proxy=self._api.configuration.proxy,
            timeout=aiohttp.ClientTimeout(total=None),
        )  # fmt: skip

    def path(self, plural: str, name: str = "", *, group: str = "api/v1", sub: str = "") -> str:
        """The path of a collection or object of this namespace."""
        parts = (group, "namespaces", self.namespace, plural, name, sub)
        return "/" + "/".join(part for part in parts if part)

    # Pods.

    async def watch(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Keep `pods` true, for ever; started once the first list is there."""
        known = False
        while True:
            try:
                listing = await self.call("GET", self.path("pods"), query={"labelSelector": SELECTOR})
                self.pods = {pod["metadata"]["name"]: pod for pod in listing["items"]}
                self._tell()
                if not known:
                    known = True
                    task_status.started()
                await self._follow(listing["metadata"]["resourceVersion"])
            except SandboxError:
                if not known:
                    raise
                await anyio.sleep(1.0)

    async def _follow(self, version: str) -> None:
        """Take events until the server ends the watch or has forgotten the version."""
        async for event in self._events(version):
            pod = event["object"]
            if event["type"] == "ERROR":
                return
            name = pod["metadata"]["name"]
            if event["type"] == "DELETED":
                self.pods.pop(name, None)
            elif event["type"] != "BOOKMARK":
                self.pods[name] = pod
            self._tell()

    async def _events(self, version: str) -> AsyncIterator[dict[str, Any]]:
        import aiohttp

        query = {
            "labelSelector": SELECTOR, "watch": "true", "resourceVersion": version, "timeoutSeconds": WATCH_SECONDS,
        }  # fmt: skip
        try:
            with anyio.fail_after(WATCH_SECONDS + REQUEST_TIMEOUT):
                async with await self._request("GET", self.path("pods"), None, query, "application/json") as answer:
                    async for line in _lines(answer.content.iter_any()):
                        yield json.loads(line)
        except (OSError, TimeoutError, aiohttp.ClientError) as error:
            raise SandboxUnavailable(f"the watch of the Kubernetes API ended: {error!r}", 1.0) from error

    def _tell(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def wait_for(self, name: str, settled: Callable[[Pod | None], bool], timeout: float) -> Pod | None:
        """The pod once `settled` says so of it, or as it is after `timeout` seconds."""
        with anyio.move_on_after(timeout):
            while not settled(self.pods.get(name)):
                await self._changed.wait()
        return self.pods.get(name)

    async def create_pod(self, pod: Pod) -> None:
        """Create it. SandboxUnavailable when there is no room for it, ConfigError when it is wrong."""
        made = await self.call("POST", self.path("pods"), body=pod)
        self.pods.setdefault(made["metadata"]["name"], made)

    async def annotate(self, name: str, annotations: dict[str, str]) -> None:
        """Change annotations of a pod. SandboxLost when it is gone."""
        body = {"metadata": {"annotations": annotations}}
        await self.call("PATCH", self.path("pods", name), body=body, kind=_MERGE)

    async def delete_pod(self, name: str) -> None:
        """End it at once. Idempotent."""
        try:
            await self.call("DELETE", self.path("pods", name), query={"gracePeriodSeconds": 0})
        except SandboxLost:
            pass
        self.pods.pop(name, None)

    def of_node(self, node: str) -> list[Pod]:
        """The pods that a node made."""
        return [pod for pod in self.pods.values() if pod["metadata"]["labels"].get(NODE) == node]

    # Exec.

    @asynccontextmanager
    async def exec(self, pod: str, command: list[str]) -> AsyncIterator[ByteStream]:
        """A program in the sandbox's container, held for the block: its input is sent, its output received."""
        import aiohttp
        from kubernetes_asyncio.stream.ws_client import get_websocket_url

        query = [("container", CONTAINER), ("stdin", "true"), ("stdout", "true"), ("stderr", "true")]
        query += [("command", word) for word in command]
        url = get_websocket_url(self._host + self.path("pods", pod, sub="exec"))
        headers: dict[str, str] = {"sec-websocket-protocol": "v4.channel.k8s.io"}
        await self._api.update_params_for_auth(headers, [], ["BearerToken"])
        try:
            connecting = self._session.ws_connect(url, params=query, headers=headers, max_msg_size=0)
            with anyio.fail_after(REQUEST_TIMEOUT):
                socket = await connecting
        except aiohttp.WSServerHandshakeError as error:
            raise refusal(error.status, error.message) from error
        except (OSError, TimeoutError, aiohttp.ClientError) as error:
            raise SandboxUnavailable(f"the Kubernetes API does not answer: {error!r}", 2.0) from error
        async with socket:
            yield ExecStream(socket)


def _own_namespace() -> str | None:
    """The namespace of the pod that this process runs in, if it has a service account; None elsewhere."""
    return _NAMESPACE.read_text().strip() if _NAMESPACE.exists() and not os.environ.get("KUBECONFIG") else None


class ExecStream(ByteStream):
    """Standard input and output of a held program, over the API's websocket protocol (v4.channel.k8s.io)."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._complaint = b""

    async def send(self, item: bytes) -> None:
        """To its standard input."""
        for start in range(0, len(item), FRAME):
            await self._socket.send_bytes(b"\0" + item[start : start + FRAME])

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """From its standard output. SandboxUnavailable with its last words once it ended."""
        while True:
            packet = await self._socket.receive()
            if not isinstance(packet.data, bytes):
                raise SandboxUnavailable(f"the exec ended: {self._complaint.decode(errors='replace')}", 1.0)
            channel, data = packet.data[:1], packet.data[1:]
            if channel == b"\1" and data:
                return data
            if channel in (b"\2", b"\3"):
                self._complaint = (self._complaint + data)[-2000:]

    async def send_eof(self) -> None:
        """The protocol cannot close one direction only."""
        await self.aclose()

    async def aclose(self) -> None:
        """End it."""
        await self._socket.close()


def refusal(status: int, text: str) -> Exception:
    """An answer of the API that is no success, as our error."""
    try:
        message = str(json.loads(text).get("message"))
    except ValueError:
        message = text[:500]
    if status == 404:
        return SandboxLost(f"the cluster has no such thing: {message}")
    if status == 403 and "exceeded quota" in message:
        return SandboxUnavailable(f"the namespace's quota is used up: {message}", 5.0, reason="full")
    if status in (400, 401, 403, 422):
        return ConfigError(f"the cluster refuses this: {message}")
    return SandboxUnavailable(f"the Kubernetes API answered {status}: {message}", 2.0)


async def _lines(chunks: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """The whole lines of a stream that are not empty."""
    buffer = b""
    async for chunk in chunks:
        *lines, buffer = (buffer + chunk).split(b"\n")
        for line in filter(None, lines):
            yield line


@asynccontextmanager
async def connect(namespace: str | None) -> AsyncIterator[Cluster]:
    """A cluster by KUBECONFIG or ~/.kube/config, or from inside a pod. ConfigError when there is none."""
    try:
        from kubernetes_asyncio import client, config
    except ImportError as error:
        raise ConfigError("backend 'kubernetes' needs kubernetes_asyncio: pip install 'skyenv[k8s]'") from error
    settings = client.Configuration()
    settings.connection_pool_maxsize = 0  # no bound: each sandbox holds a connection
    try:
        own = await anyio.to_thread.run_sync(_own_namespace)
        if own is not None:
            config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
            default = own
        else:
            await config.load_kube_config(client_configuration=settings)
            _contexts, active = config.list_kube_config_contexts()
            default = str((active or {}).get("context", {}).get("namespace", "default"))
    except config.ConfigException as error:
        raise ConfigError(f"no Kubernetes cluster is configured (KUBECONFIG): {error}") from error
    async with client.ApiClient(settings) as api:
        yield Cluster(api, namespace or default)
