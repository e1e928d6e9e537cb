"""The chart: what it refuses, what two generations of Kubernetes say of it, and a fleet that it makes in a real one."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import socket
import socketserver
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from clusters import TestCluster, kubectl, pods_of

from skyenv.core import Sandbox
from skyenv.errors import SandboxLost
from skyenv.remote.client import connect
from tests.ports import free_port

pytestmark = [pytest.mark.k8s, pytest.mark.timeout(1200)]

CHART = Path(__file__).parents[2] / "deploy" / "chart"
TOKENS = ("--set", "tokens.clients=tests: secret", "--set", "tokens.join=joined")
HOST_PATH = f"/var/lib/skyenv-test-{os.getpid()}"
BACKENDS = ("local", "oci", "kubernetes")


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["helm", *arguments], capture_output=True, text=True, check=False)


def rendered(*values: str) -> str:
    answer = helm("template", "fleet", str(CHART), "--kube-version", "1.33", *TOKENS, *values)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


@pytest.mark.parametrize("backend", BACKENDS)
def test_current_schemas_agree(backend: str, tmp_path: Path) -> None:
    values = (
        "--set",
        f"node.backend={backend}",
        "--set",
        "prepull.images={one,two}",
        "--set",
        "sandboxes.quota.pods=9",
    )
    (tmp_path / "all.yaml").write_text(rendered(*values))
    program = Path(sys.executable).parent / "kubernetes-validate"
    checked = subprocess.run([program, "--strict", tmp_path / "all.yaml"], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    kinds = {line.removeprefix("kind: ") for line in rendered(*values).splitlines() if line.startswith("kind: ")}
    assert {"Deployment", "Service", "HorizontalPodAutoscaler", "PodDisruptionBudget", "NetworkPolicy"} <= kinds
    assert ("Role" in kinds) == (backend == "kubernetes")


def test_lint_and_refusals() -> None:
    assert helm("lint", "--strict", str(CHART), "--kube-version", "1.33", *TOKENS).returncode == 0
    refused = [
        (["--set", "node.backend=docker"], "must be one of"),
        (["--set", "gatway.replicas=2"], "gatway"),
        (["--set", "tokens.join="], "tokens.join"),
    ]
    for values, named in refused:
        answer = helm("template", "fleet", str(CHART), *TOKENS, *values)
        assert answer.returncode, values
        assert named in answer.stderr


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_server_accepts_it(cluster: TestCluster, namespace: str, backend: str) -> None:
    answer = helm(
        "install", "fleet", str(CHART), "--namespace", namespace, "--dry-run=server", *TOKENS,
        "--set", f"node.backend={backend}",
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr


class Names(socketserver.BaseRequestHandler):
    """Answers for headless services, from their endpoints: what a cluster's DNS does, for one that has none."""

    def handle(self) -> None:
        data, sock = self.request
        labels, at = [], 12
        while data[at]:
            labels.append(data[at + 1 : at + 1 + data[at]].decode())
            at += data[at] + 1
        found = endpoints(labels[1], labels[0]) if data[at + 1 : at + 3] == b"\0\1" and len(labels) > 2 else []
        question = data[12 : at + 5]
        head = data[:2] + struct.pack("!HHHHH", 0x8580, 1, len(found), 0, 0)
        answers = b"".join(b"\xc0\x0c\0\1\0\1" + struct.pack("!IH", 1, 4) + socket.inet_aton(ip) for ip in found)
        sock.sendto(head + question + answers, self.client_address)


def endpoints(namespace: str, service: str) -> list[str]:
    answer = subprocess.run(
        ["kubectl", "get", "endpoints", "-n", namespace, service, "-o", "json"], capture_output=True, check=False
    )
    if answer.returncode:
        return []
    subsets = json.loads(answer.stdout).get("subsets") or []
    return [each["ip"] for subset in subsets for each in (subset.get("addresses") or [])]


