"""A model without its weights: its published configuration, and a module on torch's meta device, which takes no memory.

The configuration is read from the model's directory or the hub. Where neither is there, `PUBLISHED` knows the shapes of
the models that the recipes name, as their `config.json` states them; whoever uses them says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sky_trainer.models import check_place, first_line
from skyenv.errors import ConfigError

_QWEN = {"hidden_act": "silu", "tie_word_embeddings": False, "head_dim": 128, "num_key_value_heads": 8}
_QWEN3 = {**_QWEN, "vocab_size": 151936, "max_position_embeddings": 40960}


@dataclass(frozen=True, slots=True)
class Published:
    """`kind` is transformers' model type; `values` its configuration; `vocabulary` and `template` its tokenizer's."""

    kind: str
    values: Mapping[str, Any]
    vocabulary: str
    template: str


def _qwen3(hidden: int, inner: int, layers: int, heads: int, *, tied: bool = False) -> Published:
    shape = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    values = {**_QWEN3, **shape, "num_attention_heads": heads, "tie_word_embeddings": tied}
    return Published("qwen3", MappingProxyType(values), "qwen", "qwen3")


_CODER_7B = Published(
    "qwen2",
    MappingProxyType(
        {
            **_QWEN,
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
        }
    ),
    "qwen",
    "qwen2_5",
)
_MOE_30B = Published(
    "qwen3_moe",
    MappingProxyType(
        {
            **_QWEN3,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        }
    ),
    "qwen",
    "qwen3",
)
PUBLISHED: Mapping[str, Published] = MappingProxyType(
    {
        "Qwen/Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, tied=True),
        "Qwen/Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, tied=True),
        "Qwen/Qwen3-8B": _qwen3(4096, 12288, 36, 32),
        "Qwen/Qwen3-14B": _qwen3(5120, 17408, 40, 40),
        "Qwen/Qwen3-32B": _qwen3(5120, 25600, 64, 64),
        "Qwen/Qwen3-30B-A3B": _MOE_30B,
        "Qwen/Qwen2.5-Coder-7B-Instruct": _CODER_7B,
        "SWE-Gym/OpenHands-7B-Agent": _CODER_7B,  # a fine-tuned Qwen2.5-Coder-7B-Instruct
    }
)


def model_config(path: str, *, published: bool = False) -> tuple[Any, str]:
    """A model's configuration and where it comes from. ConfigError when it cannot be had.

    With `published`, shapes written here stand in for a model that is neither a directory nor reachable.
    """
    from transformers import AutoConfig

    known = PUBLISHED.get(path) if published else None
    check_place(path)
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        if known is None:
            raise ConfigError(f"model.path {path!r}: no configuration to read: {first_line(error)}") from error
        values = dict(known.values)
        return AutoConfig.for_model(known.kind, **values), "published shapes, as the hub is not reachable"
    return config, "its directory" if Path(path).is_dir() else "the hub"


def without_weights(config: Any, dtype: str = "float32") -> Any:
    """The causal language model of a configuration on the meta device. ConfigError when transformers knows none."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    except (ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"model.path: no causal language model of type {config.model_type!r}: {error}") from error
