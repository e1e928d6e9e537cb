"""The lease of a node server in a cluster: one live server a name, and a sign for others when it is gone."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from typing import Any

import anyio

from skyenv.errors import ConfigError, SandboxError, SandboxLost
from skyenv.remote.backends.cluster import SELECTOR, Cluster
from skyenv.remote.backends.pods import MANAGED

LEASE_SECONDS, LEASE_EVERY = 12, 3.0
VERSION = "coordination.k8s.io/v1"
PREFIX = "skyenv-"


class NodeLease:
    """The lease of the node server called `node`, held by this process between `take` and `give_up`."""

    def __init__(self, cluster: Cluster, node: str) -> None:
        self._cluster, self._node = cluster, node
        self._name = f"{PREFIX}{node}"
        self._holder = secrets.token_hex(8)

    async def take(self) -> None:
        """ConfigError when another live node server has this name; a dead one's lease runs out while we wait."""
        deadline = anyio.current_time() + 2 * LEASE_SECONDS
        seen = await self._read()
        while seen is not None and _age(seen) < LEASE_SECONDS:
            await anyio.sleep(1.0)
            now = await self._read()
            renewed = now is not None and now["spec"]["renewTime"] != seen["spec"]["renewTime"]
            if renewed or anyio.current_time() > deadline:
                raise ConfigError(f"a node server named {self._node!r} is alive; give this one another name")
            seen = now
        await self._write(seen)

    async def renew(self) -> None:
        """Keep it until cancelled."""
        while True:
            await anyio.sleep(LEASE_EVERY)
            try:
                await self._write(await self._read())
            except SandboxError:
                continue

    async def give_up(self) -> None:
        """Delete it. Idempotent."""
        try:
            await self._cluster.call("DELETE", self._path(self._name))
        except SandboxLost:
            pass

    async def expired(self) -> dict[str, float]:
        """For how many seconds each node's lease has run out, negative while it has not; by the nodes' names."""
        listing = await self._cluster.call("GET", self._path(), query={"labelSelector": SELECTOR})
        return {
            lease["metadata"]["name"].removeprefix(PREFIX): _age(lease) - LEASE_SECONDS for lease in listing["items"]
        }

    def _path(self, name: str = "") -> str:
        return self._cluster.path("leases", name, group=f"apis/{VERSION}")

    async def _read(self) -> dict[str, Any] | None:
        try:
            return await self._cluster.call("GET", self._path(self._name))
        except SandboxLost:
            return None

    async def _write(self, old: dict[str, Any] | None) -> None:
        """Take or renew it. SandboxUnavailable when somebody else was faster."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {"holderIdentity": self._holder, "leaseDurationSeconds": LEASE_SECONDS, "renewTime": now}
        if old is None:
            metadata = {"name": self._name, "labels": {MANAGED: "skyenv"}}
            lease = {"apiVersion": VERSION, "kind": "Lease", "metadata": metadata, "spec": spec}
            await self._cluster.call("POST", self._path(), body=lease)
        else:
            await self._cluster.call("PUT", self._path(self._name), body={**old, "spec": spec})


def _age(lease: dict[str, Any]) -> float:
    """Seconds since its holder renewed it, by this machine's clock."""
    renewed = datetime.fromisoformat(lease["spec"]["renewTime"].replace("Z", "+00:00"))
    return (datetime.now(UTC) - renewed).total_seconds()
