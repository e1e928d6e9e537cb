"""Loading and saving of policies, with errors that a user can act on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from skyenv.errors import ConfigError


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a directory or hub name. ConfigError when there is none."""
    from transformers import AutoTokenizer

    check_place(path)
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {path!r}: no tokenizer to load: {first_line(error)}") from error


def load_model(path: str, dtype: str = "float32", base: str = "") -> Any:
    """The causal language model of a directory or hub name; of an adapter, the model that it is for with it merged in.

    A directory's model is called by its whole path, so that what refers to it finds it from anywhere. `base` is the
    adapter's, where that is no longer where it was. ConfigError when there is none.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.peft_utils import find_adapter_config_file

    check_place(path)
    path = str(Path(path).absolute()) if Path(path).is_dir() else path
    try:
        adapter = find_adapter_config_file(path)
        if adapter is None:
            return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        below = base or _base_of(path, json.loads(Path(adapter).read_bytes())["base_model_name_or_path"])
        return _with_adapter(path, below, dtype)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model {path!r}: cannot be loaded: {first_line(error)}") from error


def check_place(path: str) -> None:
    """ConfigError where a path of this machine holds no model, which libraries take for an odd name of the hub."""
    there = Path(path)
    if there.is_dir() and not any((there / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise ConfigError(f"model {path!r}: that directory holds no config.json; name one that a model was saved to")
    if not there.is_dir() and (there.is_absolute() or path.startswith((".", "~"))):
        raise ConfigError(f"model {path!r}: there is no such directory")


def beyond_positions(config: Any, longest: int) -> str:
    """A warning where episodes may be longer than what a model knows positions for; nothing else would say so."""
    text = config.get_text_config()
    known = getattr(text, "max_position_embeddings", None)
    scaling = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if known and scaling.get("factor") and scaling.get("original_max_position_embeddings"):
        known = max(known, int(scaling["factor"] * scaling["original_max_position_embeddings"]))
    if not known or longest <= known:
        return ""
    return (
        f"rollout.max_context is {longest}, but the model knows {known} positions: lower it, or name a model whose"
        " config.json scales them (rope_parameters)"
    )


def _base_of(path: str, noted: str) -> str:
    """Where an adapter's base is: as noted, or beside the adapter if both moved."""
    beside = Path(path).parent / Path(noted).name
    return str(beside) if not Path(noted).exists() and (beside / "config.json").is_file() else noted


def _with_adapter(path: str, base: str, dtype: str) -> Any:
    """It goes by the adapter's name, from which a reference is loaded again."""
    from peft import PeftModel

    try:
        below = load_model(base, dtype)
    except ConfigError as error:
        raise ConfigError(f"model {path!r} is an adapter for {base!r}, which cannot be loaded: {error}") from error
    try:
        model = PeftModel.from_pretrained(below, path)
    except RuntimeError as error:
        raise ConfigError(f"model {path!r} is an adapter for another model than {base!r}: {error}") from error
    model = model.merge_and_unload().requires_grad_(True)
    model.config._name_or_path = model.name_or_path = path
    return model


def on_best_device(model: Any) -> Any:
    """The model on the first GPU where there is one."""
    import torch

    return model.to("cuda") if torch.cuda.is_available() else model


def first_line(error: Exception) -> str:
    """What a library says of a model that it did not find, and what helps where it had no network."""
    told = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if "connect" not in told:
        return told
    return f"{told.rstrip('.')}; fetch it where there is a network (HF_HOME), or name a directory"
