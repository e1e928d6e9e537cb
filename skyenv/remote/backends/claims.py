"""Pods from a warm pool of agent-sandbox (agents.x-k8s.io), where its controller runs: a claim brings one that waits.

The pool's template must be such a pod as `pods.make_pod` makes (`deploy/chart` writes one); claims carry no variables
and no volumes of their own, because those would force a cold start. A claim is named after its sandbox, so claiming
again finds it, and deleting it deletes its pod.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio

from skyenv.errors import SandboxLost, SandboxUnavailable
from skyenv.remote.backends.cluster import Cluster
from skyenv.remote.backends.pods import KubernetesOptions, pod_name

GROUP = "apis/extensions.agents.x-k8s.io/v1beta1"
POLL = 0.1


class Claims:
    """Claims of one namespace."""

    def __init__(self, cluster: Cluster, options: KubernetesOptions) -> None:
        self._cluster = cluster
        self._timeout = options.start_timeout
        self._held: set[str] = set()

    async def claim(self, sandbox: str, pool: str, labels: Mapping[str, str], annotations: Mapping[str, str]) -> str:
        """The name of the pod that the claim brought, labelled as ours. SandboxUnavailable when none comes in time."""
        name = pod_name(sandbox)
        body: dict[str, Any] = {
            "apiVersion": GROUP.removeprefix("apis/"),
            "kind": "SandboxClaim",
            "metadata": {"name": name, "labels": dict(labels)},
            "spec": {"warmPoolRef": {"name": pool}},
        }
        self._held.add(sandbox)
        await self._cluster.call("POST", self._cluster.path("sandboxclaims", group=GROUP), body=body)
        with anyio.move_on_after(self._timeout):
            pod = await self._pod(name)
            metadata = {"labels": dict(labels), "annotations": dict(annotations)}
            path = self._cluster.path("pods", pod)
            kind = "application/merge-patch+json"
            self._cluster.pods[pod] = await self._cluster.call("PATCH", path, body={"metadata": metadata}, kind=kind)
            return pod
        raise SandboxUnavailable(f"warm pool {pool!r} brought no sandbox in {self._timeout} s", 5.0, reason="full")

    async def _pod(self, name: str) -> str:
        while True:
            claim = await self._cluster.call("GET", self._cluster.path("sandboxclaims", name, group=GROUP))
            if pod := _pod_of(claim):
                return pod
            await anyio.sleep(POLL)

    async def release(self, sandbox: str) -> None:
        """Delete the claim, and with it the pod. Idempotent."""
        if sandbox in self._held:
            self._held.discard(sandbox)
            try:
                path = self._cluster.path("sandboxclaims", pod_name(sandbox), group=GROUP)
                await self._cluster.call("DELETE", path)
            except SandboxLost:
                pass


def _pod_of(claim: dict[str, Any]) -> str:
    """The pod of a claim that is ready; agent-sandbox names a sandbox's pod after the sandbox."""
    status = claim.get("status") or {}
    ready = any(each["type"] == "Ready" and each["status"] == "True" for each in status.get("conditions") or ())
    return str((status.get("sandbox") or {}).get("name") or "") if ready else ""
