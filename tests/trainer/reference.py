"""GRPO in plain PyTorch, from trajectories to a loss: what the trainer's numbers are compared with.

Nothing here knows TRL, batches, padding or masks of columns: one trajectory after the other, one forward pass each.
Formulas are those of the papers: GRPO (arXiv 2402.03300), Dr. GRPO (2503.20783), DAPO (2503.14476), CISPO (2506.13585),
GSPO (2507.18071), SAPO (2511.20347), VESPO, and truncated importance sampling between sampler and trainer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from skyenv.types import Segment, TrajectoryGroup


@dataclass(frozen=True)
class Knobs:
    """What changes the loss."""

    loss_type: str = "dapo"
    temperature: float = 1.0
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    scale: str = "none"
    sequence_ratio: bool = False
    mode: str = "token_truncate"
    truncate_at: float = 3.0
    beta: float = 0.0
    corrected_kl: bool = True
    entropy: float = 0.0
    delta: float | None = None
    baseline: str = "mean"
    max_length: int = 64


def distributions(model: Any, segment: Segment, temperature: float) -> torch.Tensor:
    """Log-probabilities of all ids at each place where one was sampled."""
    logits = model(input_ids=torch.tensor([segment.token_ids])).logits[0, :-1] / temperature
    return torch.log_softmax(logits.float(), -1)[torch.tensor(segment.loss_mask[1:]).bool()]


def sampled_logprobs(model: Any, segment: Segment, temperature: float) -> torch.Tensor:
    """Log-probability of each sampled id under the model, in order."""
    sampled = torch.tensor([i for i, mask in zip(segment.token_ids, segment.loss_mask, strict=True) if mask])
    return distributions(model, segment, temperature).gather(1, sampled[:, None])[:, 0]


def sampler_logprobs(segment: Segment) -> torch.Tensor:
    """What the sampler said of the same ids."""
    pairs = zip(segment.logprobs, segment.loss_mask, strict=True)
    return torch.tensor([logprob for logprob, mask in pairs if mask])


def advantages(groups: Sequence[TrajectoryGroup], scale: str, baseline: str) -> list[list[float]]:
    """Reward minus the mean of the siblings that have one, over a standard deviation if asked; 0 for the others."""
    every = torch.tensor([reward for group in groups for reward in group.rewards_G if reward is not None])
    found = []
    for group in groups:
        known = torch.tensor([reward for reward in group.rewards_G if reward is not None])
        spread = {"group": known.std() + 1e-4, "batch": every.std() + 1e-4, "none": torch.tensor(1.0)}[scale]
        further = len(known) / (len(known) - 1) if baseline == "leave_one_out" else 1.0  # own reward is in the mean
        means = [0.0 if reward is None else float((reward - known.mean()) * further) for reward in group.rewards_G]
        found.append([mean / float(spread) for mean in means])
    return found


def token_losses(
    knobs: Knobs, now: torch.Tensor, old: torch.Tensor, sampler: torch.Tensor, advantage: float
) -> torch.Tensor:
    """Loss of each sampled token of one trajectory."""
    log_ratio = now - old
    ratio = log_ratio.mean().expand(len(now)).exp() if knobs.sequence_ratio else log_ratio.exp()
    if knobs.loss_type == "cispo":  # here the bound is the ratio's own, as in the paper
        loss = -ratio.clamp(max=knobs.epsilon_high).detach() * advantage * now
    elif knobs.loss_type == "sapo":
        heat = 1.0 if advantage > 0 else 1.05
        loss = -torch.sigmoid(heat * (ratio - 1)) * 4 / heat * advantage
    elif knobs.loss_type == "vespo":  # weighs by the whole sequence, the sampler's mismatch included
        mismatch = (old - sampler).exp().clamp(max=knobs.truncate_at).log()
        weight = (log_ratio.sum() + mismatch.sum()).exp()
        k, heat = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
        return -(weight**k * (heat - heat * weight).exp()).detach() * advantage * now
    else:
        clipped = ratio.clamp(1 - knobs.epsilon_low, 1 + knobs.epsilon_high)
        bounded = ratio if knobs.delta is None else ratio.clamp(max=knobs.delta)
        loss = -torch.minimum(bounded * advantage, clipped * advantage)
    return loss * correction(knobs, old - sampler)


def correction(knobs: Knobs, mismatch: torch.Tensor) -> torch.Tensor:
    """The weight of each token, or of the sequence, for what the sampler's probabilities differ from the trainer's."""
    ratio = (mismatch.sum() if knobs.mode.startswith("sequence") else mismatch).exp()
    if knobs.mode.endswith("truncate"):
        return ratio.clamp(max=knobs.truncate_at)
    return ratio * (ratio <= knobs.truncate_at)


def divergence(now: torch.Tensor, reference: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
    """The k3 estimate of the KL divergence to the reference model, corrected for who sampled."""
    difference = reference - now
    return (difference.exp() - difference - 1) * ratio


def loss_of(
    knobs: Knobs, model: Any, groups: Sequence[TrajectoryGroup], old: dict[int, torch.Tensor], reference: Any = None
) -> torch.Tensor:
    """The loss of a whole batch. `old` maps `id(trajectory)` to the logprobs when the batch was made."""
    rows: list[torch.Tensor] = []
    spread: list[torch.Tensor] = []
    count = 0
    for group, shares in zip(groups, advantages(groups, knobs.scale, knobs.baseline), strict=True):
        for trajectory, advantage in zip(group.trajectories, shares, strict=True):
            count += 1
            if trajectory.reward is None:
                continue
            (segment,) = trajectory.segments
            now = sampled_logprobs(model, segment, knobs.temperature)
            before = old[id(trajectory)]
            row = token_losses(knobs, now, before, sampler_logprobs(segment), advantage)
            if reference is not None:
                with torch.no_grad():
                    there = sampled_logprobs(reference, segment, knobs.temperature)
                weight = (now - before).exp() if knobs.corrected_kl else torch.ones(())
                row = row + knobs.beta * divergence(now, there, weight)
            rows.append(row)
            if knobs.entropy:
                logprobs = distributions(model, segment, knobs.temperature)
                spread.append(-(logprobs.exp() * logprobs).sum(-1))
    loss = reduce(knobs, rows, count)
    return loss - knobs.entropy * torch.cat(spread).mean() if spread else loss


def reduce(knobs: Knobs, rows: Sequence[torch.Tensor], count: int) -> torch.Tensor:
    """Tokens to one number; `count` trajectories were asked for, those that failed included."""
    tokens = sum(len(row) for row in rows)
    match knobs.loss_type:
        case "grpo" | "sapo":
            return torch.stack([row.mean() for row in rows]).sum() / count
        case "luspo":
            return torch.stack([row.sum() for row in rows]).sum() / count
        case "dr_grpo":
            return torch.cat(list(rows)).sum() / (count * knobs.max_length)
        case _:
            return torch.cat(list(rows)).sum() / tokens
