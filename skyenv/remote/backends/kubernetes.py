"""One pod a sandbox, where policy wants every sandbox to be a pod of the cluster.

The pod's image is the sandbox's; an init container copies the portable directory (`skyenv.remote.portable`) beside it
and takes the network down, and the sandbox's first process is our init from there. It is reached over one held exec.
A pod ends by itself when its node server is away for longer than its patience; a node server that starts again under
the same name (`KubernetesOptions.node`, guarded by a Lease) finds its pods by label and goes on with them, and sweeps
the pods of nodes whose Lease has run out. A snapshot is what changed in a pod's file system, kept by the node server.
"""

from __future__ import annotations

import json
import secrets
import shutil
import socket
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from anyio.abc import ByteStream, TaskGroup

from skyenv.errors import ConfigError, SandboxError, SandboxLost, SandboxUnavailable
from skyenv.remote import portable
from skyenv.remote.backends import Held, Record, Stats, pods
from skyenv.remote.backends.claims import Claims
from skyenv.remote.backends.cluster import Cluster, connect
from skyenv.remote.backends.leases import NodeLease
from skyenv.remote.backends.local import DEFAULT_ENV
from skyenv.remote.backends.pods import KubernetesOptions, Pod, Wanted
from skyenv.remote.link import Line, Link
from skyenv.remote.pipes import CHUNK, receiving, sending
from skyenv.remote.protocol import CreateRequest
from skyenv.remote.tasks import background_tasks

