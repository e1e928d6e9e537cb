"""verl's own worker, advantages and policy loss on our rollouts; see tests/adapters/playing for what runs there."""

from __future__ import annotations

from typing import Any

import pytest

from tests.adapters.libraries import run

pytestmark = [pytest.mark.adapter, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERL_USE_EXTERNAL_MODULES", "skyenv.adapters.verl")  # as trainers are told of an estimator
        return run("verl", "tests.adapters.playing.verl_training", tmp_path_factory.mktemp("verl"))


def test_adapter_moves_the_policy_as_verls_trainer_should(found: Any) -> None:
    """The sample that solved its task becomes likelier, its sibling less likely, and only sampled ids count."""
    trained = found["trained"]
    (up,), (down,) = trained["advantages"]
    assert up > 0 > down
    assert up == pytest.approx(-down)
    assert trained["advantages_outside"] == 0
    assert trained["gradient"] > 0
    assert trained["moved"][0] > 0 > trained["moved"][1]


def test_adapter_tells_verl_about_weights_and_samples(found: Any) -> None:
    assert found["meta"] == {"status": ["finish", "finish"], "turns": [2.0, 2.0], "failed": [0.0, 0.0]}
    assert found["steps"] == [[7, 7], [8, 8]]


def test_adapter_asks_verls_servers_with_verls_sampling(found: Any) -> None:
    asked = found["asked"]
    sessions = [request["request_id"] for request in asked]
    assert {sessions.count(session) for session in sessions} == {2}  # both turns of a sample go to one server
    for request in asked:
        assert (request["top_p"], request["top_k"], request["repetition_penalty"]) == (1.0, -1, 1.0)
        assert request["logprobs"] is True
        assert request["max_tokens"] == 2048
        assert request["stop_token_ids"]
        assert request["temperature"] == 1.0


def test_adapter_fills_verls_queue(found: Any) -> None:
    """One row a sample under verl's key, each column as long as its ids, the score once, the weights' steps beside."""
    queued = found["queued"]
    assert queued["states"] == {"a": "finished", "b": "finished"}
    assert {key: row["score"] for key, row in queued["rows"].items()} == {
        "a_0_0": 1.0,
        "a_1_0": 0.0,
        "b_0_0": 1.0,
        "b_1_0": 0.0,
    }
    for row in queued["rows"].values():
        assert len(set(row["lengths"])) == 1
        assert row["trained"] > 0
        assert row["steps"] == [7, 8]


def test_adapter_leaves_a_failed_sample_out(found: Any) -> None:
    """verl's newer worker takes any number of rows; its padded one gets a row that trains nothing."""
    left = found["left_out"]
    assert left["states"] == {"a": "finished", "b": "finished"}
    assert sorted(left["rows"]) == ["a_0_0", "b_0_0"]
    good, failed = found["failed"][:2]
    assert (good["reward"], sum(good["loss_mask"]) > 0) == (1.0, True)
    assert (failed["reward"], failed["loss_mask"], failed["logprobs"]) == (0.0, [0], [0.0])


def test_adapter_keeps_failures_of_the_padded_worker_out_of_the_baseline(found: Any) -> None:
    """Two samples solved their task, two failed: there is nothing to learn, though verl's own baseline sees zeros."""
    assert found["baselines"]["skyenv_grpo"] == [0.0, 0.0, 0.0, 0.0]
    assert found["baselines"]["grpo"][0] > 0


def test_adapter_names_what_is_wrong(found: Any) -> None:
    no_task, unknown, narrow, short = found["mistakes"]
    assert "column task_id" in no_task
    assert "no-such-task" in unknown
    assert "data.max_response_length: 512" in narrow
    assert "data.max_prompt_length: 16" in short
    assert all(message.startswith("ConfigError") for message in found["mistakes"])


def test_adapter_frees_what_a_cancelled_sample_held(found: Any) -> None:
    assert found["cancelled"] == {"cancelled": True, "during": 1, "after": 0}


def test_adapter_recipe_is_one_that_verl_takes(found: Any) -> None:
    """Its settings are verl's, and its agent loop is made of what it says: the tasks are loaded, the limits fit."""
    assert found["recipe"]["settings"] > 30
    assert "'no-such-task' is none of the" in found["recipe"]["said"]
