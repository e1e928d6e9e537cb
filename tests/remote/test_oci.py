"""Sandboxes from images by crun and runc: the contract, odd images, and what is left afterwards."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from fleet_processes import fleet_in
from node_processes import SERVE_OCI, served
from registries import INDEX, Built, Fault, Proxy, index_of, layer, member, proxied, put_manifest, registry
from test_lifecycle import eventually

from skyenv.errors import ConfigError, SandboxError, SandboxUnavailable
from skyenv.remote.backends import get
from skyenv.remote.backends.oci import OciBackend
from skyenv.remote.backends.runtimes import find_sleeper
from skyenv.remote.client import SandboxClient, connect
from skyenv.testing import check_sandbox

pytestmark = pytest.mark.oci
FOLDER = tarfile.DIRTYPE


@contextmanager
def node(layouts: Path, **options: Any) -> Iterator[tuple[Any, str]]:
    given = {"root": f"{layouts}/store", "paths": [str(layouts)], "image": f"oci:{layouts}/busybox", **options}
    with served(SERVE_OCI, json.dumps(given)) as (process, url):
        yield process, url


@asynccontextmanager
async def client_of(layouts: Path, **options: Any) -> AsyncIterator[SandboxClient]:
    with node(layouts, **options) as (_process, url):
        async with connect(url, "secret", patience=60.0) as client:
            yield client


@pytest.fixture(scope="module")
def busybox_url(layouts: Path) -> Iterator[str]:
    with node(layouts, runtime="runc") as (_process, url):
        yield url


@pytest.mark.parametrize(
    ("runtime", "run_as"), [("crun", None), ("runc", None), ("crun", 65534)], ids=["crun", "runc", "rootless crun"]
)
async def test_conformance(layouts: Path, runtime: str, run_as: int | None) -> None:
    async with client_of(layouts, runtime=runtime, image=f"oci:{layouts}/debian", run_as=run_as) as client:
        health = await client.health()
        assert health["runtime"]["version"].startswith(runtime)
        assert (health["backend"], health["isolated"]) == ("oci", True)
        assert health["mode"] == ("root" if run_as is None else "rootless")
        await check_sandbox(client)


async def test_an_image_without_bash_has_a_shell(busybox_url: str) -> None:
    async with connect(busybox_url, "secret") as client, client.sandbox() as box:
        first = await box.exec("cd /tmp; A=1; f() { echo f $A; }; id -u; echo new > file; rm -r /srv; exit 3")
        assert (first.exit_code, first.output, first.session_restarted) == (3, "0\n", True)
        late = await box.exec("echo part; sleep 100 | sleep 100", timeout=2.0)
        assert (late.timed_out, late.output) == (True, "part\n")
        async with box.fork(shell=False) as twin:
            assert (await twin.exec("cat /tmp/file; ls -d /srv")).output.startswith("new\nls: /srv")
        assert (await box.exec("stat -c %U /tmp/file; while ps | grep -q [s]leep; do :; done")).output == "root\n"


async def test_an_image_sets_variables_and_directory_and_runs_nothing(layouts: Path, busybox_url: str) -> None:
    """Its entrypoint would end at once, and what a layer removes is gone."""
    upper = layer(
        member("srv/app", type=FOLDER, uid=1000), member("srv/app/x", b"1", uid=1000), member("etc/.wh.group")
    )
    config = {"Env": ["COLOUR=blue", "PATH=/bin"], "WorkingDir": "/srv/app", "Entrypoint": ["/bin/false"], "User": "5"}
    Built([tar_of(layouts / "busybox"), upper], config=config).write_layout(layouts / "odd")
    async with (
        connect(busybox_url, "secret") as client,
        client.sandbox(image=f"oci:{layouts}/odd", env={"A": "1"}) as box,
    ):
        result = await box.exec("echo $A $COLOUR $PATH; pwd; stat -c %u x; ls /etc/group; touch /srv/app/y && echo ok")
        assert result.output.startswith("1 blue /bin\n/srv/app\n1000\nls: /etc/group"), result.output
        assert result.output.endswith("\nok\n")


def tar_of(layout: Path) -> bytes:
    biggest = max((layout / "blobs/sha256").iterdir(), key=lambda path: path.stat().st_size)
    return biggest.read_bytes()


async def test_an_image_without_any_shell_has_files(layouts: Path, busybox_url: str) -> None:
    Built([layer(member("data", b"42"))]).write_layout(layouts / "bare")
    async with connect(busybox_url, "secret") as client, client.sandbox(image=f"oci:{layouts}/bare") as box:
        assert await box.read_file("/data") == b"42"
        with pytest.raises(SandboxError, match="no shell"):
            await box.exec("true")
        await box.write_file("/new", b"1")
        assert [entry.path for entry in await box.list_dir("/root")] == []


async def test_a_shell_of_another_machine_is_told(layouts: Path, busybox_url: str) -> None:
    Built([layer(member("bin/sh", b"\x7fELF\x02\x01\x01" + bytes(57), mode=0o755))]).write_layout(layouts / "wrong")
    with pytest.raises(SandboxError, match="/bin/sh cannot run"):
        async with connect(busybox_url, "secret") as client, client.sandbox(image=f"oci:{layouts}/wrong"):
            pass


@pytest.fixture
async def proxy(tmp_path: Path, layouts: Path) -> AsyncIterator[Proxy]:
    (tmp_path / "registry").mkdir()
    with registry(tmp_path / "registry") as url:
        Built([tar_of(layouts / "busybox")]).push(url, "busy", "1")
        other = Built([layer(member("x", b"1"))], architecture="arm64")
        other.push(url, "busy", "arm")
        with httpx.Client(base_url=f"{url}/v2/busy", timeout=100) as http:
            put_manifest(http, "list", index_of({"arm64": other}), INDEX)
        async with proxied(url) as proxy:
            yield proxy


async def test_sixteen_first_requests_are_one_pull(layouts: Path, tmp_path: Path, proxy: Proxy) -> None:
    async with client_of(layouts, root=str(tmp_path / "store")) as client:
        proxy.faults.append(Fault("blobs", times=1, status=429, headers={"retry-after": "2"}))
        states: set[str] = set()

        async def open_one() -> None:
            async with client.sandbox(image=f"{proxy.host}/busy:1", on_state=states.add) as box:
                assert (await box.exec("echo ok")).output == "ok\n"

        async with anyio.create_task_group() as group:
            for _ in range(16):
                group.start_soon(open_one)
        assert "pulling" in states
    assert proxy.count("blobs") == 3
    assert proxy.count("manifests") == 1


async def test_an_image_that_cannot_be_had_is_a_typed_error(busybox_url: str, proxy: Proxy) -> None:
    for name, message in (
        (f"{proxy.host}/busy:none", "none of that name"), (f"{proxy.host}/busy:arm", "linux/arm64"),
        (f"{proxy.host}/busy:list", "linux/arm64"), ("dir:/root", "below these"), ("oci:/etc", "below these"),
        ("Not A Name", "not a name"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            async with connect(busybox_url, "secret") as client, client.sandbox(image=name):
                pass


async def test_a_full_disk_refuses_sandboxes_and_lets_running_ones_be(layouts: Path, small_disk: Path) -> None:
    async with client_of(layouts, root=str(small_disk)) as client, client.sandbox() as box:
        space = os.statvfs(small_disk)
        ballast = space.f_bavail * space.f_frsize - (1 << 20)
        (small_disk / "ballast").write_bytes(bytes(ballast))
        with pytest.raises(SandboxUnavailable) as caught:
            async with client.sandbox():
                pass
        assert caught.value.reason == "disk_full"
        assert (await box.exec("echo alive > f; cat f")).output == "alive\n"
        (small_disk / "ballast").unlink()
        async with client.sandbox() as other:
            assert (await other.exec("echo ok")).output == "ok\n"


def left_over(state_base: Path) -> dict[str, list[str]]:
    """Processes, groups and files of nodes whose state lies below `state_base`."""
    sleepers = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if str(state_base) in Path("/proc", pid, "mountinfo").read_text():
                sleepers.append(pid)
        except OSError:
            continue
    return {
        "processes": sleepers,
        "files": [name for name in os.listdir(state_base) if name.startswith("skyenv-")],
        "mounts": [line for line in Path("/proc/mounts").read_text().splitlines() if str(state_base) in line],
    }


def left(state_base: Path) -> list[str]:
    return [f"{kind} {found}" for kind, found in left_over(state_base).items() if found]


def groups_named(names: list[str]) -> list[str]:
    return [
        os.path.join(folder, name)
        for folder, names_here, _files in os.walk("/sys/fs/cgroup")
        for name in names_here
        if name in names
    ]


@pytest.mark.parametrize("runtime", ["crun", "runc"])
async def test_nothing_is_left(layouts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str) -> None:
    monkeypatch.setenv("SKYENV_STATE_DIR", str(tmp_path))
    with node(layouts, runtime=runtime) as (_process, url):
        async with connect(url, "secret") as client:
            for _ in range(3):
                async with client.sandbox() as box:
                    await box.exec("sleep 100 & (setsid sleep 100 &) ; cd /tmp; touch x")
                    names = [name for state in tmp_path.glob("skyenv-*") for name in os.listdir(state)]
            async with client.sandbox() as box:
                await box.exec("sleep 100 &")
                assert left_over(tmp_path)["processes"]
                names += [name for state in tmp_path.glob("skyenv-*") for name in os.listdir(state)]
    await eventually(lambda: [*left(tmp_path), *groups_named([name for name in names if len(name) == 32])])


async def test_a_killed_launcher_and_node_leave_nothing_to_the_next(
    layouts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYENV_STATE_DIR", str(tmp_path))
    with node(layouts, runtime="crun") as (process, url):
        async with connect(url, "secret", patience=1.0) as client, client.sandbox() as box:
            await box.exec("sleep 100 &")
            for pid in (launcher_of(process.pid), process.pid):
                os.kill(pid, 9)
            process.wait()
    with node(layouts, runtime="runc") as (_process, url):
        async with connect(url, "secret") as client:
            assert (await client.health())["sandboxes"] == 0
    await eventually(lambda: left(tmp_path))


def launcher_of(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found = [child for child in map(int, children) if "launcher" in Path(f"/proc/{child}/comm").read_text()]
    assert len(found) == 1, children
    return found[0]


async def test_a_sandbox_outlives_its_node(layouts: Path, tmp_path: Path) -> None:
    """The next server with the same state directory goes on with it, its image's variables and its snapshots."""
    state = tmp_path / "state"
    busybox = tar_of(layouts / "busybox")
    Built([busybox], config={"Env": ["COLOUR=blue"]}).write_layout(layouts / "coloured")
    options = {"state": str(state), "image": f"oci:{layouts}/coloured"}
    with node(layouts, **options) as (process, url):
        async with connect(url, "secret") as client:
            opening = client.sandbox()
            box = await opening.__aenter__()
            await box.exec("echo kept > /root/file")
            process.kill()
            process.wait()
            port = int(url.rpartition(":")[2])
            with node(layouts, port=port, **options) as (_next, again):
                assert again == url
                assert (await box.exec("cat /root/file; echo $COLOUR")).output == "kept\nblue\n"
                async with box.fork() as twin:
                    assert (await twin.exec("cat /root/file; echo $COLOUR")).output == "kept\nblue\n"
                await opening.__aexit__(None, None, None)


