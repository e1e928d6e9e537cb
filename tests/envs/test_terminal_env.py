"""Terminal tasks: a Harbor folder of our own in every kind of sandbox, its verifier's reward, its times, its limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import gymnasium as gym
import pytest

import skyenv
from envs.conftest import Sandboxes
from envs.images import image_shelf, run
from skyenv.adapters.opening import Rollouts
from skyenv.core import Sandbox, SandboxProvider
from skyenv.engines.scripted import ScriptedEngine
from skyenv.envs.swe.environment import Environments
from skyenv.envs.swe.loading import load_tasks
from skyenv.envs.swe.validation import validate_task
from skyenv.envs.terminal.env import TIME_IS_UP, TerminalEnv
from skyenv.errors import ConfigError
from skyenv.renderer import ByteTokenizer
from skyenv.testing import check_env
from skyenv.types import Limits, Message, SamplingParams, StopReason, ToolCall
from tests.tasks.public_rows import write_harbor

TALLY: Mapping[str, str | None] = {
    "task.toml": """schema_version = "1.1"
[metadata]
difficulty = "easy"
[verifier]
timeout_sec = 60
[verifier.env]
EXPECTED = "total: 42"
[solution.env]
WORD = "total"
[agent]
timeout_sec = 300
[environment]
memory_mb = 512
workdir = "/srv/tally"
[environment.env]
LC_ALL = "C"
""",
    "instruction.md": "Add up the second column of sales.csv and write `total: SUM` into report.txt.\n",
    "environment__Dockerfile": None,
    "environment__sales.csv": "north,20\nsouth,15\nwest,7\n",
    "solution__solve.sh": 'python3 /solution/add.py "$WORD" sales.csv > report.txt\n',
    "solution__add.py": "import csv, sys\nword, name = sys.argv[1:]\n"
    "print(f'{word}: {sum(int(row[1]) for row in csv.reader(open(name)))}')\n",
    "tests__test.sh": "#!/bin/bash\npython3 /tests/check.py && reward=1 || reward=0\n"
    "echo $reward > /logs/verifier/reward.txt\n",
    "tests__check.py": "import os, sys\nsys.exit(open('report.txt').read().strip() != os.environ['EXPECTED'])\n",
}
WORK = "echo total: $((20 + 15 + 7)) > report.txt"


@pytest.fixture
def tally(tmp_path: Path) -> Path:
    return write_harbor(tmp_path / "tally", **TALLY)


def bash(command: str) -> ToolCall:
    return ToolCall("execute_bash", {"command": command})


async def grade(env: TerminalEnv, *commands: str) -> tuple[float | None, dict[str, Any]]:
    """An episode of these commands."""
    await env.areset()
    for command in commands:
        await env.astep(bash(command))
    return await env.aevaluate()


def play(sandboxes: Sandboxes, folder: Path, *commands: str, **options: Any) -> tuple[float | None, dict[str, Any]]:
    """One episode of the folder's task."""

    async def one(provider: SandboxProvider) -> tuple[float | None, dict[str, Any]]:
        async with TerminalEnv(folder, provider, **options) as env:
            return await grade(env, *commands)

    found: tuple[float | None, dict[str, Any]] = sandboxes.run(one)
    return found


def test_its_own_solution_earns_the_reward_and_nothing_does_not(everywhere: Sandboxes, tally: Path) -> None:
    (task,) = load_tasks(tally)
    result = everywhere.run(partial(validate_task, task))
    assert result["ok"], result["problems"]
    reward, verdict = play(everywhere, tally, "rm -f /srv/elsewhere")
    assert (reward, verdict["status"], verdict["valid_for_training"]) == (0.0, "unresolved", True)
    reward, verdict = play(everywhere, tally, "pwd; cat sales.csv", WORK)
    assert (reward, verdict["status"]) == (1.0, "resolved"), verdict


