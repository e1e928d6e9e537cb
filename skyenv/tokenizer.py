"""What is needed of a tokenizer, and one that needs no files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol


class Tokenizer(Protocol):
    """What is needed of a tokenizer; fast tokenizers of transformers have it."""

    @property
    def eos_token_id(self) -> int | None:
        """Id that ends a generation."""
        ...

    def get_added_vocab(self) -> dict[str, int]:
        """Literals that are matched before ordinary tokenisation, with their ids."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encode text; literals of added tokens become their ids."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        """Decode ids."""
        ...

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, Any]], *, tokenize: bool, add_generation_prompt: bool, **options: Any
    ) -> Any:
        """Render a conversation; a string when `tokenize` is false. `options` are the template's own variables."""
        ...


class ByteTokenizer:
    """One id a UTF-8 byte, three ChatML control tokens behind them; needs no files and encodes any text."""

    specials: Mapping[str, int] = {"<|im_start|>": 256, "<|im_end|>": 257, "<|endoftext|>": 258}
    vocab_size = 259
    eos_token_id: int | None = 257

    def get_added_vocab(self) -> dict[str, int]:
        """The three control tokens."""
        return dict(self.specials)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Encode; nothing is ever added."""
        ids: list[int] = []
        for part in re.split(r"(<\|(?:im_start|im_end|endoftext)\|>)", text):
            ids += [self.specials[part]] if part in self.specials else part.encode("utf-8", "replace")
        return ids

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        """Decode; bytes that are not UTF-8 become U+FFFD."""
        names = {number: name for name, number in self.specials.items()}
        text = ""
        for special, ids in groupby(token_ids, key=lambda number: number in names):
            if not special:
                text += bytes(ids).decode("utf-8", "replace")
            elif not skip_special_tokens:
                text += "".join(names[number] for number in ids)
        return text

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tokenize: bool = False,
        add_generation_prompt: bool = False,
        **options: Any,
    ) -> Any:
        """Plain ChatML, which has no options."""
        text = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in conversation)
        text += "<|im_start|>assistant\n" if add_generation_prompt else ""
        return self.encode(text) if tokenize else text