async def test_no_runtime_is_an_error_that_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for runtime, message in (("/bin/false", "/bin/false: .*ended with status 1"), ("no-such-runtime", "not installed")):
        with pytest.raises(ConfigError, match=message):
            async with OciBackend("x", runtime).open():
                pass
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="install catatonit"):
        find_sleeper("oci", places=())


async def test_the_command_line_serves_images(layouts: Path, tmp_path: Path) -> None:
    """Options of images on the command line; the machine's network only for who asks and may."""
    options = [f"paths=[{layouts}]", f"root={layouts}/store"]
    with fleet_in(tmp_path) as fleet:
        flags = [part for option in options for part in ("--backend-option", option)]
        image = ["--image", f"oci:{layouts}/busybox", "--runtime", "crun"]
        fleet.start(
            "node", "serve", "--port", "0", "--token", "secret", "--backend", "oci", "--allow-egress", *image, *flags
        )
        url = fleet.urls["node"]
        reach = f"nc -w 2 127.0.0.1 {url.rpartition(':')[2]} </dev/null && echo reached"
        async with connect(url, "secret") as client:
            async with client.sandbox(network="host") as box:
                assert (await box.exec(reach)).output == "reached\n"
                assert (await box.exec("cat /etc/resolv.conf")).output == Path("/etc/resolv.conf").read_text()
                assert (await box.exec("ip link set lo down")).exit_code != 0
            async with client.sandbox() as box:
                assert "refused" in (await box.exec(reach)).output
                assert (await box.exec("cat /etc/resolv.conf; ls /sys/class/net 2>/dev/null")).output == ""


def test_an_option_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match="did you mean 'mirrors'"):
        get("oci", mirror={"docker.io": "http://127.0.0.1:1"})
    with pytest.raises(ConfigError, match="a mapping of registries"):
        get("oci", mirrors="http://127.0.0.1:1")
