"""Gymnasium's view: its own checker, its wrappers, its vectors; and that a forgotten `close` leaves nothing behind."""

from __future__ import annotations

import contextlib
import copy
import json
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import RecordEpisodeStatistics, TimeLimit
from gymnasium.wrappers.vector import RecordEpisodeStatistics as VectorStatistics

import skyenv
from envs.repair import FIX, row
from skyenv import formats
from skyenv.envs.raw_text import NO_CALL, RawText
from skyenv.errors import ConfigError, ResetNeeded
from skyenv.types import ToolCall
from skyenv.vector.vector_env import SkyVectorEnv

ENV = "SkyRL/SWE-v0"
FINISH = {"name": "finish", "arguments": {}}


def bash(command: str) -> dict[str, Any]:
    return {"name": "execute_bash", "arguments": {"command": command}}


@pytest.fixture(scope="module")
def env() -> Iterator[gym.Env[str, Any]]:
    """One environment with its own node server, reset by each test."""
    env = gym.make(ENV, tasks=[row(), row("pytest", environment={})], max_turns=4, max_episode_steps=50)
    yield env
    env.close()
    env.close()


@pytest.mark.filterwarnings("error")
def test_gymnasiums_own_checker(env: gym.Env[str, Any]) -> None:
    check_env(env.unwrapped)


def test_an_episode_under_wrappers(env: gym.Env[str, Any]) -> None:
    wrapped = RecordEpisodeStatistics(env)
    observation, info = wrapped.reset(seed=3, options={"task": "calc-unittest"})
    assert "add subtracts" in observation
    assert info["task_id"] == "calc-unittest"
    observation, reward, terminated, truncated, info = wrapped.step(bash(FIX + "git diff --stat"))
    assert "calc.py | 2 +-" in observation
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert "verdict" not in info
    _, reward, terminated, truncated, info = wrapped.step(ToolCall("finish", {}))
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert info["verdict"]["status"] == "resolved"
    assert info["stop_reason"] == "finish"
    assert info["episode"]["r"] == 1.0
    with pytest.raises(ResetNeeded):
        wrapped.step(FINISH)


def test_a_plain_loop_of_random_actions_ends(env: gym.Env[str, Any]) -> None:
    env.reset(seed=1)
    env.action_space.seed(1)
    ended = False
    while not ended:
        observation, _, terminated, truncated, info = env.step(env.action_space.sample())
        ended = terminated or truncated
        assert env.observation_space.contains(observation)
    assert info["verdict"]["reward"] == 0.0
    assert info["stop_reason"] in ("finish", "max_turns")


def test_seeds_choose_the_task(env: gym.Env[str, Any]) -> None:
    chosen = [env.reset(seed=seed)[1]["task_id"] for seed in (0, 1, 2, 3, 0, 1, 2, 3)]
    assert chosen[:4] == chosen[4:]
    assert len(set(chosen)) == 2


def test_the_spec_travels(env: gym.Env[str, Any]) -> None:
    assert env.spec is not None
    assert pickle.loads(pickle.dumps(env.spec)) == env.spec == copy.deepcopy(env.spec)
    assert json.loads(env.spec.to_json())["entry_point"] == "skyenv.registry:make_swe"


def test_time_limit_truncates_without_a_verdict() -> None:
    env = gym.make(ENV, tasks=[row()], max_episode_steps=1)
    env.reset()
    _, _, terminated, truncated, info = env.step(bash("ls"))
    assert (terminated, truncated) == (False, True)
    assert "verdict" not in info
    env.close()


def test_raw_text(env: gym.Env[str, Any]) -> None:
    raw = RawText(env, "codeact")
    raw.reset(options={"task": "calc-unittest"})
    assert raw.action_space.contains("anything")
    observation, _, _, _, info = raw.step("I will look around.")
    assert (observation, info["failed"], info["turn"]) == (NO_CALL, True, 1)
    observation, *_ = raw.step("<function=execute_bash>\n<parameter=cmd>ls</parameter>\n</function>")
    assert "cmd" in observation
    two = f"<function=execute_bash>\n<parameter=command>{FIX}</parameter>\n</function>"
    observation, reward, terminated, _, info = raw.step(two + "\n<function=finish>\n</function>")
    assert (reward, terminated) == (1.0, True), (observation, info)


def test_text_actions_under_a_stack_of_wrappers(env: gym.Env[str, Any]) -> None:
    """What a plain training loop of Gymnasium stacks, with a policy that answers in text."""
    stacked = RecordEpisodeStatistics(TimeLimit(RawText(env, "hermes"), max_episode_steps=3))
    say = formats.get("hermes").render_call
    stacked.reset(seed=1, options={"task": "calc-unittest"})
    for text in ("Let me see.", say(ToolCall("execute_bash", {"command": FIX}))):
        _, reward, terminated, truncated, info = stacked.step(text)
        assert (reward, terminated, truncated) == (0.0, False, False)
    _, reward, terminated, _, info = stacked.step(say(ToolCall("finish", {})))
    assert (reward, terminated, info["verdict"]["status"]) == (1.0, True, "resolved")
    assert (info["episode"]["r"], info["episode"]["l"]) == (1.0, 3)
    stacked.reset(seed=1)
    for expected in (False, False, True):
        *_, truncated, info = stacked.step("Still thinking.")
        assert truncated is expected
    assert info["episode"]["l"] == 3


