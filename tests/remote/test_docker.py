"""The docker backend beyond what every backend does: engines that fail half-way, images, and what is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import tarfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import docker
import httpx
import images
import pytest
from images import BUSYBOX, DEBIAN
from node_processes import SERVE_DOCKER, served
from registries import Built, Fault, Proxy, layer, proxied, registry
from test_lifecycle import alive, children, tree

from skyenv.errors import ConfigError, SandboxLost, SandboxUnavailable
from skyenv.remote.backends import engine as engines
from skyenv.remote.backends.docker import STATE_LABEL, DockerBackend
from skyenv.remote.client import SandboxClient
from skyenv.remote.node import app_for
from skyenv.remote.sandboxes import Node
from skyenv.remote.sending import Sender

pytestmark = pytest.mark.docker


@pytest.fixture
def api(engine: str) -> Iterator[Any]:
    client = docker.APIClient(base_url=engine, timeout=60)
    yield client
    client.close()


def containers(api: Any) -> set[str]:
    return {each["Id"] for each in api.containers(all=True, filters={"label": STATE_LABEL})}


async def until_gone(api: Any, identities: set[str], within: float = 100.0) -> None:
    with anyio.fail_after(within):
        while containers(api) & identities:
            await anyio.sleep(0.05)


@asynccontextmanager
async def opened(image: str | None = BUSYBOX) -> AsyncIterator[SandboxClient]:
    """A client of a node in this process."""
    node = Node(DockerBackend(image), allow_egress=True)
    async with node.open():
        async with httpx.ASGITransport(app_for(node), raise_app_exceptions=False) as transport:
            yield SandboxClient(Sender(transport, "http://node", {}, patience=2.0))


def imported(api: Any, folder: Path, *members: tarfile.TarInfo, changes: tuple[str, ...] = ()) -> str:
    """An image of a few empty members."""
    images.write_tiny(folder / "root.tar", *members)
    tag = secrets.token_hex(6)
    answer = api.import_image_from_file(str(folder / "root.tar"), "skyenv-test/tiny", tag, changes=list(changes))
    assert "error" not in json.loads(answer.splitlines()[-1])
    return f"skyenv-test/tiny:{tag}"


async def test_containers_have_few_rights_no_network_and_no_ports(api: Any) -> None:
    before = containers(api)
    async with opened() as client, client.sandbox(memory_bytes=64 << 20, pids=50, cpus=0.5):
        (made,) = containers(api) - before
        found = api.inspect_container(made)
        host = found["HostConfig"]
        assert (host["CapDrop"], host["CapAdd"], host["Privileged"]) == (["ALL"], None, False)
        assert "no-new-privileges" in host["SecurityOpt"]
        assert (host["NetworkMode"], host["PortBindings"]) == ("none", None)
        assert not found["NetworkSettings"]["Ports"]
        assert (host["Memory"], host["PidsLimit"], host["NanoCpus"]) == (64 << 20, 50, 500_000_000)
        assert [mount["RW"] for mount in found["Mounts"]] == [False]
        assert found["State"]["Pid"]
    await until_gone(api, {made})


@pytest.mark.parametrize("reference", [BUSYBOX, DEBIAN])
async def test_limits_and_processes_of_an_image(api: Any, reference: str) -> None:
    async with opened(reference) as client, client.sandbox(cpus=1, pids=40) as box:
        seen = await box.exec("nproc; ps -e 2>/dev/null || ps; cat /sys/devices/system/cpu/online")
        assert seen.output.startswith("1\n")
        assert seen.output.endswith("\n0\n")
        assert "catatonit" not in seen.output
        assert "fork" in (await box.exec("sh -c 'for i in $(seq 60); do sleep 60 & done'", timeout=60)).output
        await box.kill_processes()
        assert (await box.exec("echo alive", timeout=60.0)).output == "alive\n"


async def test_e7_an_images_own_entrypoint_user_and_health_check_do_not_run(api: Any, tmp_path: Path) -> None:
    base = api.create_container(BUSYBOX, command=["sh"])
    changes = [
        'ENTRYPOINT ["/bin/false"]', "USER nobody", "WORKDIR /srv", "ENV KIND=odd", "HEALTHCHECK CMD /bin/false",
        "EXPOSE 80", "LABEL skyenv.state=/elsewhere",
    ]  # fmt: skip
    tag = secrets.token_hex(6)
    api.commit(base["Id"], repository="skyenv-test/odd", tag=tag, changes=changes)
    api.remove_container(base["Id"])
    async with opened() as client, client.sandbox(f"skyenv-test/odd:{tag}") as box:
        result = await box.exec("id -u; pwd; echo $KIND")
        assert result.output == "0\n/srv\nodd\n"
    assert api.inspect_image(f"skyenv-test/odd:{tag}")
    api.remove_image(f"skyenv-test/odd:{tag}")


async def test_e7_an_image_without_bash_python_or_loader() -> None:
    async with opened(BUSYBOX) as client, client.sandbox() as box:
        assert (await box.exec("echo ${BASH_VERSION-none}; cd /tmp; export A=1")).output == "none\n"
        assert (await box.exec("pwd; echo $A; command -v python3 bash")).output == "/tmp\n1\n"
        await box.write_file("/root/x", b"\xff")
        await box.upload("/root/copy", await box.download("/root"))
        assert await box.read_file("/root/copy/x") == b"\xff"


async def test_e7_an_image_without_a_shell_is_told(api: Any, tmp_path: Path) -> None:
    image = imported(api, tmp_path, tarfile.TarInfo("file"))
    before = containers(api)
    async with opened() as client:
        with pytest.raises(SandboxUnavailable, match="shell /bin/sh cannot run"):
            async with client.sandbox(image):
                pass
        await until_gone(api, containers(api) - before)
    api.remove_image(image)


async def test_an_image_that_is_not_there_says_so() -> None:
    async with opened(None) as client:
        with pytest.raises(ConfigError, match="image"):
            async with client.sandbox():
                pass
        with pytest.raises(ConfigError, match="'docker' gives"):
            async with client.sandbox(BUSYBOX, network="host"):
                pass
        with pytest.raises(SandboxUnavailable, match="refused"):
            async with client.sandbox("127.0.0.1:9/none:1"):
                pass


async def test_device_files_of_an_image_lead_nowhere(api: Any, tmp_path: Path) -> None:
    disk = tarfile.TarInfo("disk")
    disk.type, disk.devmajor, disk.devminor, disk.mode = tarfile.CHRTYPE, 1, 5, 0o666
    tiny = imported(api, tmp_path, disk)
    folder = await _merged(api, tiny, BUSYBOX, tmp_path)
    async with opened(folder) as client, client.sandbox() as box:
        result = await box.exec("ls -l /disk; head -c 1 /disk; head -c 2 /dev/zero | wc -c")
        assert result.output.startswith("c")
        assert "Permission denied" in result.output
        assert result.output.endswith("2\n")
    for image in (tiny, folder):
        api.remove_image(image, force=True)


async def _merged(api: Any, tiny: str, base: str, folder: Path) -> str:
    """An image with the members of `tiny` on `base`."""
    made = api.create_container(base, command=["sh"])
    api.put_archive(made["Id"], "/", (folder / "root.tar").read_bytes())
    tag = secrets.token_hex(6)
    api.commit(made["Id"], repository="skyenv-test/tiny", tag=tag)
    api.remove_container(made["Id"])
    return f"skyenv-test/tiny:{tag}"


async def test_e4_a_container_that_the_engine_killed_is_lost(api: Any) -> None:
    before = containers(api)
    async with opened() as client, client.sandbox() as box:
        await box.exec("sleep 600 &")
        (made,) = containers(api) - before
        api.kill(made)
        with pytest.raises(SandboxLost):
            await box.exec("sleep 5")
    await until_gone(api, {made})


class Wire:
    """A socket before the engine's: it forwards, and cuts or stalls what matches `pattern`."""

    def __init__(self, engine: str) -> None:
        self._engine = engine.removeprefix("unix://")
        self.pattern, self.mode, self.hits = b"", "", 0
        self.tasks: set[asyncio.Task[None]] = set()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self.serve(reader, writer))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_unix_connection(self._engine)
        with contextlib.suppress(ConnectionError):
            await asyncio.gather(self._copy(reader, forth, watched=True), self._copy(back, writer, watched=False))
        writer.close()
        forth.close()

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, watched: bool) -> None:
        while data := await source.read(1 << 16):
            if watched and self.pattern and self.pattern in data:
                self.hits += 1
                if self.mode == "cut":
                    raise ConnectionResetError
                await asyncio.sleep(600)
            target.write(data)
            await target.drain()
        target.close()


