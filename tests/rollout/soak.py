"""Hundreds of trajectories on real sandboxes while sandboxes, the node server and engines are killed under them.

    python -m tests.rollout.soak --minutes 10 --seed 0

Every trajectory counts steps into a file of its sandbox; its reward says whether each of them was done exactly once, in
order. What must hold: every (task, sample) comes back exactly once, with reward 1 or a typed failure of infrastructure;
at the end no sandbox, process, mount or file is left. Ends with one JSON line; status 1 when something did not hold.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread

import skyenv
from skyenv.core import Sandbox, SandboxProvider
from skyenv.engines.pool import EnginePool
from skyenv.envs.tool_env import ToolEnv
from skyenv.types import Limits, Message, Trajectory
from skyenv.vector.metrics import Meter
from skyenv.vector.pipeline import RolloutPipeline, StageWidths, TrajectoryRun
from skyenv.vector.stopping import FailureThreshold
from tests.ports import free_port
from tests.rollout.adventure import RENDERER

TOKEN = "soak"
INFRASTRUCTURE = {"SandboxLost", "SandboxUnavailable", "EngineUnavailable", "EngineError", "DeadlineExceeded"}
STANDSTILL = 400.0
LIVE, SAMPLES = 32, 4


@dataclass(frozen=True, slots=True)
class Chore:
    """So many steps to do."""

    task_id: str
    steps: int


class ChoreEnv(ToolEnv[Chore]):
    """A sandbox, a shell, and a grade that tells whether every step was done exactly once and in order."""

    def __init__(self, provider: SandboxProvider) -> None:
        super().__init__((Chore("chore", 1),), "strict", max_turns=1000)
        self._provider = provider

    async def begin(self, task: Chore, resources: AsyncExitStack) -> Sandbox | None:
        return await resources.enter_async_context(self._provider.sandbox())

    def instructions(self, task: Chore) -> tuple[Message, ...]:
        return (Message("system", "You work in a shell."), Message("user", f"Do {task.task_id} in {task.steps} steps."))

    async def grade(self, task: Chore, sandbox: Sandbox | None) -> tuple[float | None, dict[str, Any]]:
        assert sandbox is not None
        done = (await sandbox.exec("cat /tmp/work")).output.split()
        right = done == [f"step-{step}" for step in range(1, task.steps + 1)]
        return float(right), {"resolved": right, "done": done}


@dataclass
class Servers:
    """A node server with a state directory and two engines, as processes that are killed and started again."""

    folder: Path
    seconds: float
    ports: dict[str, int] = field(default_factory=dict)
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    launcher: int = 0

    @property
    def state(self) -> Path:
        """The node's."""
        return self.folder / "node"

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.ports[name]}"

    def start(self, name: str) -> None:
        """Start it where it was before; it is not waited for."""
        if name not in self.ports:
            self.ports[name] = free_port()
        port = str(self.ports[name])
        node = ("skyenv.cli", "serve", "--backend", "local", "--token", TOKEN, "--state", str(self.state))
        words = (*node, "--port", port) if name == "node" else ("tests.rollout.soak_engine", port, str(self.seconds))
        log = (self.folder / f"{name}.log").open("ab")
        with log:
            self.running[name] = subprocess.Popen([sys.executable, "-m", *words], stdout=log, stderr=log)

    def kill(self, name: str) -> None:
        """As a machine that is switched off."""
        process = self.running.pop(name)
        process.kill()
        process.wait()

    def inits(self) -> list[int]:
        """The first process of every sandbox that is alive."""
        if not self.launcher:
            (self.launcher,) = children(self.running["node"].pid)
        return children(self.launcher)

    def left(self) -> list[str]:
        """What is still there of sandboxes."""
        found = [str(path) for path in self.state.glob("skyenv-*/*") if len(path.name) == 32]
        found += [line for line in Path("/proc/mounts").read_text().splitlines() if str(self.state) in line]
        return found + [f"process {pid}" for pid in self.inits()]


@contextmanager
def servers_in(folder: Path, seconds: float) -> Iterator[Servers]:
    """All three, ended at the end; AssertionError when the node leaves something behind."""
    servers = Servers(folder, seconds)
    with ExitStack() as stack:
        for name in ("one", "two", "node"):
            servers.start(name)

        @stack.callback
        def end() -> None:
            for name, process in servers.running.items():
                process.send_signal(signal.SIGTERM)
                assert process.wait(300) in (0, -signal.SIGTERM), name
            assert list(servers.state.glob("skyenv-*")) == []
            assert str(servers.state) not in Path("/proc/mounts").read_text()

        yield servers


