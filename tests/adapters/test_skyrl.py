"""SkyRL's own functions on our generator's output, and its gym; see tests/adapters/playing for what runs there."""

from __future__ import annotations

from typing import Any

import pytest

from tests.adapters.libraries import run

pytestmark = [pytest.mark.adapter, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run("skyrl", "tests.adapters.playing.skyrl_training", tmp_path_factory.mktemp("skyrl"))


def test_adapter_moves_the_policy_as_skyrls_trainer_should(found: Any) -> None:
    """Samples that solved their task become likelier, their siblings less likely."""
    trained = found["trained"]
    for up, down in (trained["advantages"][:2], trained["advantages"][2:]):
        assert up > 0 > down
        assert up == pytest.approx(-down)
    assert trained["gradient"] > 0
    assert sum(trained["moved"][::2]) > 0 > sum(trained["moved"][1::2])
    assert found["stop_reasons"] == ["stop"] * 4
    assert found["metrics"]["generate/failed"] == 0


def test_adapter_asks_skyrls_servers_with_skyrls_sampling(found: Any) -> None:
    asked = found["asked"]
    sessions = [request["session"] for request in asked]
    assert {sessions.count(session) for session in sessions} == {2}  # both turns of a sample go to one server
    assert sorted(found["finished"]) == sorted(set(sessions))
    for request in asked:
        assert (request["temperature"], request["top_p"], request["top_k"]) == (1.0, 1.0, -1)
        assert (request["model"], request["max_tokens"], request["logprobs"]) == ("policy", 2048, 1)
        assert request["stop_token_ids"]


def test_adapter_keeps_failures_out_of_the_baseline(found: Any) -> None:
    """A failed sample trains nothing and has its siblings' mean in training, nothing in evaluation."""
    failed = found["failed"]
    assert failed["rewards"] == [1.0, 1.0, 1.0, 1.0]
    assert [sum(mask) > 0 for mask in failed["loss_masks"]] == [True, False, True, False]
    assert failed["stop_reasons"] == ["stop", "EngineError", "stop", "EngineError"]
    assert found["evaluated"] == [1.0, 0.0, 1.0, 0.0]


def test_adapter_names_the_trajectory_of_each_step(found: Any) -> None:
    """What SkyRL's step-wise training needs of rows, failed ones included."""
    assert found["steps"] == [["0", 0, True], ["0", 1, True], ["1", 0, True], ["1", 1, True]]


def test_adapter_names_what_is_wrong(found: Any) -> None:
    no_task, unknown = found["mistakes"]
    assert "column task_id" in no_task
    assert "no-such-task" in unknown
    assert all(message.startswith("ConfigError") for message in found["mistakes"])


def test_adapter_frees_what_a_cancelled_batch_held(found: Any) -> None:
    assert found["cancelled"] == {"cancelled": True, "during": 1, "after": 0, "finished": 2}


def test_adapter_is_an_environment_of_skyrls_gym(found: Any) -> None:
    gym = found["gym"]
    assert gym["roles"][0] == "system"
    assert "execute_bash" in gym["prompt"]
    none, mended, done = gym["steps"]
    assert none[:2] == mended[:2] == [0.0, False]
    assert "No tool call" in none[2][0]["content"]
    assert done == [1.0, True, []]
    assert gym["metrics"] == {"turns": 3, "reward": 1.0}
