"""Every registered environment: what is missing is told with a line to copy, and Gymnasium's wrappers work on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gymnasium
import gymnasium as gym
import pytest
from gymnasium.wrappers import RecordEpisodeStatistics, TimeLimit
from gymnasium.wrappers.vector import RecordEpisodeStatistics as VectorStatistics

import skyenv
from skyenv import formats
from skyenv.envs.raw_text import NO_CALL, RawText
from skyenv.errors import ConfigError
from skyenv.registry import ENVIRONMENTS
from skyenv.types import ToolCall
from tests.tasks.public_rows import write_harbor

SAY = formats.get("hermes").render_call
MADE: Mapping[str, Mapping[str, Any]] = {  # tests/adapters plays the fourth, which needs OpenEnv
    "SkyRL/SWE-v0": {},
    "SkyRL/Agent-v0": {"command": "true"},
    "SkyRL/Terminal-v0": {"tasks": "my-tasks"},
}
NEEDS = {
    "SkyRL/Agent-v0": "command: ",
    "SkyRL/Terminal-v0": "tasks: ",
    "SkyRL/OpenEnv-v0": "url: ",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A working directory with a terminal task in `my-tasks`."""
    files: dict[str, str | None] = {"task.toml": "", "environment__Dockerfile": None}
    write_harbor(tmp_path / "my-tasks" / "greet", **files)
    monkeypatch.chdir(tmp_path)
    return


def test_all_ids_are_here() -> None:
    assert ENVIRONMENTS.keys() == {*MADE, "SkyRL/OpenEnv-v0"}


@pytest.mark.parametrize("make", [skyenv.make, gym.make, gym.make_vec])
@pytest.mark.parametrize("env_id", NEEDS)
def test_what_is_missing_is_told_with_a_line_to_copy(env_id: str, make: Any, folder: None) -> None:
    with pytest.raises(ConfigError, match=f"^{NEEDS[env_id]}") as caught:
        make(env_id)
    line = str(caught.value).splitlines()[-1].strip()
    assert line.startswith(f"gymnasium.make({env_id!r}, ")
    if env_id in MADE:
        eval(line, {"gymnasium": gymnasium}).close()
    else:
        assert line == "gymnasium.make('SkyRL/OpenEnv-v0', url=\"http://127.0.0.1:8000\")"


@pytest.mark.parametrize("env_id", MADE)
def test_wrappers(env_id: str, folder: None) -> None:
    env = RecordEpisodeStatistics(TimeLimit(RawText(gym.make(env_id, **MADE[env_id]), "hermes"), max_episode_steps=2))
    env.reset(seed=1)
    observation, *_ = env.step("Let me think.")
    assert observation == NO_CALL
    _, _, terminated, _, info = env.step(SAY(ToolCall("finish", {})))
    assert (terminated, info["verdict"]["reward"], info["episode"]["l"]) == (True, 0.0, 2)
    env.reset(seed=1)
    assert [env.step("Hm.")[3] for _ in range(2)] == [False, True]
    env.close()


@pytest.mark.parametrize("env_id", MADE)
def test_vectors(env_id: str, folder: None) -> None:
    envs = VectorStatistics(gym.make_vec(env_id, num_envs=2, **MADE[env_id]))
    observations, _ = envs.reset(seed=1)
    assert len(observations) == 2
    finish, look = ToolCall("finish", {}), ToolCall("execute_bash", {"command": "true"})
    actions = [{"name": call.name, "arguments": dict(call.arguments)} for call in (finish, look)]
    _, rewards, terminations, truncations, _ = envs.step(actions)
    assert (list(rewards), list(terminations), list(truncations)) == ([0.0, 0.0], [True, False], [False, False])
    envs.close()
