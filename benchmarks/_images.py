"""The image that container substrates share: this machine's shell, tools and Python, as the tests build it."""

from __future__ import annotations

import importlib.util
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAME = "skyenv-benchmark:latest"
SOURCE = Path(__file__).parent.parent / "tests" / "remote" / "images.py"


def write_root(out: Path) -> None:
    """A tar of a root file system with bash, git and Python."""
    spec = importlib.util.spec_from_file_location("images", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    images = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(images)
    images.write_debian(out)


@contextmanager
def debian_folder() -> Iterator[Path]:
    """The same root file system as a directory."""
    with tempfile.TemporaryDirectory(prefix="skyenv-bench-image-") as folder:
        tar, root = Path(folder, "root.tar"), Path(folder, "root")
        write_root(tar)
        root.mkdir()
        with tarfile.open(tar) as archive:
            archive.extractall(root, filter="fully_trusted")
        tar.unlink()
        yield root


def debian_in_docker() -> str:
    """Import it into the engine at DOCKER_HOST, unless it is there; its name."""
    import docker
    from docker.errors import ImageNotFound

    engine = docker.from_env(timeout=120)
    try:
        engine.images.get(NAME)
    except ImageNotFound:
        with tempfile.TemporaryDirectory() as folder:
            tar = Path(folder, "root.tar")
            write_root(tar)
            repository, _colon, tag = NAME.partition(":")
            engine.api.import_image_from_file(str(tar), repository=repository, tag=tag)
    finally:
        engine.close()
    return NAME
