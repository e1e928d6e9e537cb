"""Real sandboxes and a real grader under an engine whose latency is stated: one plan, several ways to play it.

A plan says for every sample of every task which commands it runs, whether it applies the known fix before it finishes,
and how long each of its generations takes; it follows from a seed. All schedulers play the same plan with the same
environment, tools and grader. The baselines are spared tokens and parsing: they hand the environment its calls.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
from _baselines import all_of
from _simulation import virtual

import skyenv
from skyenv import formats
from skyenv.core import Env, SandboxProvider
from skyenv.envs.swe.tasks import SweTask
from skyenv.renderer import ByteTokenizer, Renderer
from skyenv.types import Completion, Message, SamplingParams, ToolCall
from skyenv.vector.lanes import Lane

RENDERER = Renderer(ByteTokenizer(), formats.get("codeact"))
LOOKS = ("ls -la", "git log --oneline | head -5", "grep -rn 'def ' --include=*.py . | head -40", "git status --short")
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Sample:
    """One trajectory: its calls, and for each of them the seconds of the generation before it."""

    task: SweTask
    index: int
    calls: tuple[ToolCall, ...]
    latencies: tuple[float, ...]
    solves: bool


def bash(command: str) -> ToolCall:
    """A call of the shell tool."""
    return ToolCall("execute_bash", {"command": command})


def draw_plan(
    tasks: Sequence[SweTask], patches: Mapping[str, bytes], samples: int, latency: float, seed: int
) -> list[Sample]:
    """`samples` of each task: 4 to 12 looks around, every other one with the fix, then finish.

    Latencies are log-normal, median `latency`, sigma 0.6.
    """
    chosen = random.Random(seed)
    plan = []
    for task in tasks:
        for index in range(samples):
            calls = [bash(f"cd {task.repo_path} && {chosen.choice(LOOKS)}") for _ in range(chosen.randint(4, 12))]
            if index % 2 == 0:
                fix = shlex.quote(patches[task.task_id].decode())
                calls.append(bash(f"cd {task.repo_path} && printf %s {fix} | git apply --whitespace=nowarn"))
            calls.append(ToolCall("finish", {}))
            latencies = tuple(latency * chosen.lognormvariate(0.0, 0.6) for _ in calls)
            plan.append(Sample(task, index, tuple(calls), latencies, index % 2 == 0))
    return plan


class PlannedEngine:
    """The `Engine` of a plan: `slots` requests at once, each as long as the plan says."""

    def __init__(self, plan: Sequence[Sample], slots: int) -> None:
        self._samples = {(sample.task.task_id, sample.index): sample for sample in plan}
        self.slots, self._lane = slots, Lane(slots)

    async def serve(self, seconds: float) -> None:
        """One generation."""
        async with self._lane.slot():
            await anyio.sleep(seconds)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        messages: Sequence[Message] = (),
        session_id: str = "",
    ) -> Completion:
        """The plan's next call, as sampled ids."""
        task_id, _, place = session_id.rpartition("#")
        sample = self._samples[task_id, int(place.split(".")[1])]
        turn = sum(message.role == "assistant" for message in messages)
        await self.serve(sample.latencies[turn])
        ids = (*RENDERER.encode(RENDERER.format.render_call(sample.calls[turn])), RENDERER.stop_token_ids[0])
        return Completion(RENDERER.decode(ids), ids, (-0.25,) * len(ids), seconds=sample.latencies[turn])


class Player:
    """One sample played by hand, for the baselines."""

    def __init__(self, sample: Sample, env: Env, engine: PlannedEngine) -> None:
        self.sample, self.env, self._engine = sample, env, engine

    async def start(self) -> None:
        """Init."""
        await self.env.areset(options={"task": self.sample.task})

    async def generate(self, turn: int) -> None:
        """The generation of a turn."""
        await self._engine.serve(self.sample.latencies[turn])

    async def call(self, turn: int) -> None:
        """The tool call of a turn."""
        await self.env.astep(self.sample.calls[turn])

    async def judge(self) -> None:
        """Evaluation; a reward that the plan does not expect is a bug of this benchmark."""
        reward, verdict = await self.env.aevaluate()
        assert reward == float(self.sample.solves), verdict

    async def whole(self) -> None:
        """All of it, one after the other."""
        await self.start()
        for turn in range(len(self.sample.calls)):
            await self.generate(turn)
            await self.call(turn)
        await self.judge()
        await self.env.aclose()


