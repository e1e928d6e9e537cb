"""OpenEnv's own classes on both sides: what its environments are to us, and ours to its clients."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import skyenv
from skyenv.envs.raw_text import NO_CALL
from skyenv.errors import ConfigError
from tests.adapters import policies
from tests.adapters.libraries import run

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run("openenv", "tests.adapters.playing.openenv_both", tmp_path_factory.mktemp("openenv"))


@pytest.mark.adapter
def test_adapter_an_action_of_its_own_is_one_tool(seen: Any) -> None:
    played = seen["own_action"]
    assert played["solved"]["observations"] == ["Higher.", "Lower.", "Right."]
    assert played["solved"]["reward"] == 2.0
    assert played["solved"]["stop_reason"] == "finish"
    assert "metadata" not in played["parameters"]["properties"]
    assert played["parameters"]["required"] == ["number"]
    observation, info, text, reward, terminated, truncated, ended = played["gymnasium"]
    assert (observation, info["task_id"], text) == ("A number from 1 to 9.", "seven", "Right.")
    assert (reward, terminated, truncated, ended["reward"]) == (1.0, True, False, 1.0)
    assert [step[0] for step in played["wrapped"]] == [NO_CALL, "Higher.", "Lower.", "Right."]
    assert [step[2] for step in played["wrapped"]] == [False, False, False, True]
    assert played["wrapped"][-1][-1] == played["solved"]["reward"]


@pytest.mark.adapter
def test_adapter_what_a_budget_ends_keeps_its_rewards(seen: Any) -> None:
    budget = seen["own_action"]["budget"]
    assert (budget["reward"], budget["stop_reason"]) == (1.0, "max_turns")
    assert budget["verdict"]["rewards"] == [0.5, 0.5]
    assert seen["mcp_tools"]["reward"] == 0.0


@pytest.mark.adapter
def test_adapter_a_wrong_action_is_an_observation_and_a_crash_a_failure(seen: Any) -> None:
    invalid, crashed = seen["own_action"]["invalid"], seen["own_action"]["crashed"]
    assert invalid["reward"] == 1.0
    assert "must be an integer" in invalid["observations"][0]
    assert "no tool named" in invalid["observations"][1]
    assert (crashed["reward"], crashed["failure"]) == (None, ["EnvError", "the environment: out of cards"])


@pytest.mark.adapter
def test_adapter_tools_of_mcp_are_tools(seen: Any) -> None:
    assert seen["mcp_tools"]["observations"][0] == "5"
    assert "needs the parameter 'b'" in seen["mcp_tools"]["observations"][1]


@pytest.mark.adapter
def test_adapter_our_environment_under_openenvs_own_client(seen: Any) -> None:
    played = seen["their_client"]
    assert "finish" in played["tools"]
    assert played["required"] == ["command"]
    assert played["prompt"]
    text, reward, done, metadata = played["step"]
    assert "ranges.py" in text
    assert (reward, done, metadata["turn"]) == (None, False, 1)
    assert played["state"] == 1
    assert played["end"] == [0.0, True, "empty_patch", policies.TASKS[1]]
    unknown, misspelt, over = played["refused"]
    assert "no-such-task" in unknown
    assert "tsak" in misspelt
    assert "call reset" in over


@pytest.mark.adapter
def test_adapter_grades_what_a_budget_ended_even_in_the_middle_of_a_call(seen: Any) -> None:
    for name, reason in (("slow", "wall_clock"), ("idle", "max_turns")):
        played = seen["budgets"][name]
        assert (played["reward"], played["stop_reason"], played["failure"]) == (0.0, reason, None)
        assert played["verdict"]["status"] == "empty_patch"


@pytest.mark.adapter
def test_adapter_a_failure_of_the_server_is_no_sample(seen: Any) -> None:
    played = seen["failing"]
    assert (played["reward"], played["stop_reason"]) == (None, "sandbox_error")
    kind, message = played["failure"]
    assert kind == "SandboxError"
    assert "DeadlineExceeded: execute_bash did not return within 1 s" in message
    assert seen["capacity"]["busy"].startswith("SandboxUnavailable: Server at capacity")
    assert seen["capacity"]["then"] == "A number from 1 to 9."
    assert seen["capacity"]["closed"].startswith("SandboxUnavailable")


@pytest.mark.adapter
def test_adapter_frees_the_sandbox_of_a_call_that_nobody_waits_for(seen: Any) -> None:
    assert seen["cancelled"] == [1, 0]


@pytest.mark.adapter
def test_adapter_asks_for_the_token(seen: Any) -> None:
    session, tasks = seen["guarded"]
    assert session.startswith("SandboxUnavailable")
    assert "403" in session
    assert "401" in tasks


@pytest.mark.adapter
def test_adapter_names_what_is_wrong(seen: Any) -> None:
    url, empty, token, task = seen["misused"]
    assert url.startswith("ConfigError: url")
    assert empty.startswith("ConfigError: tasks")
    assert token.startswith("ConfigError: token")
    assert "no-such-task" in task
    assert "501" in seen["own_action"]["no task list"]


def test_adapter_without_the_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openenv", None)
    monkeypatch.delitem(sys.modules, "skyenv.adapters.openenv_client", raising=False)
    with pytest.raises(ConfigError, match=r"skyenv\[openenv\]"):
        skyenv.make("SkyRL/OpenEnv-v0", url="http://127.0.0.1:8000")
