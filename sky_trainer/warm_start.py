"""Supervised steps on given segments, so that reinforcement learning starts from a policy that succeeds at times.

The loss is the mean negative log likelihood of the ids under mask 1; prompts and observations are context only.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sky_trainer.sections.model import WarmStartConfig
from skyenv.errors import ConfigError
from skyenv.types import Segment

if TYPE_CHECKING:
    import torch


def supervise(
    model: Any,
    segments: Sequence[Segment],
    weights: Sequence[float],
    config: WarmStartConfig,
    *,
    pad_id: int,
    seed: int,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> float:
    """Train `model` in place for `config.steps` batches drawn by weight; returns the last loss.

    `on_step` hears step and loss. ConfigError when there is nothing to learn from.
    """
    import torch

    if not any(1 in segment.loss_mask for segment in segments):
        raise ConfigError("warm start: no segment holds ids to learn from")
    draw = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=config.learning_rate, total_steps=config.steps, pct_start=0.1
    )
    model.train()
    loss = 0.0
    for step in range(config.steps):
        batch = draw.choices(segments, weights, k=config.batch_size)
        value = batch_loss(model, batch, pad_id)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        loss = value.item()
        on_step(step + 1, loss)
    return loss


def batch_loss(model: Any, batch: Sequence[Segment], pad_id: int) -> torch.Tensor:
    """Mean negative log likelihood of the batch's sampled ids; right-padded."""
    import torch

    width = max(len(segment.token_ids) for segment in batch)
    ids = torch.tensor([s.token_ids + [pad_id] * (width - len(s.token_ids)) for s in batch])
    learn = torch.tensor([s.loss_mask + [0] * (width - len(s.loss_mask)) for s in batch], dtype=torch.bool)
    real = torch.tensor([[1] * len(s.token_ids) + [0] * (width - len(s.token_ids)) for s in batch])
    first = int(learn.any(dim=0).int().argmax())
    logits = model(input_ids=ids, attention_mask=real, logits_to_keep=width - first + 1).logits
    picked = learn[:, first:]
    return torch.nn.functional.cross_entropy(logits[:, :-1][picked], ids[:, first:][picked])
