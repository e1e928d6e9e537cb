"""Models for real servers, made on the spot, and what they should answer according to a forward pass here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from sky_trainer import tiny
from sky_trainer.models import load_model, load_tokenizer
from skyenv import formats
from skyenv.renderer import Renderer

TEXTS = ["look around the house", "go north, then go south", "take the key and open the door"] * 8


def save_model(path: Path, *, seed: int, tied: bool = False) -> Path:
    """A random model of 0.4 million parameters with its tokenizer."""
    tokenizer = tiny.make_tokenizer(TEXTS, 320)
    model = tiny.make_model(tokenizer, hidden=128, layers=2, seed=seed)
    if tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    tokenizer.save_pretrained(path)
    model.save_pretrained(path)
    return path


def renderer_of(path: Path) -> Renderer:
    """The renderer for the model's tokenizer, with calls as Hermes writes them."""
    return Renderer(load_tokenizer(str(path)), formats.get("hermes"))


@cache
def _loaded(path: str) -> Any:
    return load_model(path)


def logprobs_here(path: Path, prompt: Sequence[int], sampled: Sequence[int], temperature: float = 1.0) -> list[float]:
    """What the checkpoint at `path` gives the sampled ids after the prompt."""
    import torch

    model = _loaded(str(path))
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *sampled]])).logits[0].float() / temperature
    rows = logits[len(prompt) - 1 : -1].log_softmax(-1)
    return [float(row[token]) for row, token in zip(rows, sampled, strict=True)]
