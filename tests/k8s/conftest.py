"""Any cluster that KUBECONFIG names. Its kubelets need the images that the tests use:

* where SKYENV_K8S_ENGINE names the Docker engine that the kubelet uses, they are made here and imported there;
* elsewhere build and push them (docs/kubernetes.md) and set SKYENV_K8S_IMAGES to what their names start with.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "remote"))

import images
import node_image
from clusters import TestCluster, kubectl

NAMES = ("debian", "busybox", "node")
NO_CLUSTER = """no Kubernetes cluster: KUBECONFIG is not set.
`make test` starts one of its own where ../shared/k8s has one; or set KUBECONFIG (any cluster that holds the tests'
images, see tests/k8s/conftest.py); or leave these tests out: pytest -m "not k8s"."""


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> TestCluster:
    if "KUBECONFIG" not in os.environ:
        pytest.fail(NO_CLUSTER, pytrace=False)
    engine = os.environ.get("SKYENV_K8S_ENGINE")
    if engine is None:
        return TestCluster(os.environ.get("SKYENV_K8S_IMAGES", "skyenv-test/"), "IfNotPresent")
    found = TestCluster("skyenv-test/", "Never")
    writers: dict[str, Callable[[Path], None]] = {
        "debian": images.write_debian, "busybox": images.write_busybox, "node": node_image.write_node,
    }  # fmt: skip
    docker = ["docker", "--host", engine]
    for name in NAMES:
        known = subprocess.run([*docker, "image", "inspect", found.image(name)], capture_output=True, check=False)
        if known.returncode or name == "node":  # which holds the code that is tested
            tar = tmp_path_factory.mktemp(name) / "root.tar"
            writers[name](tar)
            changes = [f"--change=ENV {name}" for name in node_image.ENVIRONMENT] if name == "node" else []
            subprocess.run([*docker, "import", *changes, tar, found.image(name)], check=True, capture_output=True)
            tar.unlink()
    return found


@pytest.fixture
def namespace(cluster: TestCluster) -> Iterator[str]:
    """A namespace of the test's own, gone afterwards with all that is in it."""
    name = f"skyenv-test-{secrets.token_hex(4)}"
    kubectl("create", "namespace", name)
    try:
        yield name
    finally:
        kubectl("delete", "namespace", name, "--wait=false")