SWEEP_EVERY = 30.0
MEET_TIMEOUT = 30.0
COPY_TIMEOUT = 600.0
CLOSE_TIMEOUT = 15.0
END_TIMEOUT = 1.0
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a snapshot belongs to: the image that it is laid over, by name and by exact id."""

    path: Path
    image: str
    image_id: str
    shell: bytes


class KubernetesBackend:
    """See the module."""

    name = "kubernetes"

    def __init__(self, options: KubernetesOptions | None = None) -> None:
        self._options = options or KubernetesOptions()
        self._cluster: Cluster | None = None
        self._claims: Claims | None = None
        self._group: TaskGroup | None = None
        self._leased: NodeLease | None = None
        self._links: dict[str, Link] = {}
        self._env: dict[str, dict[str, str]] = {}
        self._pods: dict[str, str] = {}
        self._held: list[Held] = []
        self._images: set[str] = set()
        self._snapshots: dict[str, Snapshot] = {}
        self._state = Path()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Hold the node's lease, watch its pods, adopt those that live; at the end all of them go."""
        async with connect(self._options.namespace) as self._cluster, background_tasks() as self._group:
            self._leased = NodeLease(self._cluster, self._options.node)
            await self._lease.take()
            self._group.start_soon(self._lease.renew)
            await self._group.start(self._cluster.watch)
            self._claims = Claims(self._cluster, self._options)
            self._state = await anyio.to_thread.run_sync(self._make_state)
            try:
                await self._adopt()
                self._group.start_soon(self._sweep_regularly)
                yield
            finally:
                with anyio.CancelScope(shield=True), anyio.move_on_after(CLOSE_TIMEOUT):
                    await self._end_all()
                await anyio.to_thread.run_sync(lambda: shutil.rmtree(self._state, ignore_errors=True))

    @property
    def _lease(self) -> NodeLease:
        if self._leased is None:
            raise ConfigError("the backend is not open")
        return self._leased

    def _make_state(self) -> Path:
        if self._options.state is not None:
            Path(self._options.state).mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="skyenv-snapshots-", dir=self._options.state))

    @property
    def _api(self) -> Cluster:
        if self._cluster is None:
            raise ConfigError("the backend is not open")
        return self._cluster

    async def _end_all(self) -> None:
        for link in list(self._links.values()):
            link.close("the node is closing")
        async with anyio.create_task_group() as group:
            for pod in self._api.of_node(self._options.node):
                group.start_soon(self._api.delete_pod, pod["metadata"]["name"])
        await self._lease.give_up()

    # Pods that others made.

    async def _adopt(self) -> None:
        """Pods of a former server with our name: those that run are held, the others go."""
        for pod in self._api.of_node(self._options.node):
            metadata = pod["metadata"]
            record = metadata["annotations"].get(pods.RECORD)
            if pods.is_running(pod) and record is not None:
                sandbox = metadata["labels"][pods.SANDBOX]
                self._pods[sandbox] = metadata["name"]
                self._held.append(Held(sandbox, json.loads(record)))
            else:
                await self._api.delete_pod(metadata["name"])

    async def _sweep_regularly(self) -> None:
        while True:
            await anyio.sleep(SWEEP_EVERY)
            try:
                await self.sweep()
            except SandboxError:
                continue

    async def sweep(self) -> list[str]:
        """Delete the pods of node servers that have been away for longer than their pods wait; returns their names."""
        expired = await self._lease.expired()
        doomed = []
        for pod in list(self._api.pods.values()):
            metadata = pod["metadata"]
            node, patience = metadata["labels"].get(pods.NODE), metadata["annotations"].get(pods.PATIENCE)
            away = expired.get(str(node), float("inf"))
            if patience is not None and node != self._options.node and away > float(patience):
                await self._api.delete_pod(metadata["name"])
                doomed.append(metadata["name"])
        return doomed

    # What a node server asks for.

    def held(self) -> list[Held]:
        """Sandboxes of a former server with our name that still run."""
        return list(self._held)

    def describe(self) -> dict[str, Any]:
        """Where pods go and what limits them."""
        limits = {"memory": "pod limit", "cpu": "pod limit", "disk": "ephemeral-storage", "file_size": "rlimit"}
        return {
            "backend": self.name,
            "isolated": True,
            "mode": self._options.runtime_class or "default runtime",
            "overlay": False,
            "namespace": self._api.namespace,
            "network": self._options.network,
            "limits": {**limits, "pids": "podPidsLimit of the kubelet", "freezer": "signals"},
            "notes": ["the images' own directories are writable, each pod has its own"],
        }

    def environment(self, sandbox: str) -> dict[str, str]:
        """The usual defaults and what the image says."""
        return {**DEFAULT_ENV, "PATH": PATH, **self._env.get(sandbox, {})}

    def images(self) -> list[str]:
        """The images from which sandboxes were started here; which node has one is the cluster's business."""
        return sorted(self._images)

    async def pull(self, image: str) -> None:
        """Nothing to do ahead: kubelets pull when a pod is scheduled; the chart's prepull set is for that."""

    async def create(self, sandbox: str, request: CreateRequest, record: Record) -> socket.socket:
        """Create a pod, wait for it and connect to its init."""
        snapshot = self._find_snapshot(request.snapshot)
        image = snapshot.image if snapshot else request.image or self._options.default_image
        if image is None:
            raise ConfigError("image: backend 'kubernetes' needs one; pass image, or set kubernetes.default_image")
        key, patience = secrets.token_hex(32), min(request.spec.ttl, self._options.adoption_timeout)
        annotations = {pods.RECORD: json.dumps(record), pods.KEY: key, pods.PATIENCE: str(patience)}
        wanted = Wanted(sandbox, image, request.spec, patience, annotations)
        name = await self._claimed(wanted) or await self._created(wanted)
        self._pods[sandbox] = name
        pod = await self._started(name)
        if snapshot is not None and pods.image_id(pod) != snapshot.image_id:
            raise SandboxUnavailable(f"image {image} is another one than when the snapshot was taken")
        link = await self._connect(sandbox, name, key, patience)
        self._env[sandbox] = (await link.ask("environ"))["env"]
        if snapshot is not None:
            async with sending(_chunks(snapshot.path)) as reader:
                await link.ask("restore", (reader,), timeout=COPY_TIMEOUT)
        self._images.add(image)
        return link.socket

    async def _created(self, wanted: Wanted) -> str:
        await self._api.create_pod(pods.make_pod(wanted, self._options))
        return pods.pod_name(wanted.sandbox)

    async def _claimed(self, wanted: Wanted) -> str | None:
        pool = self._options.warm_pools.get(wanted.image)
        if pool is None or self._claims is None:
            return None
        labels = {pods.MANAGED: "skyenv", pods.NODE: self._options.node, pods.SANDBOX: wanted.sandbox}
        return await self._claims.claim(wanted.sandbox, pool, labels, wanted.annotations)

    async def _started(self, name: str) -> Pod:
        """The pod once its container runs. SandboxUnavailable or ConfigError when it does not."""

        def settled(pod: Pod | None) -> bool:
            return pods.obituary(pod) is not None or (
                pod is not None and (pods.is_running(pod) or pods.hopeless(pod) is not None)
            )

        pod = await self._api.wait_for(name, settled, self._options.start_timeout)
        if pod is not None and pods.is_running(pod):
            return pod
        if pod is not None and (never := pods.hopeless(pod)):
            raise ConfigError(never)
        if ended := pods.obituary(pod):
            raise SandboxUnavailable(ended, 1.0)
        reason = "registry" if pod and pods.progress(pod) == "pulling" else "full"
        raise SandboxUnavailable(f"pod {name}: {pods.why_waiting(pod or {})}", 5.0, reason=reason)

    async def _connect(self, sandbox: str, name: str, key: str, patience: float) -> Link:
        if self._group is None:
            raise ConfigError("the backend is not open")

        @asynccontextmanager
        async def stream() -> AsyncIterator[ByteStream]:
            async with self._api.exec(name, portable.command("relay")) as opened:
                yield opened

        async def verdict() -> str | None:
            return pods.obituary(await self._api.wait_for(name, lambda pod: pods.obituary(pod) is not None, 1.0))

        link = self._links[sandbox] = Link(Line(stream, verdict, bytes.fromhex(key), patience))
        self._group.start_soon(link.run)
        await link.meet(MEET_TIMEOUT)
        return link

    async def attach(self, sandbox: str) -> socket.socket:
        """A new line to a living sandbox; an earlier one ends."""
        name = self._pods.get(sandbox)
        pod = self._api.pods.get(name) if name else None
        ended = pods.obituary(pod)
        if name is None or pod is None or ended is not None:
            raise SandboxLost(ended or "the pod was deleted")
        if (old := self._links.pop(sandbox, None)) is not None:
            old.close("another line took over")
        annotations = pod["metadata"]["annotations"]
        link = await self._connect(sandbox, name, annotations[pods.KEY], float(annotations[pods.PATIENCE]))
        self._env[sandbox] = (await link.ask("environ"))["env"]
        await link.ask("go")
        return link.socket

    async def note(self, sandbox: str, record: Record) -> None:
        """Keep the record with the pod."""
        await self._api.annotate(self._pods[sandbox], {pods.RECORD: json.dumps(record)})

    def _link(self, sandbox: str) -> Link:
        if sandbox not in self._links:
            raise SandboxLost(f"there is no line to sandbox {sandbox}")
        return self._links[sandbox]

    async def stats(self, sandbox: str) -> Stats:
        """What the pod's control groups count."""
        answer = await self._link(sandbox).ask("stats")
        return Stats(answer["memory_bytes"], answer["cpu_seconds"], answer["pids"], answer["oom_kills"])

    async def freeze(self, sandbox: str) -> None:
        """Stop every process but the init, which then has nothing to do."""
        await self._link(sandbox).ask("stop")

    async def thaw(self, sandbox: str) -> None:
        """Let them go on. One that a former server held goes on when it is attached."""
        if sandbox in self._links or sandbox not in self._pods:
            await self._link(sandbox).ask("go")

    async def destroy(self, sandbox: str) -> None:
        """Delete the pod with no grace; what a claim brought goes with the claim."""
        link = self._links.pop(sandbox, None)
        if link is not None:
            await _let_end(link)
        name = self._pods.pop(sandbox, None)
        self._env.pop(sandbox, None)
        if self._claims is not None and self._options.warm_pools:
            await self._claims.release(sandbox)
        await self._api.delete_pod(name or pods.pod_name(sandbox))

    # Snapshots.

    def _find_snapshot(self, snapshot: str | None) -> Snapshot | None:
        if snapshot is not None and snapshot not in self._snapshots:
            raise ConfigError(f"snapshot {snapshot!r} does not exist on this node")
        return self._snapshots[snapshot] if snapshot is not None else None

    async def snapshot(self, sandbox: str, shell: bytes, *, idle: bool = False) -> str:
        """Keep what changed in the pod since it started, and the names of everything else."""
        name, pod = secrets.token_hex(16), self._api.pods[self._pods[sandbox]]
        image = next(each["image"] for each in pod["spec"]["containers"] if each["name"] == pods.CONTAINER)
        path = self._state / name
        try:
            async with await anyio.open_file(path, "wb") as file, receiving(file.write) as writer:
                await self._link(sandbox).ask("capture", (writer,), timeout=COPY_TIMEOUT)
        except SandboxError:
            path.unlink(missing_ok=True)
            raise
        self._snapshots[name] = Snapshot(path, image, pods.image_id(pod), shell)
        return name

    def shell_state(self, snapshot: str) -> bytes:
        """What was kept beside the files."""
        kept = self._snapshots.get(snapshot)
        return kept.shell if kept else b""

    async def delete_snapshot(self, snapshot: str) -> None:
        """Remove its file."""
        kept = self._snapshots.pop(snapshot, None)
        if kept is not None:
            await anyio.to_thread.run_sync(lambda: kept.path.unlink(missing_ok=True))


async def _let_end(link: Link) -> None:
    """A container that ends by itself is gone before the kubelet, which gives it seconds, would kill it."""
    try:
        await link.ask("end", timeout=END_TIMEOUT)
    except SandboxError:
        pass
    finally:
        link.close("the sandbox was deleted")


async def _chunks(path: Path) -> AsyncGenerator[bytes, None]:
    async with await anyio.open_file(path, "rb") as file:
        while data := await file.read(CHUNK):
            yield data