@pytest.fixture
async def wire(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Wire]:
    wire = Wire(engine)
    server = await asyncio.start_unix_server(wire.accept, str(tmp_path / "e.sock"))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/e.sock")
    yield wire
    server.close()
    for task in wire.tasks:
        task.cancel()
    await asyncio.gather(*wire.tasks, return_exceptions=True)


async def test_e1_an_engine_that_is_cut_off_between_create_and_start(api: Any, wire: Wire) -> None:
    before = containers(api)
    async with opened() as client:
        wire.pattern, wire.mode = b"/start", "cut"
        with pytest.raises(SandboxUnavailable, match="does not answer"):
            async with client.sandbox():
                pass
        assert wire.hits
        await until_gone(api, containers(api) - before)
        wire.pattern = b""
        async with client.sandbox() as box:
            assert (await box.exec("echo alive", timeout=60.0)).output == "alive\n"
    assert containers(api) <= before


async def test_e1_a_node_that_is_killed_between_create_and_start(api: Any, wire: Wire) -> None:
    before = containers(api)
    wire.pattern, wire.mode = b"/start", "stall"
    with served(SERVE_DOCKER, BUSYBOX) as (process, url):
        headers = {"authorization": "Bearer secret"}
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=100) as http:
            assert (await http.put(f"/sandboxes/{'a' * 32}?wait=0.2", content="{}")).status_code == 202
            with anyio.fail_after(100):
                while not wire.hits:
                    await anyio.sleep(0.02)
        process.kill()
        process.wait()
    left = containers(api) - before
    assert [api.inspect_container(each)["State"]["Status"] for each in left] == ["created"]
    wire.pattern = b""
    with anyio.fail_after(100):
        while containers(api) & left:  # its launcher may need a moment to end
            async with opened():
                pass


