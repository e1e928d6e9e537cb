"""The `lora:` section: train low-rank adapters beside frozen weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sky_trainer.settings import check_least
from skyenv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Adapters of `rank` (0: none, all weights train), scaled by `alpha` / rank, or / sqrt(rank) with `rslora`.

    `targets` are names of linear modules, none for all of them but the output layer; `parameters` are names of bare
    parameters, as those of packed experts; modules named in `whole`, as `lm_head`, train all their weights beside the
    adapters. The frozen weights are the reference of a KL penalty.
    """

    rank: int = 0
    alpha: int = 32
    dropout: float = 0.0
    rslora: bool = False
    targets: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()


def check_lora(lora: LoraConfig) -> None:
    """Raise ConfigError naming the field and the fix."""
    check_least({"lora.rank": (lora.rank, 0), "lora.dropout": (lora.dropout, 0)})
    if lora.alpha <= 0:
        raise ConfigError(f"lora.alpha is {lora.alpha}; it must be above 0, usually twice lora.rank")
    if lora.dropout >= 1:
        raise ConfigError(f"lora.dropout is {lora.dropout}; it must be below 1")
    for name in ("lm_head", "embed_tokens"):
        if name in lora.targets:
            raise ConfigError(
                f"lora.targets: {name} cannot have an adapter in GRPO; leave it out, or name it in lora.whole"
            )
    for field, names in {"targets": lora.targets, "parameters": lora.parameters, "whole": lora.whole}.items():
        if names and not lora.rank:
            raise ConfigError(f"lora.rank is 0, so lora.{field} means nothing; set lora.rank, usually 32")


def with_adapters(model: Any, lora: LoraConfig) -> Any:
    """The model with fresh adapters in it, which change nothing yet; itself when `rank` is 0.

    ConfigError when a target does not exist in this model, or what would train whole is tied to what would not.
    """
    if not lora.rank:
        return model
    _check_whole(model, lora)
    from peft import LoraConfig as PeftLora
    from peft import get_peft_model

    settings = PeftLora(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        use_rslora=lora.rslora,
        target_modules=list(lora.targets) if lora.targets else "all-linear",
        target_parameters=list(lora.parameters) or None,
        modules_to_save=list(lora.whole) or None,
        task_type="CAUSAL_LM",
    )
    try:
        return get_peft_model(model, settings)
    except ValueError as error:
        raise ConfigError(f"lora: {' '.join(str(error).split())}") from error


def _check_whole(model: Any, lora: LoraConfig) -> None:
    ends = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    for name in lora.whole:
        if name not in ends:
            raise ConfigError(f"lora.whole: this model has no module {name}")
        if name in ("lm_head", "embed_tokens") and model.config.tie_word_embeddings:
            raise ConfigError(f"lora.whole: {name} is tied to the other end of this model; leave it out")