class Api(socketserver.BaseRequestHandler):
    """Passes a connection on to the API server, where that listens on loopback only."""

    def handle(self) -> None:
        host, port = api_server().rsplit("/", 1)[1].split(":")
        with socket.create_connection((host, int(port))) as server:
            back = threading.Thread(target=copy, args=(server, self.request), daemon=True)
            back.start()
            copy(self.request, server)
            back.join()


def copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def api_server() -> str:
    return kubectl("config", "view", "--minify", "-o", "jsonpath={.clusters[0].cluster.server}")


def node_address() -> str:
    nodes = json.loads(kubectl("get", "nodes", "-o", "json"))["items"]
    return str(next(each["address"] for each in nodes[0]["status"]["addresses"] if each["type"] == "InternalIP"))


@pytest.fixture(scope="module")
def api() -> Iterator[str | None]:
    """Where pods reach an API server that they could not reach by themselves; None where they can."""
    if "SKYENV_K8S_ENGINE" not in os.environ:
        yield None
        return
    with socketserver.ThreadingTCPServer((node_address(), 0), Api) as server:
        server.daemon_threads, server.block_on_close = True, False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"https://{node_address()}:{server.server_address[1]}"
        server.shutdown()


def give_kubeconfig(namespace: str, server: str) -> None:
    """What the node server's own account may do, and no more, as a kubeconfig."""
    token = ""
    while not token:
        secrets = json.loads(kubectl("get", "secrets", "-n", namespace, "-o", "json"))["items"]
        mine = [each for each in secrets if each["metadata"]["name"].startswith("fleet-skyenv-node-token")]
        token = base64.b64decode(mine[0]["data"]["token"]).decode() if mine and "data" in mine[0] else ""
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "it",
        "clusters": [{"name": "it", "cluster": {"server": server, "insecure-skip-tls-verify": True}}],
        "users": [{"name": "it", "user": {"token": token}}],
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
    }  # fmt: skip
    kubectl("create", "secret", "generic", "api", "-n", namespace, f"--from-literal=config={json.dumps(config)}")


@pytest.fixture(scope="module")
def dns() -> Iterator[tuple[str, ...]]:
    """Values that name a DNS server; none where the cluster has its own."""
    if "SKYENV_K8S_ENGINE" not in os.environ:
        yield ()
        return
    address = node_address()
    with socketserver.ThreadingUDPServer((address, 53), Names) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield ("--set", f"dns.nameservers={{{address}}}")
        server.shutdown()


class Forward:
    """A local port that leads to the gateways, to another one when the one that it led to is gone."""

    def __init__(self, namespace: str, port: int) -> None:
        self.namespace, self.port = namespace, port
        self._stopped = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep)
        self._thread.start()

    def _keep(self) -> None:
        command = ["kubectl", "port-forward", "-n", self.namespace, "service/fleet-skyenv-gateway", f"{self.port}:8764"]
        while not self._stopped.is_set():
            with contextlib.suppress(OSError):
                self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
                assert self._process.stderr is not None
                for line in self._process.stderr:
                    if b"lost connection" in line or b"error forwarding" in line or b"error creating" in line:
                        self._process.kill()
                self._process.wait()
            self._stopped.wait(0.3)

    def wait(self) -> None:
        """Until the port is there."""
        for _attempt in range(1000):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            self._stopped.wait(0.1)
        raise TimeoutError("kubectl port-forward did not listen")

    def close(self) -> None:
        self._stopped.set()
        if self._process is not None:
            self._process.kill()
        self._thread.join()


def values_of(cluster: TestCluster, backend: str, dns: tuple[str, ...]) -> list[str]:
    repository, tag = cluster.image("node").rsplit(":", 1)
    values = {
        "image.repository": repository, "image.tag": tag, "image.pullPolicy": cluster.pull_policy,
        "gateway.autoscaling.enabled": "false", "gateway.replicas": "2", "gateway.leaveSeconds": "1",
        "gateway.resources.requests.cpu": "10m", "node.backend": backend, "node.drainSeconds": "0",
        "node.resources.requests.cpu": "10m", "node.resources.requests.memory": "64Mi", "node.slots": "8",
        "node.hostPath": HOST_PATH,
    }  # fmt: skip
    if backend == "kubernetes":
        values |= {"node.options.image": cluster.image("debian"), "node.options.adoption_timeout": "60"}
    return [*TOKENS, *dns, *(word for key, value in values.items() for word in ("--set", f"{key}={value}"))]


