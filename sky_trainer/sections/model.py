"""The `model:` and `warm_start:` sections: the policy that training starts from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sky_trainer.settings import check_least
from skyenv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """`path`: a directory or hub name of a causal LM, or `tiny` to make one here (`hidden`, `layers`, `vocab`)."""

    path: str = "tiny"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    hidden: int = 128
    layers: int = 2
    vocab: int = 1024


@dataclass(frozen=True, slots=True)
class WarmStartConfig:
    """Supervised steps on scripted experts before GRPO; 0 steps: none. `expert_rate`: share of right edits."""

    steps: int = 0
    batch_size: int = 16
    learning_rate: float = 2e-3
    expert_rate: float = 0.33


def check_model(model: ModelConfig, warm_start: WarmStartConfig) -> None:
    """Raise ConfigError naming the field and the fix."""
    if not model.path:
        raise ConfigError("model.path is empty; name a directory or a model of the hub, or tiny")
    check_least(
        {
            "model.hidden": (model.hidden, 8),
            "model.layers": (model.layers, 1),
            "model.vocab": (model.vocab, 260),  # every byte and the control tokens
            "warm_start.steps": (warm_start.steps, 0),
            "warm_start.batch_size": (warm_start.batch_size, 1),
        }
    )
    if model.hidden % 8:
        raise ConfigError(f"model.hidden is {model.hidden}; it must be a multiple of 8")
    if warm_start.learning_rate <= 0:
        raise ConfigError(f"warm_start.learning_rate is {warm_start.learning_rate}; it must be above 0")
    if not 0 < warm_start.expert_rate <= 1:
        raise ConfigError(
            f"warm_start.expert_rate is {warm_start.expert_rate}; it is a share, above 0 and at most 1, usually 0.33"
        )
