"""Gateways, nodes, clients and sandboxes are killed at random moments: no work is lost or done twice, nothing is left.

SKYENV_CHAOS_KILLS, SKYENV_CHAOS_CYCLES and SKYENV_CHAOS_SEED say how much and which; `make chaos` asks for more.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from fleet_processes import Fleet, fleet_in
from node_processes import SERVE, served
from test_lifecycle import children, eventually, launcher_of, names_in, state_of

from skyenv.errors import SandboxLost, SandboxPathError
from skyenv.remote.client import SandboxClient, connect
from skyenv.remote.protocol import SECRET
from tests.ports import free_port

KILLS = int(os.environ.get("SKYENV_CHAOS_KILLS", "8"))
CYCLES = int(os.environ.get("SKYENV_CHAOS_CYCLES", "40"))
SEED = int(os.environ.get("SKYENV_CHAOS_SEED", "0"))
CLIENTS = 3
HASTE = 0.3 if KILLS > 20 else 0.0  # how often a blow falls while the last one still hurts
TTL = 60.0 if HASTE else 20.0  # longer than any outage, or what nobody could renew would end
LATE = 60.0  # seconds that a busy machine may add to a lease
RECOVERY = 200.0
CLIENT = Path(__file__).with_name("chaos_client.py")


@dataclass
class Worker:
    """A client process and what it has told."""

    process: subprocess.Popen[bytes]
    told: Path
    last_contact: float = field(default_factory=time.monotonic)

    def lines(self, kind: str) -> list[list[str]]:
        """What came after `kind`; a last line that is not whole is left out."""
        whole = self.told.read_text().rpartition("\n")[0].splitlines()
        return [line.split()[1:] for line in whole if line.split()[0] == kind]


def start_worker(url: str, folder: Path, number: int) -> Worker:
    told = folder / f"worker{number}"
    with told.open("wb") as out:
        command = [sys.executable, str(CLIENT), url, str(SEED + number), str(TTL)]
        return Worker(subprocess.Popen(command, stdout=out), told)


async def check_abandoned(client: SandboxClient, worker: Worker) -> None:
    """All that a killed client heard of was done once; what it did not hear of at most once; the lease ends."""
    if not worker.lines("sandbox"):
        return
    ((name, secret),) = worker.lines("sandbox")
    done = len(worker.lines("done"))
    try:
        log = await client.fetch(f"/sandboxes/{name}/file", headers={SECRET: secret}, path="/root/log")
        numbers = log.content.decode().split()
    except SandboxPathError:
        numbers = []
    assert numbers in ([str(each + 1) for each in range(count)] for count in (done, done + 1)), (done, numbers)
    worker.last_contact = time.monotonic()


async def check_lease(client: SandboxClient, worker: Worker) -> None:
    for name, secret in worker.lines("sandbox"):
        while await lives(client, name, secret):
            assert time.monotonic() - worker.last_contact < TTL * 1.125 + 1 + LATE
            await anyio.sleep(0.2)


async def lives(client: SandboxClient, name: str, secret: str) -> bool:
    """Looked at without renewing its lease."""
    try:
        await client.fetch(f"/sandboxes/{name}/stats", headers={SECRET: secret})
    except SandboxLost:
        return False
    return True


class Storm:
    """The fleet, its clients, and what strikes them."""

    def __init__(self, fleet: Fleet, folder: Path) -> None:
        self.fleet = fleet
        self.folder = folder
        self.rng = random.Random(SEED)
        self.ports = {name: str(free_port()) for name in ("n1", "n2")}
        self.workers: list[Worker] = []
        self.abandoned: list[Worker] = []

    def start(self, name: str) -> None:
        if name == "gateway":
            self.fleet.gateway()
        else:
            state = str(self.folder / name)
            self.fleet.node(name, "--port", self.ports[name], "--state", state, backend="local")

    def start_worker(self) -> None:
        number = len(self.workers) + len(self.abandoned)
        self.workers.append(start_worker(self.fleet.url, self.folder, number))

    async def work_goes_on(self) -> None:
        """Every client has got something done since the last blow."""
        before = [len(worker.lines("done")) for worker in self.workers]
        with anyio.fail_after(RECOVERY):
            while any(len(each.lines("done")) <= done for each, done in zip(self.workers, before, strict=True)):
                assert all(worker.process.poll() is None for worker in self.workers)
                await anyio.sleep(0.05)

    async def strike(self, client: SandboxClient) -> None:
        if self.rng.random() >= HASTE:
            await self.work_goes_on()
        victim = self.rng.choice(["gateway", "n1", "n2", "client"])
        await anyio.sleep(self.rng.uniform(0.0, 1.0))
        if victim == "client":
            worker = self.workers.pop(self.rng.randrange(len(self.workers)))
            worker.process.kill()
            worker.process.wait()
            self.abandoned.append(worker)
            await check_abandoned(client, worker)
            self.start_worker()
        else:
            self.fleet.end(victim, signal.SIGKILL)
            await anyio.sleep(self.rng.uniform(0.0, 0.5))
            await anyio.to_thread.run_sync(self.start, victim)


@pytest.mark.timeout(600 + 60 * KILLS)
async def test_no_work_is_lost_or_done_twice(tmp_path: Path) -> None:
    with fleet_in(tmp_path) as fleet:
        storm = Storm(fleet, tmp_path)
        for name in ("gateway", "n1", "n2"):
            storm.start(name)
        async with connect(fleet.url, patience=120.0) as client:
            await client.health()
            for _each in range(CLIENTS):
                storm.start_worker()
            for _kill in range(KILLS):
                await storm.strike(client)
            with anyio.fail_after(100):
                while not all(worker.lines("sandbox") for worker in storm.workers):
                    await anyio.sleep(0.1)
            for worker in storm.workers:
                worker.process.terminate()
            for worker in storm.workers:
                assert await anyio.to_thread.run_sync(worker.process.wait) == 0
                assert worker.lines("complete") == (worker.lines("done")[-1:] or [["0"]])  # all that it was told
            for worker in storm.abandoned:
                await check_lease(client, worker)
            await eventually(lambda: held_by(fleet), within=100)
            assert sum(len(worker.lines("done")) for worker in (*storm.workers, *storm.abandoned)) > KILLS
    assert [path for name in ("n1", "n2") for path in (tmp_path / name).glob("skyenv-*")] == []
    assert str(tmp_path) not in Path("/proc/mounts").read_text()


def held_by(fleet: Fleet) -> list[str]:
    """Sandboxes that are still there."""
    found = []
    for name in ("n1", "n2"):
        for state in (fleet.folder / name).glob("skyenv-*"):
            found += [path.name for path in state.iterdir() if len(path.name) == 32]
    return found


def resources(node: int, names: set[str]) -> dict[str, object]:
    """What a node server and its launcher hold, zombies included; `names` are those of their sandboxes so far."""
    launcher = launcher_of(node)
    state = state_of(launcher)
    return {
        "processes": Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split(),
        "directories": sorted(path.name for path in state.iterdir()),
        "mounts": [line for line in Path(f"/proc/{launcher}/mounts").read_text().splitlines() if str(state) in line],
        "groups": [folder for folder, _below, _files in os.walk("/sys/fs/cgroup") if Path(folder).name in names],
        "descriptors of the node": len(os.listdir(f"/proc/{node}/fd")),
        "descriptors of the launcher": len(os.listdir(f"/proc/{launcher}/fd")),
    }


def difference(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """What there is more of: what was only there for a moment at first is no leak when it is gone."""
    return [f"{key}: {value} before, {after[key]} now" for key, value in before.items() if grown(value, after[key])]


def grown(before: object, after: object) -> bool:
    if isinstance(before, int) and isinstance(after, int):
        return after > before
    assert isinstance(before, list)
    assert isinstance(after, list)
    return bool(Counter(after) - Counter(before))


@pytest.mark.timeout(600 + 10 * CYCLES)
async def test_created_and_killed_sandboxes_leave_nothing() -> None:
    rng, names = random.Random(SEED), set[str]()
    with served(SERVE, "local") as (process, url):
        async with connect(url, "secret") as client:

            async def cycle() -> None:
                try:
                    async with client.sandbox() as box:
                        await box.exec("sleep 600 & setsid sleep 600 &")
                        inits = children(launcher_of(process.pid))
                        names.update(names_in(state_of(launcher_of(process.pid))))
                        if rng.random() < 0.3:
                            await box.pause()
                        os.kill(rng.choice(inits), signal.SIGKILL)
                        await box.exec("true")
                except SandboxLost:
                    return

            await cycle()
            launcher = launcher_of(process.pid)
            await eventually(lambda: [str(pid) for pid in children(launcher)])
            before = resources(process.pid, names)
            for _cycle in range(CYCLES):
                await cycle()
            assert len(names) > CYCLES
            await eventually(lambda: difference(before, resources(process.pid, names)), within=100)