@pytest.mark.oci
def test_a_real_container_image_and_a_judge_in_another(containers: Sandboxes, tmp_path: Path) -> None:
    """The agent's image has a repository in it, the verifier's is the node's own with the artifacts alone."""
    node_image = containers.image.rpartition("/")[0] + "/debian"
    toml = f"""artifacts = ["/calc/calc.py"]
[environment]
docker_image = "{containers.image}"
workdir = "/calc"
[verifier.environment]
docker_image = "{node_image}"
"""
    files: dict[str, str | None] = {
        "task.toml": toml,
        "instruction.md": "Mend add in calc.py.\n",
        "environment__Dockerfile": None,
        "solution__solve.sh": "sed -i 's/a - b/a + b/' calc.py\n",
        "tests__test.sh": "#!/bin/bash\ntest ! -e run.py && python3 -c 'import calc; assert calc.add(2, 3) == 5'\n"
        "echo $((1 - $?)) > /logs/verifier/reward.txt\n",
    }
    folder = write_harbor(tmp_path / "calc", **files)
    with pytest.raises(ConfigError, match="is missing"):
        load_tasks(write_harbor(tmp_path / "broken", **{**files, "tests__test.sh": None}))
    reward, verdict = play(containers, folder, "cat calc.py")
    assert (reward, verdict["status"]) == (0.0, "unresolved"), verdict
    reward, verdict = play(containers, folder, "sed -i 's/a - b/a + b/' calc.py")
    assert (reward, verdict["status"]) == (1.0, "resolved"), verdict


def test_a_folder_named_from_where_one_stands(
    sandboxes: Sandboxes, tally: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tally.parent)
    (task,) = load_tasks("tally")
    result = sandboxes.run(partial(validate_task, task))
    assert result["ok"], result["problems"]


def test_the_agent_sees_its_task_and_nothing_of_the_verifier(sandboxes: Sandboxes, tally: Path) -> None:
    async def look(provider: SandboxProvider) -> None:
        async with skyenv.make("SkyRL/Terminal-v0", tasks=tally, sandbox=provider) as env:
            observation, info = await env.areset()
            assert (info["task_id"], "Add up the second column" in observation) == ("tally", True)
            assert "/srv/tally" in observation
            step = await env.astep(bash("pwd; ls -A; ls / | grep -E 'tests|solution|oracle'; env | grep -c EXPECTED"))
            assert step.observation.startswith("/srv/tally\nsales.csv\n0"), step.observation
            step = await env.astep(bash("ls -d /logs/*; echo $LC_ALL"))
            assert step.observation.startswith("/logs/agent\n/logs/artifacts\n/logs/verifier\nC")

    sandboxes.run(look)


def test_it_is_an_environment_like_any(sandboxes: Sandboxes, tally: Path) -> None:
    async def check(provider: SandboxProvider) -> None:
        await check_env(lambda: TerminalEnv(tally, provider), action=bash("ls"))

    sandboxes.run(check)


def test_the_agents_time_is_the_tasks(sandboxes: Sandboxes, tmp_path: Path) -> None:
    toml = str(TALLY["task.toml"]).replace("timeout_sec = 300", "timeout_sec = 4")
    folder = write_harbor(tmp_path / "tally", **{**TALLY, "task.toml": toml})

    async def late(provider: SandboxProvider) -> None:
        async with TerminalEnv(folder, provider) as env:
            await env.areset()
            step = await env.astep(bash(f"{WORK}; (sleep 600; echo late > report.txt) & sleep 600"))
            assert (step.observation, step.truncated) == (TIME_IS_UP, True)
            assert step.info["stop_reason"] == StopReason.WALL_CLOCK
            reward, verdict = await env.aevaluate()
            assert (reward, verdict["status"]) == (1.0, "resolved"), verdict

    sandboxes.run(late)


def test_the_verifiers_time_is_the_tasks(sandboxes: Sandboxes, tmp_path: Path) -> None:
    toml = str(TALLY["task.toml"]).replace("timeout_sec = 60", "timeout_sec = 1")
    slow = {"task.toml": toml, "tests__test.sh": "#!/bin/bash\nsleep 600\n"}
    reward, verdict = play(sandboxes, write_harbor(tmp_path / "tally", **{**TALLY, **slow}), WORK)
    assert (reward, verdict["status"]) == (0.0, "timeout")


