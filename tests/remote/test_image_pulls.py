"""Images from a real registry, through a proxy that is slow, refuses, cuts and flips; and from files."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import tarfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from images import BUSYBOX
from registries import INDEX, Built, Fault, Proxy, digest, index_of, layer, member, proxied, put_manifest, registry

from skyenv.errors import ConfigError, SandboxUnavailable
from skyenv.remote.images.puller import Puller
from skyenv.remote.images.settings import ImageSettings

pytestmark = pytest.mark.oci
SECRET = "$2b$04$vFaM.2ZyGC6OhWWjVr2auuC0U/Qi8qa5lcc5jqfc625/ges2tvQZy"  # bcrypt of `secret`
BASE = 1_500_000_000
LOWEST = layer(member("etc", type=tarfile.DIRTYPE), member("etc/low", os.urandom(300_000)))
UPPER = layer(member("etc/.wh.low"), member("top", b"t"))


@pytest.fixture(scope="module")
def registry_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with registry(tmp_path_factory.mktemp("registry")) as url:
        image = Built([LOWEST, UPPER], config={"Env": ["A=1=2", "bad"], "WorkingDir": "/w", "Entrypoint": ["false"]})
        image.push(url, "team/tool", "1")
        other = Built([LOWEST], architecture="arm64")
        other.push(url, "team/tool", "arm")
        with httpx.Client(base_url=f"{url}/v2/team/tool", timeout=100) as http:
            put_manifest(http, "many", index_of({"arm64": other, "amd64": image}), INDEX)
            put_manifest(http, "foreign", index_of({"arm64": other}), INDEX)
        yield url


@pytest.fixture
async def proxy(registry_url: str) -> AsyncIterator[Proxy]:
    async with proxied(registry_url) as proxy:
        yield proxy


@asynccontextmanager
async def opened(folder: Path, **options: Any) -> AsyncIterator[Puller]:
    puller = Puller(ImageSettings(root=folder / "store", paths=(folder,), **options), base_uid=BASE)
    async with puller.open():
        yield puller


def content(puller: Puller, layers: tuple[str, ...]) -> list[list[str]]:
    return [sorted(os.listdir(puller.store.layers / name)) for name in layers]


@pytest.mark.parametrize("tag", ["1", "many"])
async def test_an_image_is_pulled_once_and_kept(tmp_path: Path, proxy: Proxy, tag: str) -> None:
    name = f"{proxy.host}/team/tool:{tag}"
    async with opened(tmp_path) as puller:
        image = await puller.take(name)
        assert content(puller, image.layers) == [["etc"], ["etc", "top"]]
        assert (image.config.env, image.config.workdir) == ({"A": "1=2"}, "/w")
        assert image.config.entrypoint == ("false",)
        assert puller.ready() == [name]
        asked = len(proxy.asked)
        assert await puller.take(name) == image
    async with opened(tmp_path) as puller:
        assert await puller.take(name) == image
    assert len(proxy.asked) == asked
    assert not list((tmp_path / "store/shifted").glob("scratch-*"))


async def test_a_digest_names_one_image(tmp_path: Path, proxy: Proxy) -> None:
    manifest = Built([LOWEST, UPPER], config={"Env": ["A=1=2", "bad"], "WorkingDir": "/w", "Entrypoint": ["false"]})
    async with opened(tmp_path) as puller:
        image = await puller.take(f"{proxy.host}/team/tool@{digest(manifest.manifest)}")
        assert image.digest == digest(manifest.manifest)
        with pytest.raises(ConfigError, match="none of that name"):
            await puller.take(f"{proxy.host}/team/tool@sha256:{'0' * 64}")


async def test_sixteen_first_requests_are_one_pull(tmp_path: Path, proxy: Proxy) -> None:
    async with opened(tmp_path) as puller:
        async with anyio.create_task_group() as group:
            for _ in range(16):
                group.start_soon(puller.take, f"{proxy.host}/team/tool:1")
        assert puller.pulls == 1
    assert proxy.count("manifests") == 1
    assert proxy.count("blobs") == 3


async def test_a_pull_goes_on_when_who_asked_goes_away(tmp_path: Path, proxy: Proxy) -> None:
    name = f"{proxy.host}/team/tool:1"
    async with opened(tmp_path) as puller:
        with anyio.move_on_after(0):
            await puller.take(name)
        await puller.take(name)
        assert puller.pulls <= 1


@pytest.mark.parametrize(
    "fault",
    [
        Fault("blobs", times=2, status=429, headers={"retry-after": "0"}),
        Fault("manifests", times=2, status=503),
        Fault("blobs", times=2, status=500),
        Fault("blobs", flip_at=50_000),
        Fault("manifests", cut_at=100),
        Fault("blobs", cut_at=10),
    ],
    ids=["429", "503", "500", "flipped", "manifest cut", "blob cut"],
)
async def test_what_passes_is_waited_for(tmp_path: Path, proxy: Proxy, fault: Fault) -> None:
    proxy.faults.append(fault)
    async with opened(tmp_path) as puller:
        image = await puller.take(f"{proxy.host}/team/tool:1")
        assert content(puller, image.layers) == [["etc"], ["etc", "top"]]
        assert (puller.store.layers / image.layers[0] / "etc/low").stat().st_size == 300_000
    assert fault.times == 0


async def test_a_broken_download_goes_on_where_it_stopped(tmp_path: Path, proxy: Proxy) -> None:
    big = next(name for name, data in Built([LOWEST]).blobs.items() if len(data) > 100_000)
    proxy.faults.append(Fault(big, cut_at=100_000))
    async with opened(tmp_path) as puller:
        await puller.take(f"{proxy.host}/team/tool:1")
    ranges = [asked for path, asked in proxy.asked if big in path]
    assert ranges == ["", "bytes=100000-"]


async def test_a_server_without_ranges_starts_over(tmp_path: Path, proxy: Proxy) -> None:
    big = next(name for name, data in Built([LOWEST]).blobs.items() if len(data) > 100_000)
    proxy.faults += [Fault(big, cut_at=100_000), Fault(big, deaf_to_ranges=True)]
    async with opened(tmp_path) as puller:
        image = await puller.take(f"{proxy.host}/team/tool:1")
        assert (puller.store.layers / image.layers[0] / "etc/low").read_bytes() == _low()


def _low() -> bytes:
    import io

    with tarfile.open(fileobj=io.BytesIO(LOWEST)) as tar:
        file = tar.extractfile("etc/low")
        assert file is not None
        return file.read()


@pytest.mark.parametrize(
    ("fault", "retry_after"),
    [
        (Fault("manifests", times=99, status=429, headers={"retry-after": "3600"}), 3600),
        (Fault("blobs", times=99, status=502), None),
        (Fault("blobs", times=99, flip_at=20), None),
        (Fault("manifests", times=99, stall_at=10), None),
    ],
    ids=["429 for long", "502 for ever", "always damaged", "stalled"],
)
async def test_what_does_not_pass_is_a_typed_refusal(
    tmp_path: Path, proxy: Proxy, fault: Fault, retry_after: float | None
) -> None:
    proxy.faults.append(fault)
    async with opened(tmp_path, attempts=2, stall_timeout=0.3) as puller:
        with pytest.raises(SandboxUnavailable) as caught:
            await puller.take(f"{proxy.host}/team/tool:1")
        assert caught.value.reason == "registry"
        assert caught.value.retry_after is not None
        assert retry_after is None or caught.value.retry_after == retry_after
    proxy.faults.clear()
    async with opened(tmp_path) as puller:
        await puller.take(f"{proxy.host}/team/tool:1")


async def test_a_pull_has_a_deadline(tmp_path: Path, proxy: Proxy) -> None:
    proxy.faults.append(Fault("blobs", times=99, stall_at=10))
    async with opened(tmp_path, pull_timeout=0.5) as puller:
        with pytest.raises(SandboxUnavailable, match=r"in 0\.5 s"):
            await puller.take(f"{proxy.host}/team/tool:1")


@pytest.mark.parametrize(
    ("name", "message"),
    [("team/none:1", "none of that name"), ("team/tool:9", "none of that name"), ("team/tool:foreign", "linux/arm64"),
     ("team/tool:arm", "linux/arm64")],
)  # fmt: skip
async def test_an_image_that_cannot_run_here_is_named(tmp_path: Path, proxy: Proxy, name: str, message: str) -> None:
    async with opened(tmp_path) as puller:
        with pytest.raises(ConfigError, match=message):
            await puller.take(f"{proxy.host}/{name}")


async def test_a_mirror_is_asked_first(tmp_path: Path, proxy: Proxy) -> None:
    mirrors = {"docker.io": ("http://127.0.0.1:1", f"http://{proxy.host}")}
    async with opened(tmp_path, mirrors=mirrors, attempts=1) as puller:
        image = await puller.take("team/tool:1")
        assert image.reference == "docker.io/team/tool:1"


async def test_a_token_is_fetched_and_renewed(tmp_path: Path, proxy: Proxy) -> None:
    proxy.token = "first"
    async with opened(tmp_path) as puller:
        await puller.take(f"{proxy.host}/team/tool:1")
        asked = [path for path, _range in proxy.asked if path.startswith("/token")]
        assert asked == ["/token?scope=repository%3Ateam%2Ftool%3Apull&service=here"]
        proxy.token = "second"
        await puller.take(f"{proxy.host}/team/tool:many")
        assert proxy.count("^/token") == 2


async def test_passwords_come_from_dockers_configuration(tmp_path: Path) -> None:
    users = tmp_path / "htpasswd"
    (tmp_path / "registry").mkdir()
    users.write_text(f"ada:{SECRET}\n")
    with registry(tmp_path / "registry", users) as url:
        host = url.removeprefix("http://")
        config = tmp_path / "config.json"
        config.write_text(json.dumps({"auths": {host: {"auth": base64.b64encode(b"ada:secret").decode()}}}))
        image = Built([UPPER])
        with httpx.Client(base_url=f"{url}/v2/a", auth=("ada", "secret"), timeout=100) as http:
            for name, data in image.blobs.items():
                place = http.post("/blobs/uploads/").raise_for_status().headers["location"]
                http.put(httpx.URL(place).copy_merge_params({"digest": name}), content=data).raise_for_status()
            put_manifest(http, "1", image.manifest, "application/vnd.oci.image.manifest.v1+json")
        async with opened(tmp_path, docker_config=config) as puller:
            await puller.take(f"{host}/a:1")
        async with opened(tmp_path / "2", docker_config=tmp_path / "none") as puller:
            with pytest.raises(ConfigError, match="log in"):
                await puller.take(f"{host}/a:1")


@pytest.mark.parametrize("compression", ["plain", "gzip", "zstd"])
async def test_a_layout_is_read(tmp_path: Path, compression: str) -> None:
    Built([LOWEST, UPPER], compression).write_layout(tmp_path / "layout", "a")
    Built([UPPER], compression).write_layout(tmp_path / "layout", "b")
    async with opened(tmp_path) as puller:
        image = await puller.take(f"oci:{tmp_path}/layout:a")
        assert content(puller, image.layers) == [["etc"], ["etc", "top"]]
        other = await puller.take(f"oci:{tmp_path}/layout:b")
        assert other.layers == image.layers[1:]
        for name, message in ((":c", "none for linux"), ("", "several images")):
            with pytest.raises(ConfigError, match=message):
                await puller.take(f"oci:{tmp_path}/layout{name}")


async def test_a_damaged_layout_is_refused(tmp_path: Path) -> None:
    image = Built([UPPER])
    image.write_layout(tmp_path / "layout")
    wrong = tmp_path / "layout/blobs/sha256" / next(iter(image.blobs)).removeprefix("sha256:")
    wrong.write_bytes(wrong.read_bytes()[:-20])
    async with opened(tmp_path) as puller:
        with pytest.raises(ConfigError, match="cannot be read"):
            await puller.take(f"oci:{tmp_path}/layout")
        assert not os.listdir(puller.store.layers)


async def test_an_archive_is_read_in_place(tmp_path: Path) -> None:
    Built([LOWEST, UPPER]).write_layout(tmp_path / "layout", "x")
    command = ["skopeo", "copy", "-q", f"oci:{tmp_path}/layout:x", f"docker-archive:{tmp_path}/a.tar:team/tool:1"]
    subprocess.run(command, check=True)
    async with opened(tmp_path) as puller:
        for name in ("", ":team/tool:1"):
            image = await puller.take(f"docker-archive:{tmp_path}/a.tar{name}")
            assert content(puller, image.layers) == [["etc"], ["etc", "top"]]


async def test_a_directory_is_an_image(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "bin").mkdir(parents=True)
    (root / "bin/tool").write_text("x")
    async with opened(tmp_path) as puller:
        image = await puller.take(f"dir:{root}")
        assert content(puller, image.layers) == [["bin"]]
    (root / "new").touch()
    async with opened(tmp_path) as puller:
        image = await puller.take(f"dir:{root}")
        assert content(puller, image.layers) == [["bin", "new"]]


@pytest.mark.docker
async def test_an_image_of_an_engine_is_exported(tmp_path: Path, engine: str) -> None:
    async with opened(tmp_path) as puller:
        image = await puller.take(f"docker-daemon:{BUSYBOX}")
        assert "bin" in content(puller, image.layers)[-1]
        with pytest.raises(ConfigError, match="the engine answered"):
            await puller.take("docker-daemon:skyenv-test/none:1")


@pytest.mark.parametrize("name", ["dir:/root", "oci:/etc", "dir:{}/link"])
async def test_files_of_the_machine_are_not_for_every_client(tmp_path: Path, name: str) -> None:
    (tmp_path / "link").symlink_to("/root")
    async with opened(tmp_path) as puller:
        with pytest.raises(ConfigError, match="below these directories only"):
            await puller.take(name.format(tmp_path))


async def test_a_full_disk_refuses_and_unused_images_go_first(small_disk: Path) -> None:
    """At 85 % what nobody uses goes, oldest first; at 95 % nothing new starts."""
    for index in range(3):
        Built([layer(member(f"f{index}", os.urandom(8 << 20)))], "plain").write_layout(
            small_disk / "layouts" / str(index)
        )
    async with opened(small_disk) as puller:
        used = await puller.take(f"oci:{small_disk}/layouts/0")
        puller.store.release(await puller.take(f"oci:{small_disk}/layouts/1"))
        (small_disk / "ballast").write_bytes(bytes(17 << 20))
        await puller.check_space()
        assert puller.ready() == [used.reference]
        (small_disk / "more").write_bytes(bytes(13 << 20))
        with pytest.raises(SandboxUnavailable) as caught:
            await puller.check_space()
        assert caught.value.reason == "disk_full"
        assert content(puller, used.layers) == [["f0"]]
        (small_disk / "more").unlink()
        await puller.check_space()


async def test_two_processes_share_a_store(tmp_path: Path) -> None:
    """What one holds the other does not collect."""
    Built([UPPER]).write_layout(tmp_path / "layout")
    async with opened(tmp_path) as first, opened(tmp_path) as second:
        image = await first.take(f"oci:{tmp_path}/layout")
        assert second.store.collect(0.0) == []
        assert content(second, image.layers) == [["etc", "top"]]
        first.store.release(image)
        assert second.store.collect(0.0) == [image.reference]
        assert not os.listdir(second.store.layers)
        again = await first.take(f"oci:{tmp_path}/layout")
        assert content(first, again.layers) == [["etc", "top"]]
