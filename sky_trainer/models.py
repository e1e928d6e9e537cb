"""Loading and saving of policies, with errors that a user can act on."""

from __future__ import annotations

import json
from pathlib import Path
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
    """The causal language model of a directory or hub name; of an adapter, the model that it is for with it merged in.

    ConfigError when there is none.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.peft_utils import find_adapter_config_file

    try:
        adapter = find_adapter_config_file(path)
        if adapter is not None:
            return _with_adapter(path, json.loads(Path(adapter).read_bytes())["base_model_name_or_path"], dtype)
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model {path!r}: cannot be loaded: {_first_line(error)}") from error


def _with_adapter(path: str, base: str, dtype: str) -> Any:
    """It goes by the adapter's name, from which a reference is loaded again."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(load_model(base, dtype), path).merge_and_unload().requires_grad_(True)
    model.config._name_or_path = model.name_or_path = path
    return model


def on_best_device(model: Any) -> Any:
    """The model on the first GPU where there is one."""
    import torch

    return model.to("cuda") if torch.cuda.is_available() else model


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
