"""The init for containers that nobody can enter: built here, run in roots without Python, reached by one stream."""

from __future__ import annotations

import hashlib
import subprocess
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest
from images import write_busybox, write_debian
from keepers import KEY, KeeperBackend, Pod, client_of, keeper

from skyenv.errors import SandboxLost, SandboxUnavailable
from skyenv.remote import portable
from skyenv.remote.link import Link
from skyenv.remote.tasks import background_tasks
from skyenv.testing import check_sandbox


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Root file systems with the portable directory in them: one like Debian, one of a single static binary."""
    top = tmp_path_factory.mktemp("roots")
    found = {}
    for name, write in (("debian", write_debian), ("busybox", write_busybox)):
        write(top / f"{name}.tar")
        with tarfile.open(top / f"{name}.tar") as tar:
            tar.extractall(top / name, filter="tar")
        portable.build(top / name / portable.HOME[1:])
        found[name] = top / name
    return found


def digest(top: Path) -> dict[str, str]:
    return {
        str(path.relative_to(top)): f"{path.stat().st_mode:o} {hashlib.sha256(path.read_bytes()).hexdigest()}"
        for path in sorted(top.rglob("*"))
        if path.is_file()
    }


def test_two_builds_are_the_same_and_small(tmp_path: Path) -> None:
    portable.build(tmp_path / "one")
    portable.build(tmp_path / "elsewhere")
    assert digest(tmp_path / "one") == digest(tmp_path / "elsewhere")
    assert portable.size(tmp_path / "one") < 24 << 20


def test_it_runs_where_there_is_nothing_else(tmp_path: Path) -> None:
    """No C library, no shell, no /proc: an image from scratch."""
    portable.build(tmp_path / portable.HOME[1:])
    code = "import sys; sys.path.insert(0, '/.skyenv/code'); import inside.keeper, inside.tree; print(sys.executable)"
    answer = subprocess.run(["chroot", tmp_path, *portable.python(), "-c", code], capture_output=True, check=False)
    assert answer.stdout == b"/.skyenv/bin/python3\n", answer.stderr


async def test_sandboxes_over_a_stream_keep_the_contract(roots: dict[str, Path], tmp_path: Path) -> None:
    async with client_of(KeeperBackend(roots["debian"], tmp_path)) as client:
        await check_sandbox(client, isolated=False)


async def test_an_image_without_python_bash_or_c_library(roots: dict[str, Path], tmp_path: Path) -> None:
    async with client_of(KeeperBackend(roots["busybox"], tmp_path)) as client, client.sandbox() as box:
        result = await box.exec("echo $OF_IMAGE$SKYENV_X; ls /usr/lib /lib; command -v python3")
        assert result.output == "yes\nls: /usr/lib: No such file or directory\nls: /lib: No such file or directory\n"
        await box.write_file("/root/big", bytes(range(256)) * 20_000)
        assert await box.read_file("/root/big") == bytes(range(256)) * 20_000


async def test_a_broken_stream_loses_and_repeats_nothing(roots: dict[str, Path], tmp_path: Path) -> None:
    backend = KeeperBackend(roots["debian"], tmp_path)
    async with client_of(backend) as client, client.sandbox() as box:
        (pod,) = backend.pods.values()
        for number in range(3):
            async with anyio.create_task_group() as group:

                async def command(number: int = number) -> None:
                    result = await box.exec(f"echo {number} >> ran; sleep 0.5; seq 1 20000")
                    assert result.output.endswith("\n20000\n")

                group.start_soon(command)
                await anyio.sleep(0.2)
                await pod.cut()
            async with anyio.create_task_group() as group:
                data = bytes([number]) * (6 << 20)
                group.start_soon(box.write_file, "/root/big", data)
                await anyio.sleep(0.05)
                await pod.cut()
            assert await box.read_file("/root/big") == data
        assert (await box.exec("cat ran")).output == "0\n1\n2\n"
        assert pod.relays > 3


async def test_everything_inside_may_be_killed(roots: dict[str, Path], tmp_path: Path) -> None:
    """Also the relay: it is an ordinary process of the container."""
    backend = KeeperBackend(roots["debian"], tmp_path)
    async with client_of(backend) as client, client.sandbox() as box:
        await box.exec("kill -9 -1", timeout=60.0)
        assert (await box.exec("echo alive", timeout=60.0)).output == "alive\n"


async def test_nobody_inside_can_listen_or_pretend(roots: dict[str, Path], tmp_path: Path) -> None:
    backend = KeeperBackend(roots["debian"], tmp_path)
    async with client_of(backend) as client, client.sandbox() as box:
        spy = (
            "for p in /proc/[0-9]*; do grep -qs skyenv $p/comm && cat $p/environ $p/maps; done 2>/dev/null; "
            "python3 -c \"import socket; s=socket.socket(socket.AF_UNIX); s.connect(chr(0)+'skyenv-init'); "
            's.send(bytes([1,0,0,0,0,0,0,0,64])+bytes(64)); print(s.recv(100))"'
        )
        result = await box.exec(spy, timeout=60.0)
        assert result.output == "b''\n"
        assert (await box.exec("echo alive")).output == "alive\n"


async def test_everything_but_the_init_can_be_stopped(roots: dict[str, Path], tmp_path: Path) -> None:
    backend = KeeperBackend(roots["debian"], tmp_path)
    async with client_of(backend) as client, client.sandbox() as box:
        await box.exec("(while :; do date +%s%N > /tick; sleep 0.01; done) & until [ -s /tick ]; do sleep 0.01; done")
        (sandbox,) = backend.pods
        for _twice in range(2):
            await backend.freeze(sandbox)
            root = Path(f"/proc/{backend.pods[sandbox].pid}/root/tick")
            before = root.read_text()
            await anyio.sleep(0.2)
            assert root.read_text() == before
            await backend.thaw(sandbox)
            await backend.thaw(sandbox)
        moved = f"[ -s /tick ] && [ \"$(cat /tick)\" != '{before.strip()}' ]"
        assert (await box.exec(f"until {moved}; do sleep 0.05; done", timeout=60.0)).exit_code == 0


@pytest.fixture
async def lonely(roots: dict[str, Path], tmp_path: Path) -> AsyncIterator[Pod]:
    with keeper(roots["debian"], tmp_path, patience=1.0) as pod:
        yield pod


async def test_a_pod_that_nobody_comes_to_ends(lonely: Pod) -> None:
    with anyio.fail_after(100):
        await anyio.to_thread.run_sync(lonely.process.wait)


async def test_a_node_needs_the_key_and_the_last_one_has_the_line(roots: dict[str, Path], tmp_path: Path) -> None:
    with keeper(roots["debian"], tmp_path) as pod:
        async with background_tasks() as group:
            first, stranger, second = (Link(pod.line(key)) for key in (KEY, b"x" * 32, KEY))
            group.start_soon(first.run)
            await first.meet(100.0)
            group.start_soon(stranger.run)
            with pytest.raises(SandboxUnavailable):
                await stranger.meet(1.0)
            stranger.close("enough")
            assert (await first.ask("environ"))["env"]["OF_IMAGE"] == "yes"
            first.close("this node is gone")
            group.start_soon(second.run)
            await second.meet(100.0)
            await second.ask("end")
            with anyio.fail_after(100):
                await anyio.to_thread.run_sync(pod.process.wait)
            with pytest.raises(SandboxLost):
                await second.ask("stats")
