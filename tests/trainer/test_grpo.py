"""The contract between our rollouts and the released TRL: what reaches the loss, and what does not."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from sky_trainer.config import from_mapping
from sky_trainer.grpo import grpo_config
from sky_trainer.record import last_checkpoint
from skyenv.errors import ConfigError, EngineError, SkyEnvError
from skyenv.trajectory_io import append_trajectories, read_trajectories

from .conftest import ENVIRONMENT_WORDS, GROUP, MakeTrainer, Player


def score(trainer: Any, groups: int = 2) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """One generation batch as TRL makes it; returns its inputs and the tensors that the loss gets."""
    trainer.model.train()
    inputs = [dict(trainer.train_dataset[g]) for g in range(groups) for _ in range(GROUP)]
    return inputs, trainer._generate_and_score_completions(inputs)


def gradient(trainer: Any, batch: dict[str, Any]) -> torch.Tensor:
    trainer.model.zero_grad()
    trainer.current_gradient_accumulation_steps = 1
    trainer._compute_loss(trainer.model, batch).backward()
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])


def test_prompts_come_repeated_and_are_run_once_a_group(player: Player, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(player)
    _, batch = score(trainer)
    assert player.asked == [(["alpha", "beta"], GROUP)]
    assert batch["completion_ids"].shape[0] == 2 * GROUP


def test_ids_in_the_batch_are_the_engines(player: Player, make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Through a trajectory file and back: drift 0."""
    _, batch = score(make_trainer(player))
    path = tmp_path / "trajectories.jsonl"
    append_trajectories(path, [t for group in player.batches[0] for t in group.trajectories])
    for row, trajectory in enumerate(read_trajectories(path)):
        prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist()
        completion = batch["completion_ids"][row][batch["completion_mask"][row].bool()].tolist()
        segment = trajectory.segments[0]
        assert prompt + completion == segment.token_ids
        mask = batch["tool_mask"][row][: len(completion)].tolist()
        assert mask == segment.loss_mask[len(prompt) :]
        assert 0 in mask
        assert 1 in mask
        logprobs = batch["sampling_per_token_logps"][row][: len(completion)]
        assert torch.equal(logprobs, torch.tensor(segment.logprobs[len(prompt) :]))


def test_sampler_and_trainer_agree_on_logprobs(player: Player, make_trainer: MakeTrainer) -> None:
    _, batch = score(make_trainer(player))
    sampled = (batch["tool_mask"] * batch["completion_mask"]).bool()
    difference = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"])[sampled]
    assert sampled.sum() > 40
    assert difference.abs().max() < 1e-4


def test_agreement_holds_at_another_temperature(player: Player, make_trainer: MakeTrainer) -> None:
    """The reverse too: a sampler at another temperature than the trainer's is seen as a mismatch."""
    rollout = {"group_size": GROUP, "groups_per_step": 2, "max_context": 2048, "temperature": 0.5}
    _, batch = score(make_trainer(player, {"rollout": rollout}))
    sampled = (batch["tool_mask"] * batch["completion_mask"]).bool()
    assert (batch["old_per_token_logps"] - batch["sampling_per_token_logps"])[sampled].abs().max() > 1e-2


def test_importance_ratio_is_there_and_truncated(player: Player, make_trainer: MakeTrainer) -> None:
    def surer(groups: Any) -> None:
        segment = groups[0].trajectories[0].segments[0]
        first = segment.prompt_length
        segment.logprobs[first] -= 5.0

    player.edit = surer
    _, batch = score(make_trainer(player))
    ratio = batch["importance_sampling_ratio"]
    assert ratio.shape == batch["completion_ids"].shape
    assert ratio[0, 0] == pytest.approx(3.0)  # exp(5), cut at TRL's clip
    assert ratio[1:].sub(1).abs().max() < 1e-3


def test_group_advantages_by_hand(player: Player, make_trainer: MakeTrainer) -> None:
    rewards = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.5, 0.0]]
    player.reward = lambda group, sample: rewards[group][sample]
    _, batch = score(make_trainer(player))
    expected = [0.75, -0.25, -0.25, -0.25, 0.375, 0.375, -0.125, -0.625]
    assert batch["advantages"].tolist() == pytest.approx(expected)


def test_scaled_group_advantages_by_hand(player: Player, make_trainer: MakeTrainer) -> None:
    rewards = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]
    player.reward = lambda group, sample: rewards[group][sample]
    _, batch = score(make_trainer(player, scale_rewards="group"))
    expected = [1.5, -0.5, -0.5, -0.5, 0.0, 0.0, 0.0, 0.0]  # mean 1/4, sample standard deviation 1/2
    assert batch["advantages"].tolist() == pytest.approx(expected, abs=1e-3)


