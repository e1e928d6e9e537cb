"""Node servers for all tests of this folder, on a portal, so that each is started once."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from skyenv.core import SandboxProvider
from skyenv.portal import Portal
from skyenv.remote.client import connect
from tests.remote import images, registries
from tests.remote.node_processes import SERVE_OCI, served

RUN = """\
import importlib.util
if importlib.util.find_spec("cases") is not None:
    import cases
    for name, test in cases.CASES.items():
        print("--- %s: %s (0.00s)" % ("PASS" if test() else "FAIL", name))
    raise SystemExit(not all(test() for test in cases.CASES.values()))
"""


def calculator_layer(folder: Path) -> bytes:
    """A layer with `/calc`, a git repository whose history goes beyond the commit that is checked out."""
    repository = folder / "calc"
    repository.mkdir(parents=True)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]

    def run(*arguments: str) -> None:
        subprocess.run([*git, *arguments], cwd=repository, check=True, capture_output=True)

    run("init", "-q")
    (repository / "run.py").write_text(RUN)
    for message, sign in (("base", "-"), ("the fix", "+")):
        (repository / "calc.py").write_text(f"def add(a, b):\n    return a {sign} b\n" + "\n" * (sign == "+"))
        run("add", "-A")
        run("commit", "-qm", message)
    run("tag", "v2")
    run("checkout", "-q", "HEAD~1")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as layer:
        layer.add(repository, "calc")
    return buffer.getvalue()


OCI = pytest.param("oci", marks=pytest.mark.oci)


class Sandboxes:
    """Runs coroutine functions that take the shared provider; `image` holds the repository of `calculator_layer`."""

    def __init__(self, portal: Portal, provider: SandboxProvider, image: str = "") -> None:
        self._portal = portal
        self.provider = provider
        self.image = image

    def run(self, function: Callable[[SandboxProvider], Coroutine[Any, Any, Any]]) -> Any:
        actor = self._portal.actor()
        try:
            return actor.call(lambda: function(self.provider))
        finally:
            actor.close()


@pytest.fixture(scope="session")
def sandboxes() -> Iterator[Sandboxes]:
    with Portal() as portal, portal.enter(connect()) as provider:
        yield Sandboxes(portal, provider)


@pytest.fixture(scope="session")
def containers() -> Iterator[Sandboxes]:
    """Sandboxes that are OCI containers of a small image with Python and git, on a node of its own."""
    with tempfile.TemporaryDirectory(prefix="layouts-") as folder, Portal() as portal:
        top = Path(folder)
        top.chmod(0o755)
        images.write_debian(top / "root.tar")
        root = (top / "root.tar").read_bytes()
        registries.Built([root], "plain").write_layout(top / "debian")
        registries.Built([root, calculator_layer(top / "build")], "plain").write_layout(top / "calc")
        options = {"image": f"oci:{top}/debian", "root": f"{top}/store", "paths": [str(top)]}
        with served(SERVE_OCI, json.dumps(options)) as (_, url), portal.enter(connect(url, "secret")) as provider:
            yield Sandboxes(portal, provider, f"oci:{top}/calc")


@pytest.fixture(scope="session", params=["local", OCI])
def everywhere(request: pytest.FixtureRequest) -> Sandboxes:
    """Each kind of sandbox that verdicts must not depend on; another backend is one more parameter."""
    found: Sandboxes = request.getfixturevalue({"local": "sandboxes", "oci": "containers"}[request.param])
    return found
