"""Sandboxes and nodes that end in every way: nothing is left, nobody else is hurt, and whoever waits is told."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import anyio
import httpx
import pytest
from node_processes import SERVE, served

from skyenv.errors import ConfigError, SandboxLost, SandboxUnavailable
from skyenv.remote.backends import launching
from skyenv.remote.client import SandboxClient, connect
from skyenv.remote.inside.processes import scan
from skyenv.remote.sending import Sender


def children(pid: int) -> list[int]:
    """Direct children of a process."""
    return [child for child, process in scan().items() if process.ppid == pid]


def alive(pids: list[int]) -> list[str]:
    """Those that still run; a zombie that waits for the machine's first process does not."""
    return [f"process {pid}" for pid in pids if pid in scan()]


def launcher_of(node: int) -> int:
    (launcher,) = children(node)
    return launcher


def names_in(state: Path) -> list[str]:
    """What the node calls its sandboxes: directories and control groups have these names."""
    return [path.name for path in state.iterdir() if len(path.name) == 32]


def remains(state: Path, names: list[str], pids: list[int]) -> list[str]:
    """What is left of a node: processes, its state directory, control groups of its sandboxes, mounts."""
    left = alive(pids)
    left += [str(state)] if state.exists() else []
    groups = [folder for folder, _below, _files in os.walk("/sys/fs/cgroup")]
    left += [group for group in groups if any(name in group for name in names)]
    left += [line for line in Path("/proc/mounts").read_text().splitlines() if str(state) in line]
    return left


async def eventually(nothing_of: Callable[[], list[str]], within: float = 100.0) -> None:
    """Wait until `nothing_of` is empty; the failure shows what was left."""
    deadline = time.monotonic() + within
    while (left := nothing_of()) and time.monotonic() < deadline:
        await anyio.sleep(0.02)
    assert not left


