"""Real node servers for the tests: one process for each kind and session, reached over a socket."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import images
import pytest
import registries
from images import BUSYBOX, DEBIAN
from node_processes import SERVE, SERVE_DOCKER, SERVE_OCI, SERVE_ROOTLESS, served

DOCKER = pytest.param("docker", marks=pytest.mark.docker)
OCI = pytest.param("oci", marks=pytest.mark.oci)
NO_ENGINE = """no container engine answers at DOCKER_HOST ({host}).
`make test` starts one of its own where dockerd and catatonit are installed (Debian: docker.io runc catatonit);
or start yours and set DOCKER_HOST; or leave these tests out: pytest -m "not docker"."""


@pytest.fixture(scope="session")
def local_url() -> Iterator[str]:
    with served(SERVE, "local") as (_process, url):
        yield url


@pytest.fixture(scope="session")
def rootless_url() -> Iterator[str]:
    with served(SERVE_ROOTLESS) as (_process, url):
        yield url


@pytest.fixture(scope="session")
def process_url() -> Iterator[str]:
    with served(SERVE, "process") as (_process, url):
        yield url


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The engine's DOCKER_HOST, with the images that the tests use. Fails, saying what to do, when there is none."""
    host = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    import docker

    try:
        api = docker.APIClient(**docker.utils.kwargs_from_env(), timeout=60)
        known = {tag for image in api.images() for tag in image["RepoTags"] or ()}
    except docker.errors.DockerException as error:
        pytest.fail(f"{NO_ENGINE.format(host=host)}\n{error}", pytrace=False)
    writers: dict[str, Callable[[Path], None]] = {DEBIAN: images.write_debian, BUSYBOX: images.write_busybox}
    for reference in writers.keys() - known:
        tar = tmp_path_factory.mktemp("images") / "root.tar"
        writers[reference](tar)
        repository, tag = reference.split(":")
        answer = json.loads(api.import_image_from_file(str(tar), repository=repository, tag=tag).splitlines()[-1])
        assert "error" not in answer, answer
        tar.unlink()
    api.close()
    return host


@pytest.fixture(scope="session")
def docker_url(engine: str) -> Iterator[str]:
    with served(SERVE_DOCKER, DEBIAN) as (_process, url):
        yield url


@pytest.fixture(scope="session", params=["local", OCI, DOCKER])
def url(request: pytest.FixtureRequest) -> str:
    """A node of each backend that has sandboxes of its own, reached over a socket."""
    found: str = request.getfixturevalue(f"{request.param}_url")
    return found


@pytest.fixture(scope="session")
def layouts() -> Iterator[Path]:
    """OCI layouts `debian` and `busybox` in a directory that every user may read."""
    writers = {"debian": images.write_debian, "busybox": images.write_busybox}
    with tempfile.TemporaryDirectory(prefix="layouts-") as folder:
        top = Path(folder)
        top.chmod(0o755)
        for name, write in writers.items():
            tar = top / "root.tar"
            write(tar)
            registries.Built([tar.read_bytes()], "plain").write_layout(top / name)
            tar.unlink()
        yield top


@pytest.fixture(scope="session")
def oci_url(layouts: Path) -> Iterator[str]:
    options = {"image": f"oci:{layouts}/debian", "root": f"{layouts}/store", "paths": [str(layouts)]}
    with served(SERVE_OCI, json.dumps(options)) as (_process, url):
        yield url


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "skyenv-test", str(tmp_path)], check=True)
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)