async def test_f5_an_engine_that_stalls_is_told_and_holds_nobody_up(
    api: Any, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "TIMEOUT", 10.0)
    async with opened() as client, client.sandbox() as box:
        wire.pattern, wire.mode = b"/start", "stall"
        before = containers(api)

        async def refused() -> None:
            with pytest.raises(SandboxUnavailable, match="does not answer"):
                async with client.sandbox():
                    pass

        async with anyio.create_task_group() as group:
            for _number in range(3):
                group.start_soon(refused)
            for _number in range(5):
                assert (await box.exec("echo alive", timeout=60.0)).output == "alive\n"
                await anyio.sleep(0.2)
        wire.pattern = b""
        await until_gone(api, containers(api) - before)


async def test_no_engine_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nothing.sock")
    with pytest.raises(ConfigError, match="DOCKER_HOST"):
        async with opened():
            pass


async def test_a_closed_node_leaves_nothing_in_the_engine(api: Any) -> None:
    before, known = containers(api), {each["Id"] for each in api.images(all=True)}
    async with opened() as client, client.sandbox() as box:
        await box.exec("touch /made")
        snapshot = await box.snapshot()
        async with client.sandbox(snapshot=snapshot) as twin, twin.fork() as third:
            assert (await third.exec("ls /made")).output == "/made\n"
        kept = await box.snapshot()
        own = kept.partition("-")[0]
        assert f"skyenv-snapshot:{own}" in {tag for each in api.images() for tag in each["RepoTags"]}
    assert containers(api) <= before
    assert {each["Id"] for each in api.images(all=True)} <= known


async def test_a_killed_node_leaves_nothing_that_the_next_one_does_not_remove(api: Any) -> None:
    before = containers(api)
    async with opened() as bystanders, bystanders.sandbox() as bystander:
        with served(SERVE_DOCKER, BUSYBOX) as (process, url):
            headers, path = {"authorization": "Bearer secret", "idempotency-key": "k"}, f"/sandboxes/{'c' * 32}"
            async with httpx.AsyncClient(base_url=url, headers=headers, timeout=100) as http:
                assert (await http.put(path, content="{}")).status_code == 200
                assert (await http.post(f"{path}/exec", content="sleep 600 &")).status_code == 200
                made = containers(api) - before
                assert len(made) == 2
                (launcher,) = children(process.pid)
                pids = [launcher, *tree([launcher])]
                os.kill(process.pid, signal.SIGSTOP)
                os.kill(launcher, signal.SIGKILL)
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
        with anyio.fail_after(100):
            while alive(pids) or len(containers(api) & made) > 1:
                async with opened():
                    pass
        assert (await bystander.exec("echo alive", timeout=60.0)).output == "alive\n"