def state_of(launcher: int) -> Path:
    """The state directory of a launcher, by the lock that it holds."""
    links = []
    for path in Path(f"/proc/{launcher}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            links.append(os.readlink(path))
    (lock,) = [link for link in links if link.endswith("/lock")]
    return Path(lock).parent


@pytest.mark.parametrize(
    ("backend", "number", "status"),
    [
        ("local", signal.SIGINT, 0),
        ("local", signal.SIGTERM, 0),
        ("local", signal.SIGKILL, -9),
        ("process", signal.SIGINT, 0),
        ("process", signal.SIGKILL, -9),
    ],
)
async def test_a_node_leaves_nothing_behind(backend: str, number: signal.Signals, status: int) -> None:
    with served(SERVE, backend) as (process, url):
        async with connect(url, "secret", patience=1) as client:
            async with client.sandbox() as first, client.sandbox() as second:
                await first.exec("sleep 600 & setsid sleep 600 & touch /big; yes > /dev/null &")
                async with anyio.create_task_group() as group:
                    group.start_soon(expect_lost_or_unavailable, second)
                    launcher = launcher_of(process.pid)
                    state = state_of(launcher)
                    names = names_in(state)
                    assert len(names) == 2
                    with anyio.fail_after(100):  # two shells with what they are told to start, in the first all of it
                        while len(pids := [launcher, *tree([launcher])]) <= 8:
                            await anyio.sleep(0.02)
                    assert remains(state, names, pids)
                    process.send_signal(number)
                    assert await anyio.to_thread.run_sync(process.wait) == status
                await eventually(lambda: remains(state, names, pids))


async def expect_lost_or_unavailable(box: object) -> None:
    with pytest.raises((SandboxLost, SandboxUnavailable)):
        await box.exec("sleep 600", timeout=600)  # type: ignore[attr-defined]


def tree(pids: list[int]) -> list[int]:
    found = []
    for pid in pids:
        below = children(pid)
        found += below + tree(below)
    return found


async def test_a_launcher_that_is_killed_takes_its_sandboxes_along() -> None:
    with served(SERVE, "local") as (process, url):
        async with connect(url, "secret") as client, client.sandbox() as box:
            await box.exec("sleep 600 &")
            launcher = launcher_of(process.pid)
            state, pids = state_of(launcher), [launcher, *children(launcher), *tree(children(launcher))]
            names = names_in(state)
            os.kill(launcher, signal.SIGKILL)
            with pytest.raises(SandboxLost):
                await box.exec("sleep 20")
            with pytest.raises(SandboxUnavailable, match="launcher"):
                async with client.sandbox():
                    pass
            await eventually(lambda: alive(pids))
    await eventually(lambda: remains(state, names, pids))


async def test_the_next_node_sweeps_what_a_killed_launcher_left(local_url: str) -> None:
    async with connect(local_url, "secret") as client, client.sandbox() as bystander:
        with served(SERVE, "local") as (process, url):
            async with connect(url, "secret") as other, other.sandbox():
                launcher = launcher_of(process.pid)
                state, pids = state_of(launcher), [launcher, *children(launcher)]
                names = names_in(state)
                os.kill(process.pid, signal.SIGSTOP)
                os.kill(launcher, signal.SIGKILL)
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
                await eventually(lambda: alive(pids))
                assert len(remains(state, names, pids)) > 1
                while state.exists():  # the first sweep may come while something still ends
                    with served(SERVE, "local"):
                        pass
                await eventually(lambda: remains(state, names, pids))
        assert (await bystander.exec("echo alive")).output == "alive\n"


def test_a_live_state_directory_is_not_swept(tmp_path: Path) -> None:
    starting = launching.make_state(tmp_path, None)
    state = launching.make_state(tmp_path, None)
    with (state / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        launching.sweep(tmp_path)
        assert state.exists()
    launching.sweep(tmp_path)
    assert not state.exists()
    assert starting.exists()


async def test_a_killed_init_is_a_lost_sandbox_and_nobody_elses() -> None:
    with served(SERVE, "local") as (process, url):
        async with connect(url, "secret") as client:
            async with client.sandbox() as box, client.sandbox() as other:
                init = children(launcher_of(process.pid))[0]
                os.kill(init, signal.SIGKILL)
                outcomes = []
                for each in (box, other):
                    try:
                        outcomes.append((await each.exec("echo alive")).output)
                    except SandboxLost as error:
                        outcomes.append("lost" if "first process ended" in str(error) else str(error))
                assert sorted(outcomes) == ["alive\n", "lost"]
            assert (await client.health())["sandboxes"] == 0


async def test_an_abandoned_sandbox_ends_with_its_lease(local_url: str) -> None:
    async with httpx.AsyncClient(base_url=local_url, headers={"authorization": "Bearer secret"}, timeout=100) as http:
        name = "a" * 31 + "1"
        body = '{"spec": {"ttl": 1.0}}'
        assert (await http.put(f"/sandboxes/{name}", content=body)).status_code == 200
        assert (await http.post(f"/sandboxes/{name}/exec", content="true")).status_code == 400
        held = await http.post(f"/sandboxes/{name}/exec", content="sleep 1.6", headers={"idempotency-key": "k"})
        assert held.status_code == 200
        with anyio.fail_after(100):
            while True:
                lost = (await http.post("/leases", content="[]")).status_code == 200
                answer = await http.get(f"/sandboxes/{name}/calls/k") if lost else None
                if answer is not None and answer.status_code == 410:
                    break
                await anyio.sleep(1.3)
        assert "lease" in answer.json()["message"]


async def test_a_held_lease_is_renewed(local_url: str) -> None:
    async with connect(local_url, "secret") as client, client.sandbox(ttl=3) as box:
        await anyio.sleep(6.0)
        assert (await box.exec("echo alive")).output == "alive\n"


async def test_creating_twice_under_one_name_makes_one_sandbox(local_url: str) -> None:
    headers = {"authorization": "Bearer secret", "idempotency-key": "c"}
    name = "b" * 32
    async with httpx.AsyncClient(base_url=local_url, headers=headers, timeout=100) as http:
        statuses: list[int] = []

        async def made() -> int:
            listed = (await http.get("/sandboxes")).json()["sandboxes"]
            return [line["name"] for line in listed].count(name)

        async def create() -> None:
            statuses.append((await http.put(f"/sandboxes/{name}", content="{}")).status_code)

        async with anyio.create_task_group() as group:
            for _copy in range(3):
                group.start_soon(create)
        assert statuses == [200] * 3
        assert await made() == 1
        for _again in range(2):
            assert (await http.delete(f"/sandboxes/{name}")).status_code == 200
        assert await made() == 0
        assert (await http.put(f"/sandboxes/{name}", content="{}")).status_code in (200, 410)


async def test_many_at_once() -> None:
    async with connect() as client:

        async def one(number: int) -> None:
            async with client.sandbox() as box:
                result = await box.exec(f"echo {number} > n; cat n")
                assert result.output == f"{number}\n"

        async with anyio.create_task_group() as group:
            for number in range(24):
                group.start_soon(one, number)
        assert (await client.health())["sandboxes"] == 0


async def test_cycles_leak_no_descriptor() -> None:
    async with connect() as client:
        counts = []
        for _round in range(3):
            for _cycle in range(5):
                async with client.sandbox() as box:
                    await box.exec("sleep 60 & exit 3")
                    await box.download("/etc/skel")
                    async with box.fork(drop=True) as twin:
                        await twin.write_file("/root/x", b"x" * 2_000_000)
                        await twin.read_file("/root/x")
            gc.collect()  # what earlier tests left to the collector
            counts.append(len(os.listdir("/proc/self/fd")))
        assert counts[-1] <= counts[0]


async def test_a_cancelled_creation_leaves_nothing() -> None:
    async with connect() as client:

        async def hold() -> None:
            async with client.sandbox():
                await anyio.sleep(60)

        for delay in (0.0, 0.005, 0.02):
            async with anyio.create_task_group() as group:
                group.start_soon(hold)
                await anyio.sleep(delay)
                group.cancel_scope.cancel()
        with anyio.fail_after(100):
            while (await client.health())["sandboxes"]:
                await anyio.sleep(0.02)


async def test_an_error_in_the_block_comes_out_as_itself() -> None:
    with pytest.raises(ZeroDivisionError):
        async with connect() as client, client.sandbox():
            raise ZeroDivisionError


async def test_deleting_a_busy_sandbox_is_quick(local_url: str) -> None:
    async with connect(local_url, "secret") as client:
        async with client.sandbox() as box:
            await box.exec("for i in 1 2 3; do yes >/dev/null & done; trap '' TERM INT; mkdir -p /d/{1..50}/{1..20}")
            started = time.monotonic()
        assert time.monotonic() - started < 20.0  # not as long as anybody would wait for what ends by itself


async def test_tokens(local_url: str) -> None:
    for token in (None, "wrong"):
        async with connect(local_url, token) as client:
            with pytest.raises(ConfigError, match="token"):
                await client.health()


async def test_an_unreachable_node_is_unavailable() -> None:
    async with connect("http://127.0.0.1:9") as client:
        with pytest.raises(SandboxUnavailable, match=r"127\.0\.0\.1:9"):
            await client.health()


async def test_not_a_url() -> None:
    with pytest.raises(ConfigError, match="http"):
        async with connect("127.0.0.1:8765"):
            pass


async def test_a_full_node_says_when_to_come_back(local_url: str) -> None:
    from skyenv.remote.admission import Admission
    from skyenv.remote.backends import get
    from skyenv.remote.node import app_for
    from skyenv.remote.sandboxes import Node

    node = Node(get("local"), admission=Admission(slots=1))
    async with node.open():
        transport = httpx.ASGITransport(app_for(node))
        async with httpx.AsyncClient(transport=transport, base_url="http://node") as http:
            for name, status in (("c" * 32, 200), ("d" * 32, 429)):
                answer = await http.put(f"/sandboxes/{name}?queue=0", content="{}", headers={"idempotency-key": name})
                assert answer.status_code == status
            assert float(answer.headers["retry-after"]) > 0
            client = SandboxClient(Sender(transport, "http://node", {}))

            async def free() -> None:
                await anyio.sleep(0.3)
                await http.delete(f"/sandboxes/{'c' * 32}")

            async with anyio.create_task_group() as group:
                group.start_soon(free)
                async with client.sandbox() as box:
                    assert (await box.exec("echo in")).output == "in\n"