def test_raw_text_needs_tools() -> None:
    with pytest.raises(ConfigError, match="CartPole"):
        RawText(gym.make("CartPole-v1"))
    with pytest.raises(ConfigError, match="format"):
        RawText(gym.make(ENV, tasks=[row()]), "codeakt")


@pytest.mark.parametrize("mode", ["next_step", "disabled"])
def test_vector(mode: str) -> None:
    envs = gym.make_vec(ENV, num_envs=3, tasks=[row(), row("pytest", environment={})], max_turns=3, autoreset_mode=mode)
    assert isinstance(envs.metadata["autoreset_mode"], AutoresetMode)
    with pytest.raises(ResetNeeded):
        envs.step([FINISH] * 3)
    observations, infos = envs.reset(seed=7)
    assert envs.observation_space.contains(observations)
    again, repeated = envs.reset(seed=[7, 8, 9])
    assert again == observations
    assert list(repeated["task_id"]) == list(infos["task_id"])
    envs.reset(options={"task": "calc-unittest"})
    _, rewards, terminated, truncated, infos = envs.step([FINISH, bash(FIX), bash("pwd")])
    assert (list(rewards), list(terminated), list(truncated)) == ([0, 0, 0], [True, False, False], [False] * 3)
    assert infos["verdict"][0]["status"] == "empty_patch"
    assert list(infos["_verdict"]) == [True, False, False]
    observations, rewards, terminated, _, infos = envs.step([bash("pwd"), FINISH, bash("pwd")])
    assert list(rewards) == [0.0, 1.0, 0.0]
    assert list(terminated) == [mode == "disabled", True, False]
    if mode == "disabled":
        assert observations[0] == "The task has been marked as finished."
        mask = np.array([True, False, False])
        observations, infos = envs.reset(options={"reset_mask": mask})
        assert list(infos["_verdict"]) == [False, True, False]
        assert observations[1] == "The task has been marked as finished."
    else:
        assert "issue" in observations[0]
        assert list(infos["_turn"]) == [False, True, True]
    _, _, terminated, truncated, infos = envs.step([bash("pwd")] * 3)
    assert list(truncated) == [False, False, True]
    assert infos["stop_reason"][2] == "max_turns"
    envs.close()
    envs.close()


def test_a_vector_that_starts_the_next_episode_in_the_same_step() -> None:
    envs = gym.make_vec(ENV, num_envs=2, tasks=[row()], max_turns=3, autoreset_mode=AutoresetMode.SAME_STEP)
    first, _ = envs.reset(seed=1)
    observations, rewards, terminated, truncated, infos = envs.step([bash(FIX), bash("pwd")])
    assert "final_obs" not in infos
    observations, rewards, terminated, truncated, infos = envs.step([FINISH, bash("pwd")])
    assert (list(rewards), list(terminated), list(truncated)) == ([1.0, 0.0], [True, False], [False, False])
    assert observations[0] == first[0]
    assert (list(infos["_final_obs"]), list(infos["_final_info"])) == ([True, False], [True, False])
    assert infos["final_obs"][0] == "The task has been marked as finished."
    assert infos["final_info"]["verdict"][0]["resolved"]
    assert list(infos["final_info"]["_verdict"]) == [True, False]
    assert list(infos.get("_verdict", [False, False])) == [False, False]
    observations, rewards, terminated, truncated, infos = envs.step([FINISH, bash("pwd")])
    assert (list(rewards), list(terminated), list(truncated)) == ([0.0, 0.0], [True, False], [False, True])
    assert infos["final_info"]["stop_reason"][1] == "max_turns"
    assert infos["final_info"]["verdict"][0]["status"] == "empty_patch"
    envs.close()


def test_statistics_of_vectors() -> None:
    """Ours, and one that Gymnasium makes of single environments."""
    for mode in (None, "sync"):
        envs = gym.make_vec(ENV, num_envs=2, vectorization_mode=mode, tasks=[row()], max_turns=3)
        counted = VectorStatistics(envs)
        counted.reset(seed=1)
        counted.step([bash(FIX), bash("pwd")])
        _, rewards, terminated, _, infos = counted.step([FINISH, bash("pwd")])
        assert (list(rewards), list(terminated)) == ([1.0, 0.0], [True, False])
        assert (infos["episode"]["r"][0], infos["episode"]["l"][0]) == (1.0, 2)
        assert list(infos["_episode"]) == [True, False]
        counted.close()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_vector_on_an_event_loop(backend: str) -> None:
    async def main() -> None:
        envs = gym.make_vec(ENV, num_envs=2, tasks=[row()], max_turns=3)
        assert isinstance(envs, SkyVectorEnv)
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await anyio.sleep(0.01)
                ticks += 1

        async with anyio.create_task_group() as beside:
            beside.start_soon(tick)
            observations, _ = await envs.areset(seed=3)
            assert "issue" in observations[0]
            before = ticks
            await envs.astep([bash("sleep 0.5"), bash("pwd")])
            assert ticks > before  # the loop goes on meanwhile
            with anyio.move_on_after(1.0) as scope:
                await envs.astep([bash("sleep 600"), bash("pwd")])
            assert scope.cancelled_caught
            beside.cancel_scope.cancel()
        await envs.aclose()
        await envs.aclose()

    anyio.run(main, backend=backend)