SEPARATE = 'artifacts = ["/srv/tally/report.txt", "/srv/out/"]\n' + str(TALLY["task.toml"]).replace(
    "[verifier]\n", '[verifier]\nenvironment_mode = "separate"\n'
)
ELSEWHERE = {
    "task.toml": SEPARATE,
    "tests__check.py": "import os, sys\nassert not os.path.exists('sales.csv') and not os.path.exists('/usr/local/x')\n"
    "assert os.path.exists('/logs/artifacts/note') and os.stat('/srv/out/tool').st_mode & 0o100\n"
    "sys.exit(open('report.txt').read().strip() != os.environ['EXPECTED'])\n",
}
MADE = f"{WORK}; mkdir -p /srv/out /usr/local; echo > /usr/local/x; echo > /srv/out/tool; chmod +x /srv/out/tool"
LEFT: Mapping[str, tuple[str, str]] = {
    "all of it": (f"{MADE}; echo > /logs/artifacts/note", "resolved"),
    "not all": (MADE, "unresolved"),
    "a directory in a file's place": (
        "mkdir report.txt; rm -rf /logs/artifacts; touch /logs/artifacts",
        "patch_rejected",
    ),
    "a pipe": (f"{MADE}; echo > /logs/artifacts/note; rm report.txt; mkfifo report.txt /srv/out/p", "unresolved"),
    "a way out": ("ln -s /etc report.txt; ln -s / /srv/out; ln -s ../../.. /logs/artifacts/up", "patch_too_large"),
    "too much": (f"{MADE}; truncate -s 1G /srv/out/hole", "patch_too_large"),
}


@pytest.mark.parametrize("left", LEFT)
def test_a_verifier_of_its_own_gets_the_artifacts_alone(sandboxes: Sandboxes, tmp_path: Path, left: str) -> None:
    command, status = LEFT[left]
    folder = write_harbor(tmp_path / "tally", **{**TALLY, **ELSEWHERE})
    reward, verdict = play(sandboxes, folder, command)
    assert (verdict["status"], reward) == (status, float(status == "resolved")), verdict


def test_the_agents_sandbox_is_free_before_a_verifier_has_its_own(sandboxes: Sandboxes, tmp_path: Path) -> None:
    folder = write_harbor(tmp_path / "tally", **{**TALLY, **ELSEWHERE})
    live: list[int] = []

    class Counting:
        """Counts sandboxes that are open at a time."""

        def __init__(self, provider: SandboxProvider) -> None:
            self._provider, self.open = provider, 0

        @asynccontextmanager
        async def sandbox(self, *arguments: Any, **options: Any) -> Any:
            async with self._provider.sandbox(*arguments, **options) as box:
                self.open += 1
                live.append(self.open)
                try:
                    yield box
                finally:
                    self.open -= 1

        async def delete_snapshot(self, snapshot: str) -> None:
            await self._provider.delete_snapshot(snapshot)

    async def one(provider: SandboxProvider) -> None:
        async with TerminalEnv(folder, Counting(provider)) as env:
            assert (await grade(env, LEFT["all of it"][0]))[0] == 1.0

    sandboxes.run(one)
    assert live == [1, 1]


REWARDS: Mapping[str, tuple[str, float]] = {
    "a part": ("echo 0.25 > reward.txt", 0.25),
    "JSON": ("""echo '{"reward": 0.5, "speed": 9}' > reward.json""", 0.5),
    "JSON before text": ("""echo 1 > reward.txt; echo '{"reward": 0}' > reward.json""", 0.0),
    "a status that says nothing": ("echo 1 > reward.txt; exit 3", 1.0),
}


@pytest.mark.parametrize("kind", REWARDS)
def test_rewards(sandboxes: Sandboxes, tmp_path: Path, kind: str) -> None:
    script, expected = REWARDS[kind]
    files = {**TALLY, "tests__test.sh": f"#!/usr/bin/env bash\ncd /logs/verifier\n{script}\n"}
    reward, verdict = play(sandboxes, write_harbor(tmp_path / "tally", **files))
    assert (reward, verdict["valid_for_training"]) == (expected, True)


def test_a_missing_reward_is_nobodys_reward(sandboxes: Sandboxes, tmp_path: Path) -> None:
    broken = {**TALLY, "tests__test.sh": "#!/bin/bash\nexit 1\n"}
    reward, verdict = play(sandboxes, write_harbor(tmp_path / "tally", **broken), WORK)
    assert (verdict["status"], verdict["valid_for_training"], reward) == ("instance_error", False, None)
    fragile = {**TALLY, "tests__test.sh": "#!/bin/bash\nset -e\ncat sales.csv\necho 0 > /logs/verifier/reward.txt\n"}
    reward, verdict = play(sandboxes, write_harbor(tmp_path / "tally", **fragile), "rm sales.csv")
    assert (verdict["status"], reward, verdict["flags"]) == ("unresolved", 0.0, ["no_test_ran", "no_reward"])


