"""What a machine allows is tried, and what is missing is explained; on machines that allow less, made less here."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_processes import SERVE_ROOTLESS, served
from test_lifecycle import eventually

import skyenv.remote
from skyenv.remote.backends.local import probe
from skyenv.remote.client import connect
from skyenv.remote.inside import cgroups
from skyenv.testing import check_sandbox

PROBE = """
import anyio, json
from skyenv.errors import ConfigError
from skyenv.remote.backends.local import probe
from skyenv.remote.client import connect

async def refusal():
    try:
        async with connect():
            return None
    except ConfigError as error:
        return str(error)

found = probe()
print(json.dumps([found.usable, found.mode, found.reasons, anyio.run(refusal)]))
"""
OVERLAY = """
mount -t overlay overlay -o lowerdir=$0/lower,upperdir=$0/upper,workdir=$0/work $0/merged
chmod 1777 $0/merged; export SKYENV_STATE_DIR=$0/merged; exec "$@"
"""


async def test_this_machine() -> None:
    found = probe()
    assert (found.usable, found.mode, found.overlay) == (True, "root", True)
    assert set(found.limits) == {"memory", "pids", "cpu", "file_size", "disk", "freezer"}
    await eventually(lambda: [str(path) for path in found.base.glob("*-trial")])  # nodes of other tests try things too


def test_a_machine_without_namespaces_says_what_to_change() -> None:
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"'
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", forbid, "sh", sys.executable, "-c", PROBE]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    usable, mode, reasons, refusal = json.loads(result.stdout)
    assert (usable, mode) == (False, None)
    assert any("max_user_namespaces" in reason for reason in reasons)
    assert "max_user_namespaces" in refusal


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A directory that every user can reach, unlike pytest's own."""
    folder = Path(tempfile.mkdtemp(prefix="overlay-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


async def test_without_an_overlay_files_are_copied(open_folder: Path) -> None:
    """An overlay refuses to lie on an overlay, so a state directory on one leaves only plain directories."""
    for name in ("lower", "upper", "work", "merged"):
        (open_folder / name).mkdir()
    below = ["unshare", "--mount", "sh", "-c", OVERLAY, str(open_folder)]
    with served(SERVE_ROOTLESS, below=below) as (_process, url):
        async with connect(url, "secret") as client:
            health = await client.health()
            assert (health["mode"], health["overlay"]) == ("rootless", False)
            await check_sandbox(client)


def make_machine(tmp_path: Path, version: int) -> str:
    """A /proc/self and a control group file system as a machine with this version shows them."""
    proc, mount = tmp_path / "proc", tmp_path / "cgroup"
    group = mount / "user.slice/app"
    group.mkdir(parents=True)
    proc.mkdir()
    if version == 2:
        (proc / "cgroup").write_text("0::/user.slice/app\n")
        (proc / "mountinfo").write_text(f"30 1 0:26 / {mount} rw - cgroup2 cgroup2 rw\n")
        (group / "cgroup.controllers").write_text("memory pids\n")
        (group / "cgroup.subtree_control").write_text("\n")
        (mount / "user.slice/cgroup.controllers").write_text("cpu io memory pids\n")
        (mount / "user.slice/cgroup.subtree_control").write_text("memory pids cpu\n")
    else:
        (proc / "cgroup").write_text("3:cpu,cpuacct:/\n2:memory:/user.slice/app\n1:name=systemd:/x\n")
        (proc / "mountinfo").write_text(
            f"30 1 0:26 / {mount} rw - cgroup cgroup rw,memory\n31 1 0:27 / {mount} rw - cgroup cgroup rw,cpu,cpuacct\n"
        )
    return str(proc)


def test_control_groups_version_2(tmp_path: Path) -> None:
    """The own group cannot hand its controllers on, the one above can."""
    proc = make_machine(tmp_path, 2)
    (tmp_path / "cgroup/user.slice/app/cgroup.subtree_control").unlink()
    (tmp_path / "cgroup/user.slice/app/cgroup.subtree_control").mkdir()
    (hierarchy,) = cgroups.find(proc)
    assert hierarchy == (2, str(tmp_path / "cgroup/user.slice"), ("memory", "pids", "cpu", "cpuacct", "freezer"))
    group = cgroups.Group.create([hierarchy], "one", cgroups.Limits(1 << 30, 64, 1.5))
    written = {path.name: path.read_text() for path in (tmp_path / "cgroup/user.slice/one").iterdir()}
    assert written == {
        "memory.max": "1073741824",
        "memory.swap.max": "0",
        "memory.oom.group": "0",
        "pids.max": "64",
        "cpu.max": "150000 100000",
    }
    events = tmp_path / "cgroup/user.slice/one/memory.events"
    events.write_text("low 0\noom 3\noom_kill 2\n")
    counter = group.open_oom_counter()
    assert cgroups.oom_kills(counter) == 2
    assert not group.remove()


def test_control_groups_version_1(tmp_path: Path) -> None:
    found = cgroups.find(make_machine(tmp_path, 1))
    assert [tuple(hierarchy) for hierarchy in found] == [
        (1, str(tmp_path / "cgroup/user.slice/app"), ("memory",)),
        (1, str(tmp_path / "cgroup"), ("cpu", "cpuacct")),
    ]


def test_no_control_groups(tmp_path: Path) -> None:
    assert cgroups.find(str(tmp_path / "nothing")) == []
    assert cgroups.oom_kills(None) == 0


def test_a_launcher_stays_small() -> None:
    """Each sandbox carries a copy-on-write image of it."""
    folder = Path(skyenv.remote.__file__).parent
    code = "import sys; sys.path.insert(0, sys.argv[1]); from inside import launcher; print(*sys.modules)"
    command = [sys.executable, "-I", "-S", "-c", code, str(folder)]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert not {"dataclasses", "inspect", "pathlib", "subprocess", "asyncio", "logging", "argparse"} & set(loaded)
    assert "skyenv" not in loaded
