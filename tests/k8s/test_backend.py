"""Sandboxes as pods of a real cluster."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import anyio
import httpx
import pytest
from clusters import TestCluster, kubectl, pods_of

from skyenv.errors import ConfigError, SandboxLost, SandboxUnavailable
from skyenv.remote import backends
from skyenv.remote.client import SandboxClient, connect
from skyenv.remote.node import app_for
from skyenv.remote.sandboxes import Node
from skyenv.remote.sending import Sender
from skyenv.testing import check_sandbox

pytestmark = pytest.mark.k8s

SERVE = """
import json, socket, sys, uvicorn
from skyenv.remote.backends import get
from skyenv.remote.node import create_app
listener = socket.create_server(("127.0.0.1", 0))
print("http://127.0.0.1:%d" % listener.getsockname()[1], flush=True)
config = uvicorn.Config(create_app(get("kubernetes", **json.loads(sys.argv[1])), token="secret"), log_config=None)
uvicorn.Server(config).run([listener])
"""


@contextlib.asynccontextmanager
async def client_of(options: dict[str, Any]) -> AsyncIterator[SandboxClient]:
    """A client of a node in this process."""
    node = Node(backends.get("kubernetes", **options))
    async with node.open():
        transport = httpx.ASGITransport(app_for(node), raise_app_exceptions=False)
        async with Sender(transport, "http://node", {}) as sender:
            yield SandboxClient(sender)


@contextlib.contextmanager
def served(options: dict[str, Any]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A node server as a process of its own, killed at the end."""
    process = subprocess.Popen([sys.executable, "-c", SERVE, json.dumps(options)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        assert url.startswith("http://"), f"the server ended with status {process.wait()}"
        yield process, url
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def until(condition: Callable[[], Awaitable[bool]], seconds: float) -> None:
    with anyio.fail_after(seconds):
        while not await condition():
            await anyio.sleep(0.3)


async def gone(namespace: str) -> bool:
    """Whether no container of the namespace runs."""
    pods = await anyio.to_thread.run_sync(pods_of, namespace)
    return all(pod["status"]["phase"] in ("Succeeded", "Failed") for pod in pods)


@pytest.mark.timeout(1800)
async def test_the_contract_of_sandboxes(cluster: TestCluster, namespace: str) -> None:
    async with client_of(cluster.options(namespace)) as client:
        await check_sandbox(client)
        assert (await client.health())["network"] == "none"
    assert pods_of(namespace) == []


async def test_any_image_and_typed_ends(cluster: TestCluster, namespace: str) -> None:
    """No bash, no Python, no C library; a pod that is deleted, one whose memory runs out, an image that is none."""
    async with client_of(cluster.options(namespace)) as client:
        async with client.sandbox(image=cluster.image("busybox"), memory_bytes=64 << 20, cpus=0.5) as box:
            assert (await box.exec("cat /proc/sys/kernel/hostname; ls /lib")).output.startswith("sandbox\nls: /lib")
            data = bytes(range(256)) * 20_000
            await box.write_file("/root/big", data)
            assert await box.read_file("/root/big") == data
            eaten = await box.exec("x=$(head -c 200000000 /dev/zero | tr '\\0' x); echo $?", timeout=100.0)
            assert eaten.oom, eaten
        async with client.sandbox(image=cluster.image("busybox")) as box:
            (pod,) = [pod for pod in pods_of(namespace) if not pod["metadata"].get("deletionTimestamp")]
            kubectl("delete", "pod", "-n", namespace, pod["metadata"]["name"], "--grace-period=0", "--force")
            for _twice in range(2):
                with pytest.raises(SandboxLost, match="the pod was deleted"), anyio.fail_after(100):
                    await box.exec("sleep 600")
        with pytest.raises(ConfigError, match="image nowhere/none:1"):
            async with client.sandbox(image="nowhere/none:1"):
                pass


async def test_a_quota_is_a_reason_to_come_back(cluster: TestCluster, namespace: str) -> None:
    kubectl("create", "quota", "few", "-n", namespace, "--hard=pods=0")
    node = Node(backends.get("kubernetes", **cluster.options(namespace)))
    async with node.open():
        from skyenv.remote.protocol import CreateRequest

        with pytest.raises(SandboxUnavailable, match="quota") as caught:
            await node.backend.create("0" * 32, CreateRequest(), {})
        assert (caught.value.reason, caught.value.retry_after) == ("full", 5.0)


async def test_what_a_killed_server_leaves_ends_by_itself(cluster: TestCluster, namespace: str) -> None:
    options = cluster.options(namespace, node="dies", adoption_timeout=15.0)
    with served(options) as (process, url):
        async with connect(url, "secret") as client, contextlib.AsyncExitStack() as stack:
            box = await stack.enter_async_context(client.sandbox())
            await box.exec("sleep 1000 &")
            process.send_signal(signal.SIGKILL)
            process.wait()
            await until(lambda: gone(namespace), 200.0)
            stack.pop_all()
    left = [pod["metadata"]["name"] for pod in pods_of(namespace)]
    assert len(left) == 1, "the object itself stays until another node server sweeps"
    backend = backends.get("kubernetes", **cluster.options(namespace, node="other"))
    async with backend.open():
        await until(lambda: _swept(backend), 200.0)
    assert pods_of(namespace) == []


async def _swept(backend: Any) -> bool:
    return bool(await backend.sweep())


async def test_a_restarted_server_goes_on_with_its_pods(cluster: TestCluster, namespace: str) -> None:
    options = cluster.options(namespace, node="same")
    with served(options) as (process, url):
        async with connect(url, "secret") as client, contextlib.AsyncExitStack() as stack:
            box = await stack.enter_async_context(client.sandbox())
            await box.exec("cd /tmp; export A=kept; f() { echo function; }")
            process.send_signal(signal.SIGKILL)
            process.wait()
            stack.pop_all()
    backend = backends.get("kubernetes", **options)
    async with backend.open():
        (held,) = backend.held()
        sock = await backend.attach(held.sandbox)
        assert (await backend.stats(held.sandbox)).memory_bytes or 0 > 0
        sock.close()
    assert pods_of(namespace) == []


async def test_two_servers_with_one_name_do_not_fight(cluster: TestCluster, namespace: str) -> None:
    options = cluster.options(namespace, node="one")
    async with client_of(options) as client, client.sandbox(image=cluster.image("busybox")) as box:
        with pytest.raises(ConfigError, match="alive"):
            async with backends.get("kubernetes", **options).open():
                pass
        assert (await box.exec("echo alive")).output == "alive\n"


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="did you mean 'namespace'"):
        backends.get("kubernetes", namespce="x")
    with pytest.raises(ConfigError, match="'none' or 'cluster'"):
        backends.get("kubernetes", network="some")
    assert os.environ.get("KUBECONFIG")