def env_of(plan: Sequence[Sample], provider: SandboxProvider) -> Env:
    """The SWE environment with the plan's tasks."""
    tasks = list(dict.fromkeys(sample.task for sample in plan))
    return skyenv.make("SkyRL/SWE-v0", tasks=tasks, sandbox=provider, max_turns=1000)


async def naive_batch(plan: Sequence[Sample], provider: SandboxProvider, engine: PlannedEngine, live: int) -> None:
    """Batches of `live`: all inits, then turn by turn all generations and all calls, then all evaluations."""
    for first in range(0, len(plan), live):
        async with AsyncExitStack() as stack:
            players = []
            for sample in plan[first : first + live]:
                players.append(Player(sample, env_of(plan, provider), engine))
                stack.push_async_callback(players[-1].env.aclose)
            await all_of(Player.start, [(player,) for player in players])
            for turn in range(max(len(player.sample.calls) for player in players)):
                going = [(player, turn) for player in players if turn < len(player.sample.calls)]
                await all_of(Player.generate, going)
                await all_of(Player.call, going)
            await all_of(Player.judge, [(player,) for player in players])


async def bounded_batch(plan: Sequence[Sample], provider: SandboxProvider, engine: PlannedEngine, live: int) -> None:
    """Batches of `live`, each sample a coroutine through all its stages; a batch waits for its last."""
    for first in range(0, len(plan), live):
        batch = [(Player(sample, env_of(plan, provider), engine),) for sample in plan[first : first + live]]
        await all_of(Player.whole, batch)


@contextmanager
def counted() -> Iterator[Callable[[], float]]:
    """A control group for this process and all that it starts; yields its processor seconds so far.

    Those of processes that nobody waited for are in it too. Needs root.
    """
    versions = ((Path("/sys/fs/cgroup/cpuacct"), "cpuacct.usage"), (Path("/sys/fs/cgroup"), "cpu.stat"))
    parent, file = next((parent, file) for parent, file in versions if (parent / "cgroup.procs").exists())
    group = parent / f"skyenv-benchmark-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        sys.exit(f"processor time is counted by a control group of its own, which needs root: {error}")
    try:
        (group / "cgroup.procs").write_text(str(os.getpid()))

        def seconds() -> float:
            words = (group / file).read_text().split()
            return int(words[0]) / 1e9 if file == "cpuacct.usage" else int(words[words.index("usage_usec") + 1]) / 1e6

        yield seconds
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (parent / "cgroup.procs").write_text(pid)
        group.rmdir()


def machine_seconds() -> float:
    """Processor time that the whole machine has spent so far."""
    user, nice, system, _idle, _iowait, irq, softirq, *_rest = map(
        int, Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    )
    return (user + nice + system + irq + softirq) / TICKS


def longest(plan: Sequence[Sample]) -> float:
    """Generation seconds of the longest sample."""
    return max(math.fsum(sample.latencies) for sample in plan)


def seconds_of_generations(plan: Sequence[Sample], slots: int, live: int) -> float:
    """Of the plan in its order, `live` samples at once, with generations alone: in virtual time."""

    async def play(sample: Sample, lane: Lane, engine: PlannedEngine) -> None:
        for seconds in sample.latencies:
            await engine.serve(seconds)
        lane.release()

    async def main() -> float:
        lane, engine, started = Lane(live), PlannedEngine(plan, slots), anyio.current_time()
        async with anyio.create_task_group() as group:
            for sample in plan:
                await lane.acquire()
                group.start_soon(play, sample, lane, engine)
        return anyio.current_time() - started

    found: float = virtual(main)
    return found
