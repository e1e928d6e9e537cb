"""The trainer's loss and gradient against plain PyTorch, from the same trajectories, for each loss that recipes use."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from skyenv.errors import ConfigError

from .conftest import MakeTrainer, Player
from .reference import Knobs, loss_of, sampled_logprobs
from .test_grpo import score

REWARDS = [[1.0, 0.0, None, 0.25], [1.0, 0.5, 0.5, 0.0]]
LOSSES = ("dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")


WIDE = {"vllm_importance_sampling_clip_max": 1000.0}


def uneven(player: Player, offsets: Sequence[float] = (0.0, 0.3, 2.0)) -> None:
    """Rewards of all kinds, a failure among them, answers of different lengths, and a sampler that is a little off."""
    player.reward = lambda group, sample: REWARDS[group][sample]
    chosen = random.Random(1)

    def off(groups: Any) -> None:
        for group in groups:
            for trajectory in group.trajectories:
                for segment in trajectory.segments:
                    for place, mask in enumerate(segment.loss_mask):
                        segment.logprobs[place] -= mask * chosen.choice(offsets)

    player.edit = off


def nudge(model: Any, seed: int = 3, size: float = 0.05) -> None:
    """A step away from the policy that sampled, so that ratios are not 1 and clipping bites."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))


def gradient_of(model: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def both(
    player: Player, trainer: Any, knobs: Knobs, reference: Any = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss and gradient of the trainer, loss and gradient of the reference, on one batch after a nudge."""
    _, batch = score(trainer)
    groups = player.batches[-1]
    with torch.no_grad():
        old = {
            id(t): sampled_logprobs(trainer.model, t.segments[0], knobs.temperature)
            for group in groups
            for t in group.trajectories
            if t.segments
        }
    nudge(trainer.model)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.zero_grad()
    ours = trainer._compute_loss(trainer.model, batch)
    ours.backward()
    our_gradient = gradient_of(trainer.model)
    trainer.model.zero_grad()
    theirs = loss_of(knobs, trainer.model, groups, old, reference)
    theirs.backward()
    return ours.detach(), our_gradient, theirs.detach(), gradient_of(trainer.model)


def assert_same(found: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    ours, our_gradient, theirs, their_gradient = found
    assert ours == pytest.approx(theirs.item(), rel=1e-4, abs=1e-6)
    assert our_gradient.abs().max() > 1e-4
    assert torch.allclose(our_gradient, their_gradient, rtol=1e-3, atol=1e-5 * float(their_gradient.abs().max()) + 1e-7)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_loss_and_gradient(loss_type: str, player: Player, make_trainer: MakeTrainer) -> None:
    uneven(player, (0.0, 0.05) if loss_type == "vespo" else (0.0, 0.3, 2.0))  # it drops sequences that are far off
    bound = 1.02 if loss_type == "cispo" else 0.2
    trainer = make_trainer(player, loss_type=loss_type, epsilon_high=bound)
    assert_same(both(player, trainer, Knobs(loss_type, epsilon_high=bound)))


def test_a_bound_that_would_throttle_every_cispo_update_is_refused(player: Player, make_trainer: MakeTrainer) -> None:
    with pytest.raises(ConfigError, match=r"grpo.epsilon_high is 0.2; with loss_type cispo it bounds the ratio itself"):
        make_trainer(player, loss_type="cispo")


@pytest.mark.parametrize(
    ("options", "knobs"),
    [
        ({"epsilon_high": 0.28}, Knobs(epsilon_high=0.28)),
        ({"scale_rewards": "group"}, Knobs(scale="group")),
        ({"importance_sampling_level": "sequence", "loss_type": "grpo"}, Knobs("grpo", sequence_ratio=True)),
        ({"vllm_importance_sampling_clip_max": 1.5}, Knobs(truncate_at=1.5)),
        ({"vllm_importance_sampling_mode": "token_mask"}, Knobs(mode="token_mask")),
        ({"vllm_importance_sampling_mode": "sequence_truncate"}, Knobs(mode="sequence_truncate")),
        ({"vllm_importance_sampling_mode": "sequence_mask", **WIDE}, Knobs(mode="sequence_mask", truncate_at=1000.0)),
        ({"scale_rewards": "batch"}, Knobs(scale="batch")),
        ({"entropy_coef": 0.3}, Knobs(entropy=0.3)),
        ({"delta": 1.5, "epsilon": 0.6}, Knobs(delta=1.5, epsilon_low=0.6, epsilon_high=0.6)),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_knobs(options: dict[str, Any], knobs: Knobs, player: Player, make_trainer: MakeTrainer) -> None:
    uneven(player)
    assert_same(both(player, make_trainer(player, **options), knobs))


def test_leave_one_out(player: Player, make_trainer: MakeTrainer) -> None:
    uneven(player)
    trainer = make_trainer(player, {"advantage": {"baseline": "leave_one_out"}})
    assert_same(both(player, trainer, Knobs(baseline="leave_one_out")))


def test_temperature(player: Player, make_trainer: MakeTrainer) -> None:
    uneven(player)
    rollout = {"group_size": 4, "groups_per_step": 2, "max_context": 2048, "temperature": 0.7}
    assert_same(both(player, make_trainer(player, {"rollout": rollout}), Knobs(temperature=0.7)))


def test_kl_to_the_reference_model(
    player: Player, make_trainer: MakeTrainer, model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    """With beta, its gradient is there also where no advantage is."""
    uneven(player)
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    model.config._name_or_path = str(tmp_path / "base")
    reference = copy.deepcopy(model)
    trainer = make_trainer(player, beta=0.1)
    assert_same(both(player, trainer, Knobs(beta=0.1), reference))
    plain = make_trainer(player, beta=0.1, use_bias_correction_kl=False, loss_type="grpo")
    assert_same(both(player, plain, Knobs("grpo", beta=0.1, corrected_kl=False), reference))
    player.reward = lambda group, sample: 1.0
    nothing, with_kl = make_trainer(player, beta=0.0), make_trainer(player, beta=0.1)
    gradients = []
    for each in (nothing, with_kl):
        _, batch = score(each)
        each.current_gradient_accumulation_steps = 1
        each.model.zero_grad()
        each._compute_loss(each.model, batch).backward()
        gradients.append(float(gradient_of(each.model).abs().max()))
    assert gradients[0] == 0.0
    assert gradients[1] > 1e-5


def test_old_and_new_logprobs_agree_before_the_first_step(player: Player, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(player)
    _, batch = score(trainer)
    rows = iter(batch["old_per_token_logps"])
    for group in player.batches[-1]:
        for trajectory in group.trajectories:
            (segment,) = trajectory.segments
            mask = torch.tensor(segment.loss_mask[segment.prompt_length :]).bool()
            with torch.no_grad():
                ours = sampled_logprobs(trainer.model, segment, 1.0)
            assert torch.allclose(next(rows)[: len(mask)][mask], ours, atol=1e-5)