def test_failed_row_is_out_of_the_baseline_and_has_no_gradient(player: Player, make_trainer: MakeTrainer) -> None:
    rewards = [[1.0, 0.0, None, 0.0], [1.0, 0.0, 1.0, 0.0]]
    player.reward = lambda group, sample: rewards[group][sample]
    trainer = make_trainer(player)
    _, batch = score(trainer)
    third = 1 / 3
    assert batch["advantages"].tolist() == pytest.approx([2 * third, -third, 0, -third, 0.5, -0.5, 0.5, -0.5])
    assert batch["tool_mask"][2].mul(batch["completion_mask"][2]).sum() == 0
    assert trainer._batch.rows[2].status == "SandboxLost"
    full = gradient(trainer, batch)
    without = {k: v[[0, 1, 3, 4, 5, 6, 7]] if torch.is_tensor(v) and v.dim() else v for k, v in batch.items()}
    assert full.abs().max() > 0
    assert torch.allclose(full, gradient(trainer, without), atol=1e-7)
    alone = {k: v[[2]] if torch.is_tensor(v) and v.dim() else v for k, v in batch.items()}
    assert gradient(trainer, alone).abs().max() == 0


def test_all_failed_gives_zero_gradient_and_no_nan(player: Player, make_trainer: MakeTrainer) -> None:
    player.reward = lambda group, sample: None
    trainer = make_trainer(player)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    assert trainer.state.global_step == 1
    logged = trainer.state.log_history[0]
    assert logged["rollout/masked"] == 1.0
    assert logged["grad_norm"] == 0.0
    assert math.isfinite(logged["loss"])
    for old, new in zip(before, trainer.model.parameters(), strict=True):
        assert torch.equal(old, new)


