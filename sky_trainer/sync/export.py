"""A module's weights as whole tensors under the names that checkpoints have.

Collective where the module is sharded: every rank iterates, in the same order. Nothing is changed in the module; a LoRA
policy's adapters are added to copies, and of a module that trains whole beside them the trained copy is named alone. A
tied output head is named like any other tensor: a server that was started from an untied checkpoint takes it, and one
that ties drops it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PEFT_PREFIX = "base_model.model."
WHOLE = re.compile(r"\.modules_to_save\.[^.]+\.|\.original_module\.")
"""Where PEFT keeps the copies of a module that trains whole, and what it was before."""


def named_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of every weight, on the module's device; the tensors may be the module's own."""
    import torch

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    with torch.no_grad():
        plain = dict(_whole(model))
    plain = {_plain(name): value for name, value in plain.items()}
    yield from _as_saved(base, plain).items()


def _plain(name: str) -> str:
    return WHOLE.sub(".", name.removeprefix(PEFT_PREFIX).replace(".base_layer.", "."))


def _whole(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    layers = {f"{name}.base_layer.weight": layer for name, layer in model.named_modules() if _is_adapted(layer)}
    frozen = {name.removesuffix("base_layer.weight") for name in layers}
    active = tuple(f"{name}.{copy}." for name, layer in model.named_modules() for copy in _active_copies(layer))
    for name, value in model.state_dict(keep_vars=True).items():
        if (
            ".lora_" in name
            or (WHOLE.search(name) and not name.startswith(active))
            or (".base_layer." not in name and any(name.startswith(prefix) for prefix in frozen))
        ):
            continue
        with _gathered(value):
            whole = gather(value.detach())
            if name in layers:
                for adapter in layers[name].active_adapters:
                    whole = whole + layers[name].get_delta_weight(adapter).to(whole.dtype)
            yield name, whole


def _is_adapted(layer: Any) -> bool:
    return hasattr(layer, "base_layer") and hasattr(layer, "get_delta_weight")


def _active_copies(layer: Any) -> list[str]:
    if not hasattr(layer, "modules_to_save"):
        return []
    return [f"modules_to_save.{adapter}" for adapter in layer.active_adapters]


def gather(value: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor that FSDP2 shards; any other as it is. Collective."""
    full = getattr(value, "full_tensor", None)
    whole: torch.Tensor = value if full is None else full()
    return whole


def _gathered(value: Any) -> AbstractContextManager[Any]:
    """What makes a parameter that ZeRO-3 shards whole."""
    if not hasattr(value, "ds_id"):
        return nullcontext()
    from deepspeed.zero import GatheredParameters  # type: ignore[import-not-found, unused-ignore]

    gathered: AbstractContextManager[Any] = GatheredParameters([value])
    return gathered


def _as_saved(model: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Undo what transformers changed on loading, such as experts packed into one tensor."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return weights
    return dict(revert_weight_conversion(model, weights))