@contextlib.contextmanager
def fleet(namespace: str, values: list[str], api: str | None = None) -> Iterator[str]:
    """The chart installed; the URL at which its gateways answer."""
    answer = helm("install", "fleet", str(CHART), "-n", namespace, *values)
    assert answer.returncode == 0, answer.stderr
    if api is not None:
        give_kubeconfig(namespace, api)
    kubectl("rollout", "status", "-n", namespace, "deployment/fleet-skyenv-gateway", "--timeout=300s")
    port = free_port()
    forward = Forward(namespace, port)
    try:
        forward.wait()
        yield f"http://127.0.0.1:{port}"
    finally:
        forward.close()
        helm("uninstall", "fleet", "-n", namespace, "--wait", "--timeout", "300s")
        if "SKYENV_K8S_ENGINE" in os.environ:  # its only node is this machine
            shutil.rmtree(HOST_PATH, ignore_errors=True)


def component(namespace: str, name: str) -> list[dict[str, Any]]:
    return pods_of(namespace, f"app.kubernetes.io/component={name}")


def kill(namespace: str, pod: dict[str, Any]) -> None:
    kubectl("delete", "pod", "-n", namespace, pod["metadata"]["name"], "--grace-period=0", "--force", "--wait=false")


async def use(box: Sandbox, seconds: float) -> None:
    with anyio.fail_after(seconds):
        while True:
            await box.exec("true")
            await anyio.sleep(0.1)


async def test_a_fleet_of_local_sandboxes_survives_its_parts(
    cluster: TestCluster, namespace: str, dns: tuple[str, ...]
) -> None:
    with fleet(namespace, values_of(cluster, "local", dns)) as url:
        async with connect(url, "secret", patience=200.0) as client:
            async with client.sandbox() as box:
                assert (await box.exec("id -u; hostname")).output == "0\nsandbox\n"
                first, *_others = component(namespace, "gateway")
                async with anyio.create_task_group() as group:

                    async def works() -> None:
                        for number in range(20):
                            assert (await box.exec(f"echo {number} >> ran; sleep 0.1")).exit_code == 0

                    group.start_soon(works)
                    await anyio.sleep(0.5)
                    await anyio.to_thread.run_sync(kill, namespace, first)
                assert (await box.exec("cat ran | tr '\\n' ' '")).output == " ".join(map(str, range(20))) + " "
                (node,) = component(namespace, "node")
                await anyio.to_thread.run_sync(kill, namespace, node)
                with pytest.raises(SandboxLost):
                    await use(box, 200.0)
            async with client.sandbox() as box:
                assert (await box.exec("echo again")).output == "again\n"


async def test_a_fleet_of_pods_outlives_its_node_server(
    cluster: TestCluster, namespace: str, dns: tuple[str, ...], api: str | None
) -> None:
    other = ["--set", "sandboxes.kubeconfigSecret=api"] if api is not None else []
    with fleet(namespace, [*values_of(cluster, "kubernetes", dns), *other], api) as url:
        async with connect(url, "secret", patience=200.0) as client, client.sandbox() as box:
            await box.exec("cd /tmp; f() { echo function; }; echo 1 > file")
            (node,) = component(namespace, "node")
            name = node["metadata"]["name"]
            # The server dies, its pod does not: a loop starts it again, and it finds its sandboxes by label.
            kubectl("exec", "-n", namespace, name, "--", "pkill", "-9", "-f", "skyenv.cli serve")
            result = await box.exec("pwd; f; cat file")
            assert result.output == "/tmp\nfunction\n1\n"
            (pod,) = pods_of(namespace, "app.kubernetes.io/managed-by=skyenv")
            assert pod["spec"]["automountServiceAccountToken"] is False
        assert pods_of(namespace, "app.kubernetes.io/managed-by=skyenv") == []
