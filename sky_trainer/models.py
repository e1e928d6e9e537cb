"""Loading and saving of policies, with errors that a user can act on."""

from __future__ import annotations

from typing import Any

from skyenv.errors import ConfigError


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a directory or hub name. ConfigError when there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {path!r}: no tokenizer to load: {_first_line(error)}") from error


def load_model(path: str, dtype: str = "float32") -> Any:
    """The causal language model of a directory or hub name. ConfigError when there is none."""
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model {path!r}: cannot be loaded: {_first_line(error)}") from error


def on_best_device(model: Any) -> Any:
    """The model on the first GPU where there is one."""
    import torch

    return model.to("cuda") if torch.cuda.is_available() else model


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
