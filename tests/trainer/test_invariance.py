"""The step that is taken does not depend on how a batch is cut: micro-batches, rows of a trajectory, silent samples."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from skyenv.types import StopReason

from .conftest import GROUP, MakeTrainer, Player, once
from .test_grpo import gradient, score
from .test_losses import uneven

SGD = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
EVERY_LOSS = ("dapo", "grpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")
Step = Callable[..., torch.Tensor]


@pytest.fixture
def step(player: Player, make_trainer: MakeTrainer, model: Any) -> Step:
    """One optimizer step from the same weights on the same trajectories; returns how the weights changed."""
    uneven(player)
    start = copy.deepcopy(model.state_dict())
    collect = once(player)

    def take(micro_batch: int = 8, rows: str = "trajectory", **options: Any) -> torch.Tensor:
        model.load_state_dict(start)
        bound = {"epsilon_high": 5.0} if options.get("loss_type") == "cispo" else {}
        rollout = {"group_size": GROUP, "groups_per_step": 2, "max_context": 64, "max_tokens_per_turn": 16}
        config = {"micro_batch": micro_batch, "rollout": {**rollout, "rows": rows}, **options.pop("config", {})}
        make_trainer(collect, config, **SGD, **bound, **options).train()
        return torch.cat([(p.detach() - start[name]).flatten() for name, p in model.named_parameters()])

    return take


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return float(one.abs().max()) > 1e-4 and torch.allclose(one, other, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("loss_type", EVERY_LOSS)
def test_micro_batches(loss_type: str, step: Step) -> None:
    """1 x 8, 2 x 4 and 8 x 1 rows, with an entropy bonus: it is a mean over tokens, not over micro-batches."""
    whole, half, single = (step(size, loss_type=loss_type, entropy_coef=0.1) for size in (8, 4, 1))
    assert same(whole, half)
    assert same(whole, single)


@pytest.mark.parametrize("loss_type", [loss for loss in EVERY_LOSS if loss != "vespo"])
def test_a_row_a_turn_is_the_step_of_a_row_a_trajectory(loss_type: str, step: Step) -> None:
    """Each turn of these trajectories sees all before it, so cutting them changes no probability, only the rows."""
    whole = step(8, loss_type=loss_type, entropy_coef=0.1)
    for micro_batch in (8, 2):
        assert same(whole, step(micro_batch, "turn", loss_type=loss_type, entropy_coef=0.1))


def test_the_entropy_bonus_has_a_gradient(step: Step) -> None:
    assert (step(4) - step(4, entropy_coef=0.1)).abs().max() > 1e-4


def test_silent_samples_keep_their_place_in_the_baseline(player: Player, make_trainer: MakeTrainer) -> None:
    """Cut off by a budget: no loss, no gradient, but its siblings are compared with it."""

    def cut_off(groups: Any) -> None:
        groups[0].trajectories[1].stop_reason = StopReason.CONTEXT

    player.edit = cut_off
    player.reward = lambda group, sample: [1.0, 0.0, 0.5, 0.5][sample] if group == 0 else 1.0
    trainer = make_trainer(player, {"filter": {"overlong": True, "uniform": "mask"}})
    _, batch = score(trainer)
    sampled = (batch["tool_mask"] * batch["completion_mask"]).sum(1)
    assert (sampled > 0).tolist() == [True, False, True, True, False, False, False, False]
    assert batch["num_items_in_batch"] == sampled.sum()
    assert batch["advantages"].tolist() == pytest.approx([0.5, -0.5, 0, 0, 0, 0, 0, 0])
    assert trainer._metrics["train"]["reward"] == [0.75]


def test_without_the_mask_what_the_environment_wrote_trains_as_well(player: Player, make_trainer: MakeTrainer) -> None:
    """For measuring what the mask is worth. Nobody sampled those ids, so nothing is corrected there."""
    trainer = make_trainer(player, {"filter": {"unmask": True}})
    _, batch = score(trainer)
    real = batch["completion_mask"].bool()
    assert batch["tool_mask"][real].all()
    unknown = real & batch["sampling_per_token_logps"].isnan()
    assert unknown.any()
    assert (batch["importance_sampling_ratio"][unknown] == 1).all()
    found = gradient(trainer, batch)
    assert found.isfinite().all()
    assert found.abs().max() > 0