def test_images_by_name(sandboxes: Sandboxes, tmp_path: Path) -> None:
    """A template names each task's image; `host` stands for none."""
    folder = write_harbor(tmp_path / "greet")

    async def build(box: Sandbox) -> None:
        await run(box, "mkdir -p /srv/greet; echo from the image > /srv/greet/note")

    async def look(provider: SandboxProvider) -> None:
        async with image_shelf(provider, {"here/greet/acme/greet:1": build}) as shelf:
            async with TerminalEnv(folder, shelf, image="here/{task}/{image}") as env:
                await env.areset()
                assert (await env.astep(bash("cat note"))).observation.startswith("from the image")
                assert (await grade(env, "echo hello > greeting.txt"))[0] == 1.0
            await Environments.of(shelf).aclose()
        async with TerminalEnv(folder, provider, image="host") as env:
            assert (await grade(env, "echo hello > greeting.txt"))[0] == 1.0

    sandboxes.run(look)


def test_an_image_that_nobody_built_is_told_with_the_command(sandboxes: Sandboxes, tmp_path: Path) -> None:
    folder = write_harbor(tmp_path / "greet", **{"task.toml": ""})
    with pytest.raises(
        ConfigError, match=rf"'greet' is made from environment/Dockerfile by .*images {tmp_path}/greet`"
    ):
        play(sandboxes, folder)


def test_a_network_is_there_where_task_and_node_say_so(sandboxes: Sandboxes, tmp_path: Path) -> None:
    toml = str(TALLY["task.toml"]).replace("[environment]", '[environment]\nnetwork_mode = "public"')
    folder = write_harbor(tmp_path / "tally", **{**TALLY, "task.toml": toml})
    with pytest.raises(ConfigError, match="network: this node gives its sandboxes none"):
        play(sandboxes, folder, WORK)
    assert play(sandboxes, folder, WORK, network=False)[0] == 1.0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "tasks: SkyRL/Terminal-v0 needs a folder"),
        ({"tasks": "builtin"}, "repairs a repository, which SkyRL/SWE-v0 plays"),
        ({"tasks": Path(), "imagine": "x"}, "did you mean 'image'"),
    ],
)
def test_wrong_settings_are_named(options: dict[str, Any], named: str, tally: Path) -> None:
    makers: list[Callable[..., Any]] = [skyenv.make, gym.make, gym.make_vec]
    for make in makers:
        with pytest.raises(ConfigError, match=named):
            make("SkyRL/Terminal-v0", **options)
    with pytest.raises(ConfigError, match=r"image: '\{name\}' may only hold"):
        skyenv.make("SkyRL/Terminal-v0", tasks=tally, image="{name}")


def test_gymnasiums_face(tally: Path) -> None:
    finish, work = ({"name": "finish", "arguments": {}}, {"name": "execute_bash", "arguments": {"command": WORK}})
    env = gym.make("SkyRL/Terminal-v0", tasks=tally)
    env.reset(seed=1)
    env.step(work)
    _, reward, terminated, _, info = env.step(finish)
    assert (reward, terminated, info["verdict"]["status"]) == (1.0, True, "resolved")
    env.close()
    envs = gym.make_vec("SkyRL/Terminal-v0", num_envs=2, tasks=tally)
    envs.reset(seed=1)
    envs.step([work, finish])
    _, rewards, *_ = envs.step([finish, finish])
    assert rewards[0] == 1.0
    envs.close()


async def test_rollouts(tally: Path) -> None:
    """Siblings through the pipeline, one of which does the work."""
    rollouts = Rollouts(
        tasks=tally,
        env="SkyRL/Terminal-v0",
        limits=Limits(max_context=1 << 16),
        sampling=SamplingParams(max_tokens=512),
    )
    renderer = rollouts.renderer(ByteTokenizer())
    end = renderer.format.render_call(ToolCall("finish", {}))

    def script(messages: list[Message]) -> str:
        said = sum(message.role == "assistant" for message in messages)
        return renderer.format.render_call(bash(WORK)) if said == 0 else end

    with anyio.fail_after(100):
        async with rollouts.open(ScriptedEngine(renderer, script), renderer) as pipeline:
            (group,) = await pipeline.collect(rollouts.load(), 2)
    assert [trajectory.reward for trajectory in group.trajectories] == [1.0, 1.0]
    assert all(trajectory.trainable for trajectory in group.trajectories)
