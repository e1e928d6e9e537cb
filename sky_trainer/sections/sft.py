"""Supervised training as data: which demonstrations, which of them, and how many passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sky_trainer.settings import check_least
from skyenv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SftConfig:
    """What `sky_trainer sft` learns from; `train` leaves it alone.

    `data`: trajectory stores, exported rows and transcripts. `min_reward` and `resolved` keep only the demonstrations
    with at least this reward, or that solved their task. A demonstration of more than `max_length` tokens is left out
    whole. `steps` 0: `epochs` passes. `options` are those of TRL's SFTConfig that no other key sets.
    """

    data: tuple[str, ...] = ()
    min_reward: float | None = None
    resolved: bool = False
    max_length: int = 32768
    epochs: float = 1.0
    steps: int = 0
    batch_size: int = 16
    learning_rate: float = 1e-5
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_least(
            {
                "sft.max_length": (self.max_length, 2),
                "sft.steps": (self.steps, 0),
                "sft.batch_size": (self.batch_size, 1),
            }
        )
        if self.epochs <= 0 or self.learning_rate <= 0:
            raise ConfigError("sft.epochs and sft.learning_rate must be above 0")