async def test_e5_the_next_node_takes_over_containers(api: Any, tmp_path: Path) -> None:
    headers = {"authorization": "Bearer secret"}
    path, before = f"/sandboxes/{'b' * 32}", containers(api)
    with served(SERVE_DOCKER, BUSYBOX, str(tmp_path / "state")) as (first, url):
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=100) as http:
            assert (await http.put(path, content="{}")).status_code == 200
            command, key = "until [ -e /go ]; do sleep 0.05; done; echo x >> /log; cat /log", {"idempotency-key": "k"}
            assert (await http.post(f"{path}/exec?wait=0.2", content=command, headers=key)).status_code == 202
        first.kill()
        first.wait()
    made = containers(api) - before
    assert len(made) == 1
    with served(SERVE_DOCKER, BUSYBOX, str(tmp_path / "state")) as (_second, url):
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=100) as http:
            made_go = await http.put(f"{path}/file?path=/go", content="", headers={"idempotency-key": "go"})
            assert made_go.status_code == 200
            for _again in range(2):
                answer = await http.post(f"{path}/exec", content=command, headers=key)
                assert (answer.status_code, answer.content) == (200, b"x\n")
            assert containers(api) >= made
            assert (await http.delete(path)).status_code == 200
            await until_gone(api, made)


@pytest.fixture(scope="module")
def registry_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("registry")
    images.write_busybox(folder / "root.tar")
    content = (folder / "root.tar").read_bytes()
    with registry(folder) as url:
        Built([content, layer()]).push(url, "team/tool", "1")
        Built([content], architecture="arm64").push(url, "team/tool", "arm")
        yield url


@pytest.fixture
async def pulls(registry_url: str, api: Any) -> AsyncIterator[Proxy]:
    async with proxied(registry_url) as proxy:
        yield proxy
        for image in await asyncio.to_thread(api.images):
            for tag in image["RepoTags"] or ():
                if tag.startswith(proxy.host):
                    await asyncio.to_thread(api.remove_image, tag, force=True)


async def test_f13_sixteen_first_requests_are_one_pull(pulls: Proxy) -> None:
    backend = DockerBackend()
    async with backend.open(), anyio.create_task_group() as group:
        for _number in range(16):
            group.start_soon(backend.pull, f"{pulls.host}/team/tool:1")
    assert pulls.count("/blobs/") == len({path for path, _range in pulls.asked if "/blobs/" in path})
    assert f"{pulls.host}/team/tool:1" in backend.images()


@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        (Fault("/manifests/", times=99, status=429), SandboxUnavailable, "limits"),
        (Fault("/manifests/", times=99, status=503), SandboxUnavailable, "503"),
        (Fault("/blobs/", times=99, flip_at=100), SandboxUnavailable, "verification failed"),
        (Fault("/manifests/", times=99, status=404), ConfigError, "404|unknown"),
    ],
)
async def test_f12_a_registry_that_misbehaves_is_a_typed_error(
    pulls: Proxy, fault: Fault, kind: type[Exception], text: str
) -> None:
    pulls.faults.append(fault)
    backend = DockerBackend()
    async with backend.open():
        with pytest.raises(kind, match=text) as caught:
            await backend.pull(f"{pulls.host}/team/tool:1")
        if isinstance(caught.value, SandboxUnavailable):
            assert caught.value.retry_after
        pulls.faults.clear()
        await backend.pull(f"{pulls.host}/team/tool:1")


async def test_e7_an_image_for_other_machines_is_told(pulls: Proxy) -> None:
    async with opened() as client:
        with pytest.raises(ConfigError, match="arm64"):
            async with client.sandbox(f"{pulls.host}/team/tool:arm"):
                pass
