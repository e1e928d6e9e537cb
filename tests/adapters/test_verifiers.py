"""verifiers' own classes around our environments, sandboxes and renderer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sky_trainer.tiny import make_model
from tests.adapters import policies
from tests.adapters.libraries import run

pytestmark = [pytest.mark.adapter, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run("verifiers", "tests.adapters.playing.verifiers_both", tmp_path_factory.mktemp("verifiers"))


def test_adapter_runs_a_program_of_anothers_in_the_sandbox(seen: Any) -> None:
    played = seen["program"]
    program = played["info"]["program"]
    assert (played["ok"], played["reward"], played["verdict"]) == (True, 1.0, "resolved")
    assert program["endpoint"].startswith("http://127.0.0.1:41081/")
    assert (program["stdout"].strip(), program["stderr"]) == ("", "bad news\n")
    assert (program["head"], program["alive"]) == ("\nimport", True)
    assert program["missing"].startswith("SandboxError: reading no-such-file")
    assert played["asked"][0]["messages"] == [{"role": "user", "content": "What should I run?"}]


def test_adapter_what_a_limit_or_a_deadline_ends_is_graded(seen: Any) -> None:
    for name, stop in (("limit", "max_turns"), ("timeout", "agent_timeout"), ("finished", "agent_completed")):
        played = seen["failures"][name]
        assert (played["ok"], played["stop"], played["errors"]) == (True, stop, [])
        assert (played["reward"], played["verdict"], played["turns"]) == (0.0, "empty_patch", 1)
        assert played["record"]
    assert seen["failures"]["finished"]["info"]["stop_reason"] == "finish"


def test_adapter_a_failure_is_an_error_and_no_sample(seen: Any) -> None:
    provider, ungraded = seen["failures"]["provider"], seen["failures"]["ungraded"]
    assert (provider["ok"], provider["verdict"]) == (False, None)
    assert provider["errors"][0][0] == "ProviderError"
    assert ungraded["ok"] is False
    assert "not valid for training" in ungraded["errors"][0][1]


def test_adapter_tells_other_clients_of_the_tools_in_the_system_message(seen: Any) -> None:
    asked = seen["failures"]["finished"]["asked"][0]
    assert "execute_bash" in asked["messages"][0]["content"]
    assert "tools" not in asked
    assert asked["max_tokens"] == 64


def test_adapter_frees_the_sandbox_of_a_cancelled_episode(seen: Any) -> None:
    assert seen["cancelled"] == [1, 0]


def test_adapter_names_what_is_wrong(seen: Any) -> None:
    errors = {name: found[0][1] for name, found in seen["misused"].items()}
    assert "sampling.max_tokens" in errors["unset"]
    assert "env_options.prompt" in errors["prompted"]
    assert "no-such-task" in errors["unknown"]


def test_adapter_renderer_extends_what_was_sampled(seen: Any) -> None:
    found = seen["renderer"]
    assert found["same"]
    assert found["ours"]
    assert found["owners"] == [[0, 1, 2, 3, 4], [-1, 0, 1]]
    assert (found["answers"], found["text"]) == (None, "answer")


def test_adapter_a_step_on_its_samples_makes_what_was_rewarded_likelier(seen: Any) -> None:
    """verifiers has no trainer: its branches, as ids, mask and reward, under a tiny model's policy gradient."""
    rows = seen["rows"]
    assert [row["reward"] for row in rows] == [1.0, 0.0, 1.0, 0.0]
    model = make_model(policies.tokenizer(), hidden=32, layers=1, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = [logprob(model, row) for row in rows]
    loss = -sum((row["reward"] - 0.5) * value for row, value in zip(rows, before, strict=True))
    loss.backward()
    optimizer.step()
    after = [logprob(model, row) for row in rows]
    gained = [(new - old).item() for old, new in zip(before, after, strict=True)]
    assert gained[0] > gained[1]
    assert gained[2] > gained[3]


def logprob(model: Any, row: dict[str, Any]) -> torch.Tensor:
    """Mean logprob of a row's sampled ids."""
    ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
    mask = torch.tensor([0] * len(row["prompt_ids"]) + row["loss_mask"])[1:]
    logits = model(ids).logits[0, :-1].log_softmax(-1)
    return (logits.gather(-1, ids[0, 1:, None])[:, 0] * mask).sum() / mask.sum()