def test_environment_tokens_contribute_exactly_nothing(player: Player, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(player)
    _, batch = score(trainer)
    sampled = batch["tool_mask"] * batch["completion_mask"]
    assert batch["num_items_in_batch"] == sampled.sum()
    batch["advantages"] = 1 - sampled.float()  # an advantage on the environment's ids alone
    assert gradient(trainer, batch).abs().max() == 0
    batch["advantages"] = sampled.float()
    assert gradient(trainer, batch).abs().max() > 0


def test_masked_environment_words_are_in_the_row(player: Player, make_trainer: MakeTrainer, tokenizer: Any) -> None:
    _, batch = score(make_trainer(player))
    context = batch["completion_ids"][0][batch["tool_mask"][0] == 0]
    assert tokenizer.decode(context) == ENVIRONMENT_WORDS


def test_training_moves_weights_and_counts_versions(player: Player, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(player, {"steps": 3})
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    assert any(not torch.equal(old, new) for old, new in zip(before, trainer.model.parameters(), strict=True))
    versions = [{turn.policy_version for g in b for t in g.trajectories for turn in t.turns} for b in player.batches]
    assert versions == [{0}, {1}, {2}]
    assert {t for tasks, _ in player.asked for t in tasks} == {"alpha", "beta", "gamma", "delta"}
    assert trainer.state.log_history[0]["sampling/sampling_logp_difference/max"] < 1e-4


def test_learning_works_through_the_trainer(player: Player, make_trainer: MakeTrainer) -> None:
    """A reward that the policy can reach in few steps: prefer ids from the lower half of the vocabulary."""

    def share_of_low_ids(groups: Any) -> None:
        for trajectory in (t for group in groups for t in group.trajectories):
            segment = trajectory.segments[0]
            sampled = [i for i, mask in zip(segment.token_ids, segment.loss_mask, strict=True) if mask]
            trajectory.reward = sum(i < 150 for i in sampled) / len(sampled)

    player.edit = share_of_low_ids
    trainer = make_trainer(player, {"steps": 28}, learning_rate=3e-2, scale_rewards="group")
    trainer.train()
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2


@pytest.mark.parametrize("fault", ["logprob missing", "id outside", "mask of 2", "not a number"])
def test_broken_rows_never_reach_trl(player: Player, make_trainer: MakeTrainer, fault: str) -> None:
    def break_row(groups: Any) -> None:
        segment = groups[1].trajectories[2].segments[0]
        if fault == "logprob missing":
            segment.logprobs.pop()
        elif fault == "id outside":
            segment.token_ids[-1] = 10**6
        elif fault == "mask of 2":
            segment.loss_mask[-1] = 2
        else:
            segment.logprobs[-1] = float("nan")

    player.edit = break_row
    with pytest.raises(SkyEnvError, match=r"trajectory 'beta' \(group 1, sample 2\)"):
        score(make_trainer(player))


def test_missing_rows_are_an_error(player: Player, make_trainer: MakeTrainer) -> None:
    player.edit = lambda groups: groups[0].trajectories.pop()
    with pytest.raises(SkyEnvError, match="7 trajectories for 8 prompts"):
        score(make_trainer(player))


def test_split_groups_are_an_error(player: Player, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(player)
    trainer.model.train()
    inputs = [dict(trainer.train_dataset[i % 2]) for i in range(2 * GROUP)]
    with pytest.raises(SkyEnvError, match="whole groups"):
        trainer._generate_and_score_completions(inputs)


def test_an_engine_that_returns_text_only_cannot_train(player: Player, make_trainer: MakeTrainer) -> None:
    def forget_ids(groups: Any) -> None:
        for trajectory in (t for group in groups for t in group.trajectories):
            trajectory.exact = False

    player.edit = forget_ids
    with pytest.raises(ConfigError, match="no token ids"):
        score(make_trainer(player))


def test_an_engine_that_raises_ends_training_with_its_type(make_trainer: MakeTrainer) -> None:
    def broken(tasks: Any, size: int) -> Any:
        raise EngineError("server answered 500")

    with pytest.raises(EngineError, match="server answered 500"):
        make_trainer(broken).train()


def test_save_and_resume_goes_on(player: Player, make_trainer: MakeTrainer, engine: Any, tmp_path: Path) -> None:
    make_trainer(player, {"steps": 2, "save_every": 1}).train()
    checkpoint = last_checkpoint(tmp_path / "run")
    assert checkpoint is not None
    assert checkpoint.name == "checkpoint-2"
    player.batches.clear()
    resumed = make_trainer(player, {"steps": 4, "save_every": 1})
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.state.global_step == 4
    assert [t.turns[0].policy_version for b in player.batches for t in b[0].trajectories[:1]] == [2, 3]
    assert last_checkpoint(tmp_path / "run").name == "checkpoint-4"


def test_resumed_training_equals_uninterrupted_training(
    player: Player, make_trainer: MakeTrainer, model: Any, engine: Any, tmp_path: Path
) -> None:
    """Bit for bit: weights, optimizer, schedule and the order of tasks, given the same rollouts at the same step."""
    start = {name: value.clone() for name, value in model.state_dict().items()}
    played: dict[str, Any] = {}
    asked: list[str] = []

    def collect(tasks: Any, size: int) -> Any:
        names = " ".join(task.task_id for task in tasks)
        asked.append(names)
        if names not in played:
            played[names] = player(tasks, size)
        return played[names]

    options = {"learning_rate": 1e-2, "lr_scheduler_type": "linear"}
    make_trainer(collect, {"steps": 4, "save_every": 2, "micro_batch": 2}, **options).train()
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    order = list(asked)
    model.load_state_dict(start)
    engine.policy_version = 0
    resumed = make_trainer(collect, {"steps": 4, "save_every": 2, "micro_batch": 2}, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert asked[4:] == order[2:]
    assert any(not torch.equal(whole[name], start[name]) for name in start)
    for name, value in resumed.model.state_dict().items():
        assert torch.equal(value, whole[name]), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learing_rate": 1e-4}, "unknown key 'grpo.learing_rate'; did you mean 'grpo.learning_rate'"),
        ({"temperature": 0.5}, "grpo.temperature is set by rollout.temperature"),
        ({"learning_rate": "fast"}, "grpo.learning_rate is 'fast'; write a number"),
        ({"loss_type": 3}, "grpo.loss_type is 3; write text"),
        ({"mask_truncated_completions": True}, "set by rollout.stop_policy"),
        ({"loss_type": "grp"}, "grpo.loss_type is 'grp'; it must be one of grpo, dr_grpo, dapo"),
        ({"importance_sampling_level": "seq"}, "grpo.importance_sampling_level is 'seq'; it must be one of token"),
        ({"scale_rewards": "std"}, "grpo.scale_rewards is 'std'; it must be one of group, batch, none"),
        ({"vllm_importance_sampling_mode": "token"}, "is 'token'; it must be one of token_truncate, token_mask"),
        ({"vllm_importance_sampling_mode": "sequence_mask", "loss_type": "vespo"}, "vespo weighs whole sequences"),
        ({"beta": -1}, "grpo.beta is -1.0; it must be at least 0"),
        ({"learning_rate": -1e-6}, "grpo.learning_rate is -1e-06; it must be at least 0"),
        ({"epsilon": -0.2}, "grpo.epsilon is -0.2; it must be at least 0"),
        ({"num_iterations": 0}, "grpo.num_iterations is 0; it must be at least 1"),
        ({"top_entropy_quantile": 3}, "grpo.top_entropy_quantile is 3.0; it is a share"),
        ({"report_to": "wandbb"}, "grpo.report_to names 'wandbb'; known are .*did you mean 'wandb'"),
        ({"report_to": ["mlflow", "comet_ml"]}, "which is not installed here: pip install"),
        ({"lr_scheduler_type": "cosin"}, "grpo: cosin is not a valid SchedulerType"),
        ({"deepspeed": "gone.json"}, "grpo: .*deepspeed"),
    ],
)
def test_wrong_grpo_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        grpo_config(from_mapping({"grpo": options}))


def test_numbers_written_as_yaml_text_are_numbers() -> None:
    assert grpo_config(from_mapping({"grpo": {"learning_rate": "5e-4"}})).learning_rate == 5e-4
