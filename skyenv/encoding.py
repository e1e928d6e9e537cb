"""Text to ids and back. Text of a conversation is untrusted, text of its template is not.

Invariant: no control id comes out of untrusted text. The literal of an added token in it, also one that the tokenizer
itself makes by normalising, is encoded as ordinary characters.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from skyenv.errors import ConfigError, EnvError
from skyenv.tokenizer import Tokenizer

_PROBE = "def f(x):\n\treturn '\u00e9\u4e16\U0001f389' # \x01\r\n"

Piece = tuple[str, bool]
"""Text and whether it may contain control tokens."""


class Encoder:
    """Encodes with one tokenizer; immutable. `control` has the ids of its added tokens, `literal` matches their texts.

    Raises ConfigError for a tokenizer that does not give text back or cannot encode it in parts.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_vocab()
        self.control = {text: number for text, number in added.items() if len(text) > 1 and text.strip()}
        self._control_ids = frozenset(self.control.values())
        longest_first = sorted(self.control, key=lambda text: (-len(text), text))
        literals = "|".join(map(re.escape, longest_first)) or r"(?!)"
        self.literal = re.compile(f"({literals})")
        self._hidden_literal = re.compile(f"(?=(?:{literals}))")
        if self.decode(self.plain(_PROBE)) != _PROBE:
            raise ConfigError("tokenizer: decoding does not give back encoded text; use a byte-level tokenizer")
        parts = [part for line in _PROBE.splitlines(keepends=True) for part in self.plain(line)]
        if self.decode(parts) != _PROBE:
            raise ConfigError("tokenizer: text encoded in parts is changed (a space added in front?)")

    def encode(self, pieces: Sequence[Piece]) -> list[int]:
        """Ids of all pieces; the control literals in trusted ones become control ids."""
        ids: list[int] = []
        run = ""
        for text, trusted in pieces:
            for part in self.literal.split(text) if trusted else (text,):
                if trusted and part in self.control:
                    ids += [*self.plain(run), self.control[part]]
                    run = ""
                else:
                    run += part
        return ids + self.plain(run)

    def plain(self, text: str) -> list[int]:
        """Encode text so that no control id comes out: every literal in it is cut behind its first character."""
        cuts = [found.start() + 1 for found in self._hidden_literal.finditer(text)]
        ids: list[int] = []
        for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            ids += self._whole(text[begin:end])
        return ids

    def _whole(self, text: str) -> list[int]:
        ids = self.trusted(text) if text else []
        if self._control_ids.isdisjoint(ids):
            return ids
        if len(text) == 1:
            raise EnvError(f"the tokenizer encodes {text!r} as a control token")
        middle = len(text) // 2  # a normalising tokenizer made a literal out of other characters
        return self._whole(text[:middle]) + self._whole(text[middle:])

    def trusted(self, text: str) -> list[int]:
        """Encode text as the tokenizer does."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens included."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