def children(pid: int) -> list[int]:
    """Direct children of a process."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Storm:
    """Kills something whenever `calm` more trajectories are back; an engine once it has something to answer."""

    def __init__(self, servers: Servers, run: TrajectoryRun, pool: EnginePool, seed: int, calm: int) -> None:
        self.servers, self._run, self._pool, self._calm = servers, run, pool, calm
        blows = ("one", "sandbox", "node", "sandbox", "two", "sandbox")
        self._blows = itertools.cycle(blows)
        self._rng = random.Random(seed)
        self.kills: Counter[str] = Counter()

    async def rage(self) -> None:
        """Until cancelled. TimeoutError when nothing comes back for `STANDSTILL` seconds."""
        for blow in self._blows:
            wanted = self._run.progress.done + self._calm
            with anyio.fail_after(STANDSTILL):
                while self._run.progress.done < wanted:
                    await anyio.sleep(0.02)
            await (self._sandbox() if blow == "sandbox" else self._server(blow))
            self.kills["engine" if blow in ("one", "two") else blow] += 1

    async def _sandbox(self) -> None:
        with anyio.fail_after(STANDSTILL):
            while not (inits := self.servers.inits()):
                await anyio.sleep(0.02)
        os.kill(self._rng.choice(inits), signal.SIGKILL)

    def _busy(self, name: str) -> bool:
        """Whether a server has something to do that dies with it."""
        return name == "node" or any(row.requests for row in self._pool.stats if row.url == self.servers.url(name))

    async def _server(self, name: str) -> None:
        """The next one stands up after a moment in which nobody answers."""
        with anyio.fail_after(STANDSTILL):
            while not self._busy(name):
                await anyio.sleep(0.02)
        await to_thread.run_sync(self.servers.kill, name)
        await anyio.sleep(self._rng.uniform(0.0, 1.0))
        self.servers.start(name)


@dataclass
class Outcome:
    """What a soak came to."""

    back: Counter[tuple[str, int]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    rewarded: int = 0

    def add(self, trajectory: Trajectory) -> None:
        """One trajectory came back: reward 1, or infrastructure's failure, or something is wrong."""
        name = f"{trajectory.task_id}#{trajectory.sample_index}"
        self.back[trajectory.task_id, trajectory.sample_index] += 1
        if trajectory.failure is not None:
            self.failures[trajectory.failure.kind] += 1
            if trajectory.failure.kind not in INFRASTRUCTURE or trajectory.reward is not None:
                self.wrong.append(f"{name}: {trajectory.failure}")
        elif trajectory.reward == 1.0 and RENDERER.drift(trajectory) == 0:
            self.rewarded += 1
        else:
            self.wrong.append(f"{name}: reward {trajectory.reward}, {trajectory.verdict}")


@asynccontextmanager
async def pipeline_on(servers: Servers, meter: Meter) -> AsyncIterator[tuple[RolloutPipeline, EnginePool]]:
    """The pipeline over the servers, once all of them answer."""
    urls = [servers.url("one"), servers.url("two")]
    async with AsyncExitStack() as stack:
        for name in ("one", "two", "node"):
            await answers(servers.ports[name])
        provider = await stack.enter_async_context(skyenv.connect(servers.url("node"), TOKEN, patience=STANDSTILL))
        pool = await stack.enter_async_context(EnginePool.at(urls, patience=STANDSTILL))
        yield (
            RolloutPipeline(
                engine=pool,
                make_env=lambda: ChoreEnv(provider),
                renderer=RENDERER,
                limits=Limits(max_turns=1000),
                widths=StageWidths(init=8, run=LIVE, eval=8, live=LIVE),
                max_attempts=3,
                failures=FailureThreshold(0.5),
                meter=meter,
            ),
            pool,
        )


async def answers(port: int) -> None:
    """Wait until somebody listens there."""
    with anyio.fail_after(STANDSTILL):
        while True:
            try:
                async with await anyio.connect_tcp("127.0.0.1", port):
                    return
            except OSError:
                await anyio.sleep(0.05)


def chores(seed: int, count: int | None, seconds: float) -> Iterator[Chore]:
    """`count` of them, or as many as are begun within the time."""
    rng, until = random.Random(seed), time.monotonic() + seconds
    for number in itertools.count():
        if number == count or (count is None and time.monotonic() > until):
            return
        yield Chore(f"chore-{number}", rng.randint(3, 9))


async def soak(
    folder: Path, seed: int, *, count: int | None = None, seconds: float = 0.0, calm: int = 20, latency: float = 0.1
) -> dict[str, Any]:
    """All of it; what it came to. AssertionError when something does not hold."""
    outcome, meter, asked = Outcome(), Meter(), Counter[tuple[str, int]]()

    def tasks() -> Iterator[Chore]:
        for chore in chores(seed, count, seconds):
            asked.update((chore.task_id, sample) for sample in range(SAMPLES))
            yield chore

    started = time.monotonic()
    with servers_in(folder, latency) as servers:
        async with pipeline_on(servers, meter) as (pipeline, pool), pipeline.run(tasks(), SAMPLES) as run:
            storm = Storm(servers, run, pool, seed, calm)
            async with anyio.create_task_group() as group:
                group.start_soon(storm.rage)
                async for trajectory in run:
                    outcome.add(trajectory)
                group.cancel_scope.cancel()
            for name in {"one", "two", "node"} - set(servers.running):  # it was killed as the last one came back
                servers.start(name)
            await answers(servers.ports["node"])
            lost = sum(server.lost for server in pool.stats)
            numbers = meter.numbers()
        with anyio.move_on_after(300.0):
            while servers.left():
                await anyio.sleep(0.1)
        left = servers.left()
    assert outcome.wrong == []
    assert outcome.back == asked
    assert left == []
    return {
        "trajectories": sum(asked.values()),
        "rewarded": outcome.rewarded,
        "failures": dict(outcome.failures),
        "retried": int(numbers["trajectories/retried"]),
        "requests_lost_by_engines": lost,
        "kills": dict(storm.kills),
        "live_max": int(numbers["sandboxes/live_max"]),
        "seconds": round(time.monotonic() - started, 1),
        "seed": seed,
    }


def main() -> int:
    """Run for so many minutes, one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="begin trajectories for so long (default 10)")
    parser.add_argument("--seed", type=int, default=0, help="default 0")
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="skyenv-soak.") as folder:

        async def play() -> dict[str, Any]:
            return await soak(Path(folder), options.seed, seconds=60 * options.minutes, calm=8, latency=0.5)

        try:
            result = {"held": True, **anyio.run(play)}
        except AssertionError as error:
            result = {"held": False, "what": str(error)[:2000], "seed": options.seed}
    sys.stdout.write(json.dumps(result) + "\n")
    return 0 if result["held"] else 1


if __name__ == "__main__":
    sys.exit(main())
