"""What of TRL's and transformers' options they themselves look at only after rollouts were made, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sky_trainer.settings import check_least
from skyenv.errors import ConfigError, did_you_mean

CHOICES = {
    "loss_type": ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"),
    "importance_sampling_level": ("token", "sequence"),
    "scale_rewards": ("group", "batch", "none"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
}
LEAST = {
    "beta": 0,
    "learning_rate": 0,
    "epsilon": 0,
    "epsilon_high": 0,
    "num_iterations": 1,
    "max_grad_norm": 0,
    "weight_decay": 0,
    "entropy_coef": 0,
    "router_aux_loss_coef": 0,
    "vllm_importance_sampling_clip_max": 0,
}


def check_algorithm(args: Any) -> None:
    """Raise ConfigError naming the key under `grpo:` and the fix."""
    for name, choices in CHOICES.items():
        value = getattr(args, name)
        if value not in choices:
            raise ConfigError(
                f"grpo.{name} is {value!r}; it must be one of {', '.join(choices)}{did_you_mean(str(value), choices)}"
            )
    values = {name: getattr(args, name) for name in LEAST}
    check_least({f"grpo.{name}": (value, LEAST[name]) for name, value in values.items() if value is not None})
    if not 0 < args.top_entropy_quantile <= 1:
        raise ConfigError(
            f"grpo.top_entropy_quantile is {args.top_entropy_quantile}; it is a share, above 0 and at most 1"
        )
    bound = args.epsilon if args.epsilon_high is None else args.epsilon_high
    if args.loss_type == "cispo" and bound < 1:
        raise ConfigError(f"grpo.epsilon_high is {bound}; with loss_type cispo it bounds the ratio itself, write 5.0")
    if args.loss_type == "vespo" and args.vllm_importance_sampling_mode.startswith("sequence"):
        raise ConfigError(
            f"grpo.vllm_importance_sampling_mode is {args.vllm_importance_sampling_mode}; vespo weighs whole sequences"
            " itself, write token_truncate or token_mask"
        )
    _check_generations(args)
    _check_reports(args.report_to)


def _check_generations(args: Any) -> None:
    """TRL cuts a batch of rollouts into micro-steps; a step of the optimizer must not end inside one."""
    steps, accumulated = args.steps_per_generation or 1, args.gradient_accumulation_steps
    if steps % accumulated:
        raise ConfigError(
            f"grpo.steps_per_generation is {steps}; it must be a multiple of the {accumulated} micro-batches of a step,"
            " or be left out"
        )


def _check_reports(names: Sequence[str]) -> None:
    from transformers.integrations.integration_utils import (
        INTEGRATION_TO_CALLBACK,
        get_available_reporting_integrations,
    )

    there = get_available_reporting_integrations()
    for name in names:
        if name in ("none", "all"):
            continue
        if name not in INTEGRATION_TO_CALLBACK:
            known = sorted(INTEGRATION_TO_CALLBACK)
            raise ConfigError(f"grpo.report_to names {name!r}; known are {', '.join(known)}{did_you_mean(name, known)}")
        if name not in there:
            raise ConfigError(f"grpo.report_to names {name}, which is not installed here: pip install {name}")
