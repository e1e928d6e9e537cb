"""E: sandboxes that start badly, die early, are forgotten or deleted: nobody waits for them and nothing is left."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import httpx
import pytest

from catalogue.sessions import PATIENCE, Run, let_go, raw_sandbox, run_all
from catalogue.test_c_processes import host_processes
from skyenv.errors import SandboxLost
from skyenv.remote.client import connect

# A trainer: opens a sandbox with a short lease, leaves something running in it, and is killed.
TRAINER = """
import sys, anyio
from skyenv.remote.client import connect
async def main():
    async with connect(sys.argv[1], "secret") as client, client.sandbox(ttl=4) as box:
        await box.exec(f"exec -a {sys.argv[2]} sleep 600 &")
        print("ready", flush=True)
        await anyio.sleep(600)
anyio.run(main)
"""


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def init_above(pid: int) -> int:
    """The init of the sandbox that a process of this machine belongs to."""
    while Path(f"/proc/{pid}/comm").read_text() != "skyenv-init\n":
        pid = parent(pid)
    return pid


async def first_process(mark: str) -> int:
    """A process of this machine that a sandbox has just started under this name."""
    with anyio.fail_after(100):
        while not (found := host_processes(mark)):
            await anyio.sleep(0.02)
    return found[0]


async def test_e2_a_killed_client_leaves_nothing_after_its_lease(url: str) -> None:
    mark = f"sleeper-{secrets.token_hex(8)}"
    with subprocess.Popen([sys.executable, "-c", TRAINER, url, mark], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "ready\n"
        with anyio.fail_after(100):
            while len(host_processes(mark)) < 2:  # the trainer's own arguments, and the sleeper
                await anyio.sleep(0.02)
        trainer.kill()
    with anyio.fail_after(100):
        while host_processes(mark):
            await anyio.sleep(0.1)


async def test_e4_a_killed_first_process_is_told(url: str) -> None:
    mark = f"sleeper-{secrets.token_hex(8)}"
    async with connect(url, "secret") as client, client.sandbox() as box:
        await box.exec(f"exec -a {mark} sleep 600 &")
        sleeper = await first_process(mark)
        os.kill(init_above(sleeper), signal.SIGKILL)
        with pytest.raises(SandboxLost):
            await box.exec("echo alive")
        with anyio.fail_after(100):  # the kernel ends the rest of the namespace behind its first process
            while sleeper in host_processes(mark):
                await anyio.sleep(0.02)


async def test_e5_a_running_command_outlives_its_client(url: str) -> None:
    """Whoever has the key finds it again, from another connection, running or over, as often as they ask."""
    async with raw_sandbox(url) as (http, path):
        async with httpx.AsyncClient(base_url=url, headers=http.headers, timeout=100) as first:
            command, key = (
                "echo x >> log; until [ -e /tmp/go ]; do sleep 0.05; done; cat log",
                {"idempotency-key": "kept"},
            )
            assert (await first.post(f"{path}/exec?wait=0.1", content=command, headers=key)).status_code == 202
        await let_go(http, path)
        for _again in range(2):
            answer = await http.get(f"{path}/calls/kept?wait={PATIENCE}")
            while answer.status_code == 202:
                answer = await http.get(f"{path}/calls/kept?wait={PATIENCE}")
            assert (answer.status_code, answer.content) == (200, b"x\n")


async def test_e9_cycles_leave_no_zombies_and_no_namespaces(url: str, request: pytest.FixtureRequest) -> None:
    """A zombie would keep its namespaces, of which a machine has only so many."""
    cycles = 5 if request.node.callspec.params["url"] == "docker" else 40
    mark = f"m{secrets.token_hex(6)}"
    async with connect(url, "secret") as client:
        async with client.sandbox() as box:
            await box.exec(f"exec -a {mark} sleep 600 &")
            launcher = parent(init_above(await first_process(mark)))
        for _cycle in range(cycles):
            async with client.sandbox() as box:
                await box.exec("(setsid sleep 600 &); exit 1")
        with anyio.fail_after(100):
            while zombies(launcher):
                await anyio.sleep(0.05)


def zombies(launcher: int) -> list[str]:
    """Children of a launcher that are dead and were not buried."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] == "Z" and int(fields[1]) == launcher:
                found.append(entry.name)
    return found


AS_BEFORE = "until ps -e > now; [ $(wc -l < now) = $(wc -l < before) ]; do :; done"  # zombies count
ROWS: dict[str, list[Run]] = {
    "E10 orphans are reaped": [
        Run("ps -e > before; for i in $(seq 50); do (sh -c 'true &' &); done"),
        Run(AS_BEFORE),
        Run("python3 -c 'import os; os.fork() or os._exit(0); os.fork() or os._exit(0)' & wait"),
        Run(AS_BEFORE),
    ],
}


@pytest.mark.parametrize("row", ROWS)
async def test_session_survives(url: str, row: str) -> None:
    await run_all(url, ROWS[row])


async def test_e12_many_stubborn_sandboxes_are_deleted_at_once(url: str) -> None:
    count, mark = 12, f"m{secrets.token_hex(6)}"
    stubborn = f"trap '' TERM INT HUP; sh -c 'trap \"\" TERM INT HUP; sleep 600; : {mark}' & sleep 600 &"
    release, ready, gone = anyio.Event(), anyio.Semaphore(0), anyio.Semaphore(0)
    async with connect(url, "secret") as client:

        async def hold() -> None:
            async with client.sandbox() as box:
                await box.exec(stubborn)
                ready.release()
                await release.wait()
            gone.release()

        async with anyio.create_task_group() as group:
            for _number in range(count):
                group.start_soon(hold)
            for _number in range(count):
                await ready.acquire()
            with anyio.fail_after(100):
                while len(host_processes(mark)) != count:  # a shell that forks has its twin's arguments for a moment
                    await anyio.sleep(0.01)
            release.set()
            with anyio.fail_after(100):
                for _number in range(count):
                    await gone.acquire()
            assert not host_processes(mark)
