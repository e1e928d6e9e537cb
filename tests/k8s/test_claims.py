"""Claims from a warm pool, with a stand-in for agent-sandbox's controller: it hands out pods that wait."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from clusters import TestCluster, kubectl, pods_of
from test_backend import client_of

from skyenv.remote.backends import claims
from skyenv.remote.backends.pods import read_options

pytestmark = pytest.mark.k8s
GROUP = "extensions.agents.x-k8s.io"


def definition(kind: str) -> dict[str, Any]:
    """A resource of the same name and version, without the rules that the real one has."""
    plural = f"{kind.lower()}s"
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {
        "name": "v1beta1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema},
        "subresources": {"status": {}},
    }  # fmt: skip
    names = {"kind": kind, "plural": plural, "singular": kind.lower()}
    spec = {"group": GROUP, "scope": "Namespaced", "names": names, "versions": [version]}
    return {
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"}, "spec": spec,
    }  # fmt: skip


@pytest.fixture
def definitions(cluster: TestCluster) -> Iterator[None]:
    kinds = ("SandboxTemplate", "SandboxWarmPool", "SandboxClaim")
    text = yaml.safe_dump_all(map(definition, kinds))
    known = kubectl("get", "crd", "-o", "name")
    if f"sandboxclaims.{GROUP}" in known:
        pytest.fail("this cluster has agent-sandbox; the stand-in would be in its way", pytrace=False)
    kubectl("apply", "-f", "-", text=text)
    kubectl(
        "wait", "--for=condition=established", "--timeout=300s", *(f"crd/{kind.lower()}s.{GROUP}" for kind in kinds)
    )
    yield
    kubectl("delete", "-f", "-", text=text)


class Controller(threading.Thread):
    """Gives each claim a pod of its pool, and the pod's end to the end of its claim."""

    def __init__(self, namespace: str) -> None:
        super().__init__()
        self.namespace, self.done = namespace, threading.Event()
        self.given: dict[str, str] = {}

    def run(self) -> None:
        while not self.done.wait(0.2):
            found = json.loads(kubectl("get", f"sandboxclaims.{GROUP}", "-n", self.namespace, "-o", "json"))["items"]
            names = {claim["metadata"]["name"] for claim in found}
            for name in names - self.given.keys():
                self._give(name)
            for name in self.given.keys() - names:
                kubectl(
                    "delete", "pod", "-n", self.namespace, self.given.pop(name), "--ignore-not-found", "--wait=false"
                )

    def _give(self, claim: str) -> None:
        warm = [pod["metadata"]["name"] for pod in pods_of(self.namespace, "warm=yes")]
        self.given[claim] = next(name for name in warm if name not in self.given.values())
        ready = {"type": "Ready", "status": "True", "reason": "Warm", "message": ""}
        status = {"sandbox": {"name": self.given[claim]}, "conditions": [ready]}
        object_ = json.loads(kubectl("get", f"sandboxclaims.{GROUP}", "-n", self.namespace, claim, "-o", "json"))
        path = f"/apis/{GROUP}/v1beta1/namespaces/{self.namespace}/sandboxclaims/{claim}/status"
        kubectl("replace", "--raw", path, "-f", "-", text=json.dumps({**object_, "status": status}))


async def test_a_claim_brings_a_pod_that_waits(cluster: TestCluster, namespace: str, definitions: None) -> None:
    image = cluster.image("busybox")
    options = cluster.options(namespace, warm_pools={image: "few"})
    pairs = {key: value for key, value in options.items() if key != "image"}
    template, pool = claims.pool("few", image, 1, read_options(pairs))
    kubectl("apply", "-n", namespace, "-f", "-", text=yaml.safe_dump_all([template, pool]))
    warm = {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "few-1", "labels": {"warm": "yes"}},
        **template["spec"]["podTemplate"],
    }  # fmt: skip
    kubectl("apply", "-n", namespace, "-f", "-", text=yaml.safe_dump(warm))
    kubectl("wait", "-n", namespace, "--for=condition=ready", "--timeout=300s", "pod/few-1")
    controller = Controller(namespace)
    controller.start()
    try:
        async with client_of(options) as client:
            async with client.sandbox(image=image) as box:
                assert (await box.exec("echo $((6 * 7)); hostname")).output == "42\nsandbox\n"
                assert list(controller.given.values()) == ["few-1"]
                (pod,) = pods_of(namespace, "app.kubernetes.io/managed-by=skyenv")
                assert pod["metadata"]["name"] == "few-1"
            assert kubectl("get", f"sandboxclaims.{GROUP}", "-n", namespace, "-o", "name") == ""
    finally:
        controller.done.set()
        controller.join()
