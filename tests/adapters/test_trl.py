"""TRL's own trainer on our rollouts: the same rows as our pipeline's, and steps that change the weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import torch
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from sky_trainer.tiny import make_model
from skyenv.adapters.trl import TRLRollouts
from skyenv.errors import ConfigError
from tests.adapters import policies

TOKENIZER = policies.tokenizer()


@pytest.fixture(scope="module")
def rollouts() -> Iterator[TRLRollouts]:
    with TRLRollouts(policies.ROLLOUTS, policies.HalfRight(policies.renderer(TOKENIZER)), TOKENIZER) as rollouts:
        yield rollouts


def asking(group_size: int) -> Any:
    """What of a trainer a `rollout_func` looks at."""
    return SimpleNamespace(model=SimpleNamespace(training=True), num_generations=group_size, num_generations_eval=1)


def test_adapter_rows_are_our_own(rollouts: TRLRollouts) -> None:
    prompts = [task_id for task_id in policies.TASKS for _ in range(2)]
    output = rollouts(prompts, asking(2))
    rows = anyio.run(policies.own_rows, TOKENIZER, 2)
    assert [row.task_id for row in rows] == prompts
    assert [row.reward for row in rows] == [1.0, 0.0, 1.0, 0.0]
    assert output["env_reward"] == [row.reward for row in rows]
    for name in ("prompt_ids", "completion_ids", "logprobs"):
        assert output[name] == [getattr(row, name) for row in rows]
    assert output["env_mask"] == [row.loss_mask for row in rows]


def test_adapter_takes_a_rank_that_holds_a_part_of_a_group(rollouts: TRLRollouts) -> None:
    prompts = [policies.TASKS[0]] * 3 + [policies.TASKS[1]]
    output = rollouts(prompts, asking(2))
    assert output["task_id"] == prompts
    assert len(rollouts.groups) == 3


def test_adapter_trains_under_trls_own_trainer(rollouts: TRLRollouts, tmp_path: Path) -> None:
    model = make_model(TOKENIZER, hidden=32, layers=1, seed=0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    args = GRPOConfig(
        output_dir=str(tmp_path), max_steps=1, num_generations=2, per_device_train_batch_size=4, learning_rate=1e-2,
        use_cpu=True, bf16=False, report_to="none", logging_steps=1, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=model, reward_funcs=rollouts.reward, args=args, train_dataset=rollouts.dataset(),
        processing_class=TOKENIZER, rollout_func=rollouts,
    )  # fmt: skip
    trainer.train()
    logged = trainer.state.log_history[0]
    assert logged["reward"] == 0.5
    assert logged["grad_norm"] > 0
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_adapter_names_what_is_wrong(rollouts: TRLRollouts) -> None:
    with pytest.raises(ConfigError, match="no-such-task"):
        rollouts(["no-such-task"], asking(1))
    with pytest.raises(ConfigError, match="no task id"):
        rollouts([[{"role": "user", "content": "hi"}]], asking(1))  # type: ignore[list-item]
    closed = TRLRollouts(policies.ROLLOUTS, policies.HalfRight(policies.renderer(TOKENIZER)), TOKENIZER)
    with pytest.raises(ConfigError, match="with"):
        closed([policies.TASKS[0]], asking(1))