def test_vector_of_samples_and_threads() -> None:
    envs = gym.make_vec(ENV, num_envs=2, tasks=[row()], max_turns=2)
    envs.reset(seed=1)
    envs.action_space.seed(1)
    for _ in range(4):
        observations, rewards, *_ = envs.step(envs.action_space.sample())
        assert len(observations) == len(rewards) == 2
    envs.close()


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"max_turn": 5}, "did you mean 'max_turns'"),
        ({"tasks": "buildin"}, "did you mean 'builtin'"),
        ({"render_mode": "human"}, "render_mode"),
    ],
)
def test_wrong_settings_are_named(kwargs: dict[str, Any], named: str) -> None:
    for make in (skyenv.make, gym.make, gym.make_vec):
        with pytest.raises(ConfigError, match=named):
            make(ENV, **kwargs)


def test_wrong_ids_and_vectors_are_named() -> None:
    with pytest.raises(ConfigError, match="did you mean 'SkyRL/SWE-v0'"):
        skyenv.make("SkyRL/SWE-v1")
    for kwargs, named in (({"num_envs": 0}, "num_envs"), ({"autoreset_mode": "always"}, "autoreset_mode")):
        with pytest.raises(ConfigError, match=named):
            gym.make_vec(ENV, tasks=[row()], **kwargs)
    envs = gym.make_vec(ENV, num_envs=2, tasks=[row()])
    with pytest.raises(ConfigError, match="1 actions for 2"):
        envs.step([FINISH])
    with pytest.raises(ConfigError, match="reset_mask"):
        envs.reset(options={"reset_mask": [True]})
    envs.close()


def run(script: str) -> subprocess.Popen[str]:
    """A script with the repair task as ROW, started in the tests' folder."""
    head = "import gymnasium as gym, skyenv, sys\nfrom envs.repair import row\n"
    command = [sys.executable, "-c", head + script]
    return subprocess.Popen(command, cwd=Path(__file__).parent.parent, stdout=subprocess.PIPE, text=True)


def processes(mark: str) -> list[bytes]:
    """Command lines of all processes of this machine that hold `mark`; sandboxes' included."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            lines.append(path.read_bytes())
    return [line for line in lines if mark.encode() in line]


FORGOTTEN = """
env = gym.{make}("SkyRL/SWE-v0", tasks=[row()])
env.reset()
step = {{"name": "execute_bash", "arguments": {{"command": "sleep {mark} & echo started"}}}}
print(env.step({step})[0], flush=True)
{ending}
"""


@pytest.mark.parametrize(
    ("make", "ending", "status"), [("make", "", 0), ("make", "sys.exit(3)", 3), ("make_vec", "raise KeyError", 1)]
)
def test_a_forgotten_close_ends_the_process_and_its_sandboxes(make: str, ending: str, status: int) -> None:
    mark = f"98{status}{len(make)}.125"
    step = "step" if make == "make" else "[step]"
    with run(FORGOTTEN.format(make=make, ending=ending, mark=mark, step=step)) as process:
        output, _ = process.communicate(timeout=300)
    assert "started" in output
    assert process.returncode == status
    assert not processes(f"sleep\0{mark}")


INTERRUPTED = """
env = gym.make("SkyRL/SWE-v0", tasks=[row()])
def bash(command):
    return env.step({"name": "execute_bash", "arguments": {"command": command}})
env.reset()
print("ready", flush=True)
try:
    bash("sleep 97.125")
except KeyboardInterrupt:
    print("interrupted")
try:
    bash("ls")
except skyenv.errors.ResetNeeded:
    print("reset needed")
env.reset()
print(bash("echo again")[0])
env.close()
"""


def test_an_interrupted_step_frees_the_sandbox_and_reset_starts_again() -> None:
    with run(INTERRUPTED) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        while not processes("sleep\0" + "97.125"):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=300)
    assert re.match(r"interrupted\nreset needed\nagain\n", output), output
    assert process.returncode == 0
    assert not processes("sleep\0" + "97.125")


def test_a_node_server_at_a_url() -> None:
    command = [sys.executable, "-m", "skyenv.cli", "serve", "--port", "0", "--token", "secret"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            found = re.search(r"http://\S+", server.stdout.readline())
            assert found is not None
            env = gym.make(ENV, tasks=[row()], sandbox=found[0], token="secret")
            env.reset()
            env.step(bash(FIX))
            assert env.step(FINISH)[1] == 1.0
            env.close()
        finally:
            server.terminate()
