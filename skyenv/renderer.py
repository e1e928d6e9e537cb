"""Messages to token ids and back, append-only: what was sampled is never tokenised again.

A conversation grows as `prompt ids + sampled ids + observation ids + sampled ids + ...`. The observation ids are the
exact text that the model's chat template puts between the end of one answer and the beginning of the next, found by
rendering dummy conversations at construction; a template for which that text depends on the history is refused.

Text from prompts and observations is untrusted: wherever it contains the literal of an added token, the literal is
encoded as ordinary characters, so no control id can come out of a repository's files. Only the template's own text
and the format's description of the tools yield control ids.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol

from skyenv.errors import ConfigError, EnvError, boundary
from skyenv.formats.contract import Format
from skyenv.types import Message, ToolCall, ToolSpec, Trajectory

_PAD = "\v"  # stands around slots to see whether a template strips a message's content
_SLOT = re.compile(rf"({_PAD}?)@slot-(\d+)@({_PAD}?)")
_PROBE = "def f(x):\n\treturn '\u00e9\u4e16\U0001f389' # \x01\r\n"
_THOUGHT = "<think>\n{plan}\n</think>\n\n{answer}"


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
        self, conversation: Sequence[Mapping[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> Any:
        """Render a conversation; a string when `tokenize` is false."""
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
        conversation: Sequence[Mapping[str, str]],
        *,
        tokenize: bool = False,
        add_generation_prompt: bool = False,
    ) -> Any:
        """Plain ChatML."""
        text = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in conversation)
        text += "<|im_start|>assistant\n" if add_generation_prompt else ""
        return self.encode(text) if tokenize else text


Piece = tuple[str, bool]
"""Text and whether it may contain control tokens."""


class Renderer:
    """Renders for one tokenizer and one tool-call format; immutable, shared by all rollouts.

    `stop_token_ids` end a turn, the template's own end-of-turn token first. `thinking_open` says that the generation
    prompt ends inside a thinking block. Raises ConfigError when the tokenizer or its template cannot be used exactly.
    """

    def __init__(self, tokenizer: Tokenizer, format: Format) -> None:
        self.tokenizer = tokenizer
        self.format = format
        added = tokenizer.get_added_vocab()
        self._control = {text: number for text, number in added.items() if len(text) > 1 and text.strip()}
        self._control_ids = frozenset(self._control.values())
        longest_first = sorted(self._control, key=lambda text: (-len(text), text))
        literals = "|".join(map(re.escape, longest_first)) or r"(?!)"
        self._literal = re.compile(f"({literals})")
        self._hidden_literal = re.compile(f"(?=(?:{literals}))")
        self._check_tokenizer()
        rest = self._after_answer([Message("user", "")])
        found = self._literal.match(rest)
        if not found:
            raise ConfigError(f"tokenizer: its chat template ends an answer with {rest[:20]!r}, not a control token")
        self.end_of_turn: int = self._control[found[0]]
        self._end_text = found[0]
        ends = (self.end_of_turn, tokenizer.eos_token_id)
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(n for n in ends if n is not None))
        self.thinking_open: bool = rest.rstrip().endswith("<think>")
        self._check_template()

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """Ids of the conversation so far, tools described in the system message, up to where the answer begins."""
        return self._encode(self._prompt_pieces(messages, tools))

    def conversation(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> tuple[Message, ...]:
        """The messages with the tools described in the system message, for servers that take text."""
        described, text = self._describe(messages, tools)
        return (Message("system", described[0].content + text), *described[1:]) if text else tuple(described)

    def observation(self, text: str, call: ToolCall | None, *, completion_ids: Sequence[int]) -> list[int]:
        """Ids between a sampled turn and the next: its end if it was cut off, the observation, the next beginning."""
        return self.observations([(text, call)], completion_ids=completion_ids)

    def observations(
        self, results: Sequence[tuple[str, ToolCall | None]], *, completion_ids: Sequence[int]
    ) -> list[int]:
        """As `observation`, for a turn of several calls: their results are rendered as one group."""
        messages = [self.format.observation(text, call) for text, call in results]
        pieces = self._delta_pieces(messages)
        if completion_ids and completion_ids[-1] == self.end_of_turn:
            pieces[0] = (pieces[0][0].removeprefix(self._end_text), True)
        return self._encode(pieces)

    def encode(self, text: str) -> list[int]:
        """Encode text as the model would have written it: control literals become ids. Never for untrusted text."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a sampled turn, without the token that ended it."""
        if ids and ids[-1] in self.stop_token_ids:
            ids = ids[:-1]
        return self._decode(ids)

    def prompt_hash(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> str:
        """Short digest of format and prompt ids: equal prompts for equal models have equal hashes."""
        described = json.dumps([self.format.name, self.prompt(messages, tools)])
        return hashlib.sha256(described.encode()).hexdigest()[:16]

    def drift(self, trajectory: Trajectory) -> int:
        """How many turns of an exact trajectory do not decode from its sampled ids to their recorded text: 0."""
        sampled = [
            [token for token, _ in run]
            for segment in trajectory.segments
            for mask, run in groupby(zip(segment.token_ids, segment.loss_mask, strict=True), key=lambda pair: pair[1])
            if mask
        ]
        texts = [turn.text for turn in trajectory.turns]
        differing = sum(self.decode(ids) != text for ids, text in zip(sampled, texts, strict=False))
        return differing + abs(len(sampled) - len(texts))

    # Pieces: text of the template with the contents of the messages put in its slots.

    def _describe(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> tuple[list[Message], str]:
        """Make sure there is a system message when there are tools, and return the text to append to it."""
        text = self.format.render_tools(tools) if tools else ""
        if text and not (messages and messages[0].role == "system"):
            return [Message("system", ""), *messages], text.lstrip("\n")
        return list(messages), text

    def _prompt_pieces(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[Piece]:
        described, text = self._describe(messages, tools)
        rendered = self._apply([_as_dict(message, _slot(i)) for i, message in enumerate(described)])
        contents = [[(message.content, False)] for message in described]
        if text:
            contents[0].append((text, True))
        return _fill(rendered, contents)

    def _delta_pieces(self, messages: Sequence[Message]) -> list[Piece]:
        rest = self._after_answer(messages)
        return _fill(rest, [[(message.content, False)] for message in messages])

    def _after_answer(self, messages: Sequence[Message]) -> str:
        """What the template renders behind an answer that is followed by `messages`, with slots for contents."""
        answer = "@the-answer@"
        turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": answer}]
        turns += [_as_dict(message, _slot(i)) for i, message in enumerate(messages)]
        return self._apply(turns).rpartition(answer)[2]

    def _apply(self, conversation: Sequence[Mapping[str, str]]) -> str:
        with boundary(ConfigError, "tokenizer: its chat template refused a conversation"):
            return str(self.tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True))

    # Ids: control literals in trusted text only.

    def _encode(self, pieces: Sequence[Piece]) -> list[int]:
        ids: list[int] = []
        run = ""
        for text, trusted in pieces:
            for part in self._literal.split(text) if trusted else (text,):
                if trusted and part in self._control:
                    ids += [*self._encode_plain(run), self._control[part]]
                    run = ""
                else:
                    run += part
        return ids + self._encode_plain(run)

    def _encode_plain(self, text: str) -> list[int]:
        """Encode text so that no control id comes out: every literal in it is cut behind its first character."""
        cuts = [found.start() + 1 for found in self._hidden_literal.finditer(text)]
        ids: list[int] = []
        for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            ids += self._encode_whole(text[begin:end])
        return ids

    def _encode_whole(self, text: str) -> list[int]:
        ids = self.encode(text) if text else []
        if self._control_ids.isdisjoint(ids):
            return ids
        if len(text) == 1:
            raise EnvError(f"the tokenizer encodes {text!r} as a control token")
        middle = len(text) // 2  # a normalising tokenizer made a literal out of other characters
        return self._encode_whole(text[:middle]) + self._encode_whole(text[middle:])

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    # Checks at construction.

    def _check_tokenizer(self) -> None:
        ids = self._encode_plain(_PROBE)
        if self._decode(ids) != _PROBE:
            raise ConfigError("tokenizer: decoding does not give back encoded text; use a byte-level tokenizer")
        parts = [part for line in _PROBE.splitlines(keepends=True) for part in self._encode_plain(line)]
        if self._decode(parts) != _PROBE:
            raise ConfigError("tokenizer: text encoded in parts is changed (a space added in front?)")

    def _check_template(self) -> None:
        """Three turns rendered at once must equal prompt, answers and deltas put together."""
        system, user = Message("system", "@system@"), Message("user", "@task@")
        results = [self.format.observation("@result@", ToolCall("execute_bash", {})) for _ in range(3)]
        begin = _join(self._prompt_pieces([system, user], ()))
        thought = _THOUGHT.format(plan="@plan@", answer="@answer@")
        variants = [("@answer@", "@answer@"), (thought, thought), (thought, thought.removeprefix("<think>\n"))]
        for remembered, sampled in variants:
            turns = [_as_dict(system, system.content), _as_dict(user, user.content)]
            grown = begin
            for result in results:
                turns += [{"role": "assistant", "content": remembered}, _as_dict(result, result.content)]
                grown += sampled + _join(self._delta_pieces([result]))
            whole = self._apply(turns)
            if whole == grown:
                break
        else:
            raise ConfigError(
                "tokenizer: its chat template renders earlier turns differently once more turns follow (or adds text "
                f"before an answer), so appended ids would not be what it renders; with format '{self.format.name}' "
                "use a template that only appends"
            )
        if self._encode([(whole, True)]) != self.encode(whole):
            raise ConfigError("tokenizer: it merges text across control tokens, so parts cannot be encoded alone")


def _slot(number: int) -> str:
    return f"{_PAD}@slot-{number}@{_PAD}"


def _as_dict(message: Message, content: str) -> dict[str, str]:
    turn = {"role": message.role, "content": content}
    return turn if message.name is None else {**turn, "name": message.name}


def _fill(rendered: str, contents: Sequence[Sequence[Piece]]) -> list[Piece]:
    """Put contents into the slots of rendered text, stripped where the template strips. First piece is trusted."""
    pieces: list[Piece] = []
    position = 0
    seen: list[int] = []
    for slot in _SLOT.finditer(rendered):
        pieces.append((rendered[position : slot.start()], True))
        position = slot.end()
        number = int(slot[2])
        seen.append(number)
        parts = [text for text, _ in contents[number]]
        if not slot[1]:
            parts[0] = parts[0].lstrip()
        if not slot[3]:
            parts[-1] = parts[-1].rstrip()
        pieces += [(text, trusted) for text, (_, trusted) in zip(parts, contents[number], strict=True)]
    if seen != list(range(len(contents))):
        raise ConfigError(
            f"tokenizer: its chat template does not show each of {len(contents)} messages once and in order"
        )
    return [*pieces, (rendered[position:], True)]


def _join(pieces: Sequence[Piece]) -> str:
    return "".join(text for text, _ in pieces)
