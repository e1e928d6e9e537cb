"""Pods from a warm pool of agent-sandbox (agents.x-k8s.io), where its controller runs: a claim brings one that waits.

The pool's template must be such a pod as the backend makes; `python -m skyenv.remote.backends.claims` writes it. Claims
carry no variables and no volumes of their own, because those would force a cold start. A claim is named after its
sandbox, and deleting it deletes its pod.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import anyio
import yaml

from skyenv.errors import SandboxLost, SandboxUnavailable
from skyenv.remote.backends.cluster import Cluster
from skyenv.remote.backends.pods import KubernetesOptions, Wanted, make_pod, pod_name, read_options
from skyenv.remote.protocol import Spec

GROUP = "apis/extensions.agents.x-k8s.io/v1beta1"
POLL = 0.1


def pool(name: str, image: str, replicas: int, options: KubernetesOptions) -> list[dict[str, Any]]:
    """The template and the warm pool, as objects to apply. A warm pod waits for a node for as long as it may live."""
    wanted = Wanted("", image, Spec(), options.lifetime, {})
    version = GROUP.removeprefix("apis/")
    template = {"podTemplate": {"spec": make_pod(wanted, options)["spec"]}}
    warm = {"replicas": replicas, "sandboxTemplateRef": {"name": name}}
    return [
        {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}
        for kind, spec in (("SandboxTemplate", template), ("SandboxWarmPool", warm))
    ]


class Claims:
    """Claims of one namespace."""

    def __init__(self, cluster: Cluster, options: KubernetesOptions) -> None:
        self._cluster = cluster
        self._timeout = options.start_timeout

    async def claim(self, sandbox: str, pool: str, labels: Mapping[str, str], annotations: Mapping[str, str]) -> str:
        """The name of the pod that the claim brought, labelled as ours. SandboxUnavailable when none comes in time."""
        name = pod_name(sandbox)
        body: dict[str, Any] = {
            "apiVersion": GROUP.removeprefix("apis/"),
            "kind": "SandboxClaim",
            "metadata": {"name": name, "labels": dict(labels)},
            "spec": {"warmPoolRef": {"name": pool}},
        }
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
        """Delete the claim, and with it the pod. Idempotent; most sandboxes have none."""
        try:
            await self._cluster.call("DELETE", self._cluster.path("sandboxclaims", pod_name(sandbox), group=GROUP))
        except SandboxLost:
            pass


def _pod_of(claim: dict[str, Any]) -> str:
    """The pod of a claim that is ready; agent-sandbox names a sandbox's pod after the sandbox."""
    status = claim.get("status") or {}
    ready = any(each["type"] == "Ready" and each["status"] == "True" for each in status.get("conditions") or ())
    return str((status.get("sandbox") or {}).get("name") or "") if ready else ""


def main(arguments: list[str]) -> None:
    """`NAME IMAGE REPLICAS [OPTION=VALUE...]`: the pool's objects as YAML, for `kubectl apply`."""
    name, image, replicas, *pairs = arguments
    options = {key: yaml.safe_load(value) for key, _equals, value in (pair.partition("=") for pair in pairs)}
    sys.stdout.write(yaml.safe_dump_all(pool(name, image, int(replicas), read_options(options))))


if __name__ == "__main__":
    main(sys.argv[1:])
