"""The pipeline on the real thing: real sandboxes, a real shell, real test runs as the reward."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import anyio

import skyenv
from skyenv.core import Sandbox, SandboxProvider
from skyenv.engines.scripted import ScriptedEngine
from skyenv.errors import EnvError
from skyenv.remote.client import SandboxClient
from skyenv.renderer import ByteTokenizer
from skyenv.trajectory_io import append_trajectories, read_trajectories
from skyenv.types import Completion, Limits, Message, StopReason, ToolCall, Trajectory
from skyenv.vector.pipeline import RolloutPipeline, StageWidths
from tests.rollout.adventure import RENDERER, say

TASK = "clamp-upper-bound"
GOLD = Path(skyenv.__file__).parent / "envs/swe/data/builtin" / TASK / "gold.patch"
END = ToolCall("finish", {})


def bash(command: str) -> str:
    return say(ToolCall("execute_bash", {"command": command}))


class Counting:
    """A provider that counts the sandboxes of the provider behind it."""

    def __init__(self, provider: SandboxProvider) -> None:
        self._provider = provider
        self.live = self.opened = 0
        self.started_from: list[str | None] = []
        self.deleted: list[str] = []

    def sandbox(self, image: str | None = None, **options: Any) -> AbstractAsyncContextManager[Sandbox]:
        return self._counted(image, options)

    @asynccontextmanager
    async def _counted(self, image: str | None, options: dict[str, Any]) -> AsyncIterator[Sandbox]:
        async with self._provider.sandbox(image, **options) as box:
            self.live += 1
            self.opened += 1
            self.started_from.append(options.get("snapshot"))
            try:
                yield box
            finally:
                self.live -= 1

    async def delete_snapshot(self, snapshot: str) -> None:
        self.deleted.append(snapshot)
        await self._provider.delete_snapshot(snapshot)


class WithoutSnapshots:
    """A sandbox that cannot be frozen, as of the backend `process`."""

    def __init__(self, box: Sandbox) -> None:
        self._box = box

    async def snapshot(self, *, shell: bool = True, drop: bool = False) -> str:
        raise EnvError("no snapshots here")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._box, name)


class Unforkable(Counting):
    """A provider of such sandboxes."""

    @asynccontextmanager
    async def _counted(self, image: str | None, options: dict[str, Any]) -> AsyncIterator[Sandbox]:
        async with super()._counted(image, options) as box:
            yield cast(Sandbox, WithoutSnapshots(box))


@asynccontextmanager
async def sandboxes() -> AsyncIterator[Counting]:
    """A node server in this process. Not a fixture: what is opened in a task must be closed in it."""
    async with skyenv.connect() as client:
        yield Counting(client)


def pipeline(provider: Counting, script: Any, limits: Limits) -> RolloutPipeline:
    return RolloutPipeline(
        engine=ScriptedEngine(RENDERER, script),
        renderer=RENDERER,
        make_env=lambda: skyenv.make("SkyRL/SWE-v0", tasks="builtin", sandbox=provider),
        limits=limits,
    )


async def one(provider: Counting, script: Any, limits: Limits) -> Trajectory:
    (trajectory,) = [t async for t in pipeline(provider, script, limits).run([TASK], group_size=1)]
    trajectory.segments[0].check(ByteTokenizer.vocab_size)
    assert RENDERER.drift(trajectory) == 0
    assert provider.live == 0
    return trajectory


async def test_the_reference_fix_earns_the_reward(tmp_path: Path) -> None:
    async with sandboxes() as provider:
        fix = bash(f"cd /testbed && git apply <<'END'\n{GOLD.read_text()}END")
        trajectory = await one(provider, [bash("ls"), fix, say(END)], Limits())
        assert (trajectory.stop_reason, trajectory.reward, trajectory.trainable) == (StopReason.FINISH, 1.0, True)
        assert trajectory.verdict["status"] == "resolved"
        append_trajectories(tmp_path / "t.jsonl", [trajectory])
        assert list(read_trajectories(tmp_path / "t.jsonl")) == [trajectory]


async def test_work_is_graded_whatever_ended_the_run() -> None:
    async with sandboxes() as provider:
        fix = bash(f"cd /testbed && git apply <<'END'\n{GOLD.read_text()}END")
        trajectory = await one(provider, [fix, bash("pwd")], Limits(max_turns=2))
        assert (trajectory.stop_reason, trajectory.reward) == (StopReason.MAX_TURNS, 1.0)
        trajectory = await one(provider, [fix, bash("sleep 600")], Limits(wall_clock=6.0))
        assert (trajectory.stop_reason, trajectory.reward) == (StopReason.WALL_CLOCK, 1.0)
        assert trajectory.seconds["run"] < 300  # and not the 600 of the command


async def test_nothing_done_is_worth_nothing() -> None:
    async with sandboxes() as provider:
        trajectory = await one(provider, [say(END)], Limits())
        assert (trajectory.stop_reason, trajectory.reward, trajectory.failure) == (StopReason.FINISH, 0.0, None)


async def test_mistakes_are_observations_and_repetition_ends() -> None:
    async with sandboxes() as provider:
        edit = {"command": "str_replace", "path": "/testbed/missing.py", "old_str": "a", "new_str": "b"}
        broken = say(ToolCall("str_replace_editor", edit))
        trajectory = await one(provider, [bash("nosuch-command"), bash("exit 3"), *[broken] * 5], Limits())
        assert "127" in trajectory.turns[0].observation
        assert trajectory.stop_reason is StopReason.STUCK
        assert trajectory.reward == 0.0


LOOK = bash("pwd; git log --format='%H %s'; git status --short; ls; printenv PATH; touch mine; ls /tmp")


async def group(provider: Counting, script: Any, size: int, **options: Any) -> list[Trajectory]:
    rolled = dataclasses.replace(pipeline(provider, script, Limits()), **options)
    return [t async for t in rolled.run([TASK], group_size=size)]


async def test_siblings_start_from_one_prepared_sandbox_and_see_what_they_would_have_seen() -> None:
    fix = bash(f"cd /testbed && git apply <<'END'\n{GOLD.read_text()}END")
    async with sandboxes() as provider:
        found = await group(provider, [LOOK, fix, say(END)], 4)
        forked = [snapshot for snapshot in provider.started_from if snapshot is not None]
        assert len(forked) == 3
        assert set(forked) == set(provider.deleted)
        assert len(provider.deleted) == 1
        (alone,) = await group(provider, [LOOK, fix, say(END)], 1)
        assert {t.turns[0].observation for t in found} == {alone.turns[0].observation}
        assert "/testbed" in alone.turns[0].observation
        assert [(t.reward, t.attempts) for t in found] == [(1.0, 1)] * 4
        assert provider.live == 0


async def test_sandboxes_that_cannot_be_frozen_are_prepared_one_by_one() -> None:
    async with skyenv.connect() as client:
        provider = Unforkable(client)
        found = await group(provider, [say(END)], 3)
        assert [t.failure for t in found] == [None] * 3
        assert set(provider.started_from) == {None}
        assert provider.deleted == []
        assert provider.live == 0


class Patient(ScriptedEngine):
    """Ends no episode before the graders of both are open."""

    def __init__(self, first: str, envs: list[Any]) -> None:
        super().__init__(RENDERER, [first, say(END)])
        self._envs = envs

    async def generate(self, *arguments: Any, messages: Sequence[Message] = (), **options: Any) -> Completion:
        if any(message.role == "assistant" for message in messages):
            with anyio.fail_after(100):
                while sum(env._ready is not None for env in self._envs) < 2:
                    await anyio.sleep(0.02)
        return await super().generate(*arguments, messages=messages, **options)


async def test_graders_open_while_agents_work() -> None:
    fix = bash(f"cd /testbed && git apply <<'END'\n{GOLD.read_text()}END")

    async def both(provider: Counting, first: str) -> list[Trajectory]:
        envs: list[Any] = []

        def make_env() -> Any:
            envs.append(skyenv.make("SkyRL/SWE-v0", tasks="builtin", sandbox=provider))
            return envs[-1]

        return await group(provider, [], 2, widths=StageWidths(ahead=2), engine=Patient(first, envs), make_env=make_env)

    async with sandboxes() as provider:
        assert [t.reward for t in await both(provider, fix)] == [1.0, 1.0]
        assert provider.opened == 4
        idle = await both(provider, bash("true"))
        assert [(t.reward, t.verdict["status"]) for t in idle] == [(0.0, "empty_patch")] * 2
        assert provider.opened == 8
        assert provider.live == 0


class Warming(Counting):
    """A provider that keeps what was asked for, and what for in advance."""

    def __init__(self, provider: SandboxClient) -> None:
        super().__init__(provider)
        self._client = provider
        self.asked: list[tuple[str | None, dict[str, Any]]] = []
        self.asked_ahead: list[tuple[str | None, dict[str, Any]]] = []

    def sandbox(self, image: str | None = None, **options: Any) -> AbstractAsyncContextManager[Sandbox]:
        self.asked.append((image, options))
        return super().sandbox(image, **options)

    async def prefetch(self, image: str | None = None, *, count: int = 0, **options: Any) -> None:
        assert count == 2
        self.asked_ahead.append((image, options))
        await self._client.prefetch(image, count=count, **options)


async def test_a_prefetch_makes_what_agents_and_graders_open_later() -> None:
    fix = bash(f"cd /testbed && git apply <<'END'\n{GOLD.read_text()}END")
    async with skyenv.connect() as client:
        provider = Warming(client)
        rolled = dataclasses.replace(pipeline(provider, [fix, say(END)], Limits()), fork_groups=False)
        await rolled.prefetch([TASK], group_size=2)
        with anyio.fail_after(100):
            while sum(pool["ready"] for pool in (await client.health())["pools"]) < 2:
                await anyio.sleep(0.05)
        found = [t async for t in rolled.run([TASK], group_size=2)]
        assert [t.reward for t in found] == [1.0] * 2
        assert provider.asked == provider.asked_ahead * 4


async def test_leaving_early_leaves_no_sandbox() -> None:
    async with sandboxes() as provider:
        script = {TASK: [say(END)], "queue-order": [bash("sleep 600")]}
        async with pipeline(provider, script, Limits()).run([TASK, "queue-order"], group_size=2) as run:
            async for trajectory in run:
                assert trajectory.task_id == TASK
                break
        assert provider.opened > 0
        assert provider.live == 0


async def test_cancelling_in_the_middle_of_a_command_leaves_no_sandbox() -> None:
    async with sandboxes() as provider:
        with anyio.move_on_after(2.0) as scope:
            await one(provider, [bash("sleep 600")], Limits())
        assert scope.cancelled_caught
        assert provider.live == 0


INTERRUPTED = """
import sys
import anyio, skyenv
from tests.rollout.test_swe import Counting, Limits, bash, pipeline

async def main():
    async with skyenv.connect() as client:
        rolled = pipeline(Counting(client), [bash("sleep " + sys.argv[1])], Limits())
        run = rolled.run(["clamp-upper-bound"], group_size=2)
        async with anyio.create_task_group() as group:
            async def tell():
                while run.progress.run < 2:
                    await anyio.sleep(0.05)
                print("running", flush=True)
            group.start_soon(tell)
            async for trajectory in run:
                pass

anyio.run(main)
"""


def sleepers(seconds: str) -> list[str]:
    """Command lines of the processes that the interrupted script's sandboxes run."""
    found = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = process.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"sleep {seconds}" in line and "anyio" not in line:
            found.append(line)
    return found


def test_ctrl_c_ends_every_process() -> None:
    root = Path(__file__).resolve().parents[2]
    seconds = f"654.{os.getpid()}"  # no other run of this test has these
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, seconds], stdout=subprocess.PIPE, text=True, cwd=root, env={**os.environ}
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    end = time.monotonic() + 100
    while len(sleepers(seconds)) < 2:
        assert time.monotonic() < end
    process.send_signal(signal.SIGINT)
    assert process.wait(300) != 0
    while left := sleepers(seconds):
        assert time.monotonic() < end + 100, left
