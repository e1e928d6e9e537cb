"""Messages to token ids and back, append-only: what was sampled is never tokenised again.

A conversation grows as `prompt ids + sampled ids + observation ids + sampled ids + ...`. The observation ids are the
exact text that the model's chat template puts between the end of one answer and the beginning of the next, found by
rendering dummy conversations; a template for which that text depends on the history is refused at construction.
Templates that take results only behind structured calls are rendered with such calls.

What an answer's beginning is prompted with (an opened or an empty thinking block) stays in front of earlier answers,
since the model saw it there, also where the template drops it from earlier turns. `history="strip"` is the other
policy: thinking and that prefix are taken off earlier answers, so each turn that thinks begins a new segment.

Text from prompts and observations is untrusted (`encoding`), so no control id can come out of a repository's files.
Only the template's own text and the format's description of the tools yield control ids.
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby, takewhile
from types import MappingProxyType
from typing import Any, Literal

from skyenv.encoding import Encoder, Piece
from skyenv.errors import ConfigError, boundary
from skyenv.formats.contract import Format, NativeFormat
from skyenv.tokenizer import ByteTokenizer, Tokenizer
from skyenv.types import Message, ToolCall, ToolSpec, Trajectory

__all__ = ["ByteTokenizer", "HistoryPolicy", "Renderer", "Tokenizer"]

_PAD = "\v"  # stands around slots to see whether a template strips a message's content
_PAD_IN_JSON = "\\u000b"
_SLOT = re.compile(r"(\v|\\u000b)?@slot-(\d+)@(\v|\\u000b)?")
_ANSWER = "@the-answer@"
_RESULT = '\n @result@ "q" \\ <b>\u00e9</b>\t\n'
_THOUGHT = "<think>\n{plan}\n</think>\n\n{answer}"
_UNTHINK = "</think>"

HistoryPolicy = Literal["keep", "strip"]


class Renderer:
    """Renders for one tokenizer and one tool-call format; immutable, shared by all rollouts.

    `history` says whether earlier answers keep their thinking; `template_options` are variables of the chat template,
    such as `enable_thinking`. `stop_token_ids` end a turn, the template's own end-of-turn token first. `thinking_open`
    says that the generation prompt ends inside a thinking block. Raises ConfigError when the tokenizer or its template
    cannot be used exactly.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        format: Format,
        *,
        history: HistoryPolicy = "keep",
        template_options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        if history not in ("keep", "strip"):
            raise ConfigError(f"history: {history!r} is not keep or strip")
        self.tokenizer = tokenizer
        self.format = format
        self.history: HistoryPolicy = history
        self._options = dict(template_options)
        self._encoder = Encoder(tokenizer)
        self._structured = False
        try:
            self._learn_template()
        except ConfigError as error:
            self._structured = True  # perhaps it takes results only behind structured calls
            try:
                self._learn_template()
            except ConfigError:
                raise error from None

    def _learn_template(self) -> None:
        """Find out how turns end and begin, and check that deltas add up. Raises ConfigError."""
        result = self.format.observation("", ToolCall("execute_bash", {}))
        rest = self._after_answer([result if self._structured else Message("user", "")])
        found = self._encoder.literal.match(rest)
        if not found:
            raise ConfigError(f"tokenizer: its chat template ends an answer with {rest[:20]!r}, not a control token")
        self.end_of_turn: int = self._encoder.control[found[0]]
        ends = (self.end_of_turn, self.tokenizer.eos_token_id)
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(n for n in ends if n is not None))
        self._ends = frozenset(self.stop_token_ids if self._structured else [self.end_of_turn])
        self.answer_prefix: str = "" if self._structured else self._answer_prefix()
        self.thinking_open: bool = rest.rstrip().endswith("<think>")
        self._check_template()

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """Ids of the conversation so far, tools described in the system message, up to where the answer begins."""
        return self._encoder.encode(self._prompt_pieces(messages, tools))

    def conversation(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> tuple[Message, ...]:
        """The messages with the tools described in the system message, for servers that take text."""
        if isinstance(self.format, NativeFormat) and messages:
            return (replace(messages[0], tools=tuple(tools)), *messages[1:])
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
        return self.delta(messages, completion_ids=completion_ids)

    def delta(self, messages: Sequence[Message], *, completion_ids: Sequence[int]) -> list[int]:
        """As `observation`, for any messages that follow a sampled turn; no answer may be among them."""
        pieces = self._delta_pieces(messages)
        if completion_ids and completion_ids[-1] in self._ends and (end := self._encoder.literal.match(pieces[0][0])):
            pieces[0] = (pieces[0][0][end.end() :], True)
        return self._encoder.encode(pieces)

    def drop_answer_prefix(self, context_ids: list[int]) -> None:
        """Take what only the answer in the making is prompted with off the end of ids, under `strip`."""
        prefix = self.encode(self.answer_prefix) if self.history == "strip" and self.answer_prefix else []
        if prefix and context_ids[-len(prefix) :] == prefix:
            del context_ids[-len(prefix) :]

    def remembered(self, answer_ids: Sequence[int]) -> list[int]:
        """A sampled answer as later turns see it: without its thinking under `strip`."""
        return list(answer_ids) if self.history == "keep" else self.without_thinking(list(answer_ids))

    def without_thinking(self, ids: list[int]) -> list[int]:
        """The ids behind the last `</think>` and its line breaks; the end alone where thinking never ends."""
        end = ids[-1:] if ids and ids[-1] in self.stop_token_ids else []
        body = ids[: len(ids) - len(end)]
        text = self._encoder.decode(body)
        total = text.count(_UNTHINK)
        if not total:
            return end if self.thinking_open or text.lstrip().startswith("<think>") else ids
        cut = bisect_left(range(len(body)), total, key=lambda n: self._encoder.decode(body[:n]).count(_UNTHINK))
        while cut < len(body) and not self._encoder.decode(body[cut : cut + 1]).strip("\n"):
            cut += 1
        return body[cut:] + end

    def clip(self, text: str, max_tokens: int) -> str:
        """The text, or about `max_tokens` of it: head and tail, and in between how much was left out."""
        if len(text.encode("utf-8", "replace")) <= max_tokens:  # a token is a byte or more
            return text
        ids = self._encoder.plain(text)
        if len(ids) <= max_tokens:
            return text
        half = max(1, max_tokens // 2)
        head = _shared(self._encoder.decode(ids[:half]), text)
        tail = _shared(self._encoder.decode(ids[len(ids) - (max_tokens - half) :])[::-1], text[::-1])[::-1]
        left_out = f"[... {len(ids) - max_tokens} tokens ({len(text) - len(head) - len(tail)} characters) left out ...]"
        return f"{head}\n{left_out}\n{tail}"

    def encode(self, text: str) -> list[int]:
        """Encode text as the model would have written it: control literals become ids. Never for untrusted text."""
        return self._encoder.trusted(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a sampled turn, without the token that ended it."""
        if ids and ids[-1] in self.stop_token_ids:
            ids = ids[:-1]
        return self._encoder.decode(ids)

    def prompt_hash(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> str:
        """Short digest of format and prompt ids: equal prompts for equal models have equal hashes."""
        described = json.dumps([self.format.name, self.prompt(messages, tools)])
        return hashlib.sha256(described.encode()).hexdigest()[:16]

    @property
    def template_hash(self) -> str:
        """Short digest of how this renderer writes a conversation: chat template, its options, format, history."""
        probe = [Message("system", "s"), Message("user", "u")]
        delta = self._delta_pieces([self.format.observation("o", ToolCall("execute_bash", {}))])
        known = [self.format.name, self.history, self._prompt_pieces(probe, ()), delta, sorted(self._options)]
        return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]

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
        turns: list[dict[str, Any]] = [{"role": "user", "content": "hi"}, self._dummy_answer(messages, _ANSWER)]
        turns += [_as_dict(message, _slot(i)) for i, message in enumerate(messages)]
        whole = self._apply(turns)
        if not (self._structured and "tool_calls" in turns[1]):
            return whole.rpartition(_ANSWER)[2]
        answered = self._apply(turns[:2], ask=False)
        return whole[self._answer_end(answered) :] if whole.startswith(answered) else ""

    def _answer_end(self, answered: str) -> int:
        """Where the token begins that ends the structured answer at the end of a rendering; its length if none does."""
        literals = list(self._encoder.literal.finditer(answered, answered.rfind(_ANSWER) + 1))
        last = literals[-1] if literals else None
        if last is None or (last[0].startswith("</") and last[0].replace("/", "") in answered):
            return len(answered)  # the tag that closes a call; what follows the answer ends it
        return last.start()

    def _dummy_answer(self, messages: Sequence[Message], text: str) -> dict[str, Any]:
        """An answer that `messages` may follow; a structured one holds `text` as an argument of its calls."""
        called = [message for message in messages if message.role == "tool"]
        if not (self._structured and called):
            return {"role": "assistant", "content": text}
        calls = [
            {
                "id": message.call_id or "000000000",
                "type": "function",
                "function": {"name": message.name or "none", "arguments": {"a": text}},
            }
            for message in called
        ]
        return {"role": "assistant", "content": "", "tool_calls": calls}

    def _answer_prefix(self) -> str:
        """What the generation prompt puts behind the beginning of an answer and history leaves out."""
        user = {"role": "user", "content": "hi"}
        asked = self._apply([user])
        history = self._apply([user, {"role": "assistant", "content": _ANSWER}, user]).partition(_ANSWER)[0]
        return asked.removeprefix(history) if asked.startswith(history) else ""

    def _apply(self, conversation: Sequence[Mapping[str, Any]], *, ask: bool = True) -> str:
        with boundary(ConfigError, "tokenizer: its chat template refused a conversation"):
            rendered = self.tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=ask, **self._options
            )
            return str(rendered)

    def _check_template(self) -> None:
        """Three turns rendered at once must equal prompt, answers and deltas put together."""
        system, user = Message("system", "@system@"), Message("user", "@task@")
        results = [self.format.observation(_RESULT, ToolCall("execute_bash", {})) for _ in range(3)]
        begin = _join(self._prompt_pieces([system, user], ()))
        for answer, sampled, prefix in self._variants(begin, [system, user], results[0]):
            turns = [_as_dict(system, system.content), _as_dict(user, user.content)]
            grown = begin
            for result in results:
                turns += [answer, _as_dict(result, result.content)]
                grown = grown.removesuffix(prefix) + sampled + _join(self._delta_pieces([result]))
            whole = self._apply(turns)
            if whole == grown:
                break
        else:
            raise ConfigError(
                "tokenizer: its chat template renders earlier turns differently once more turns follow (or adds text "
                f"before an answer), so appended ids would not be what it renders; with format '{self.format.name}' "
                "use a template that only appends"
            )
        if self._encoder.encode([(whole, True)]) != self.encode(whole):
            raise ConfigError("tokenizer: it merges text across control tokens, so parts cannot be encoded alone")

    def _variants(
        self, begin: str, prompt: Sequence[Message], result: Message
    ) -> list[tuple[dict[str, Any], str, str]]:
        """Answers as the template takes them, as they are sampled, and what of the prompt before it drops later."""
        if self._structured and result.role == "tool":
            answer = self._dummy_answer([result], _ANSWER)
            asked = self._apply([*(_as_dict(m, m.content) for m in prompt), answer], ask=False)
            end = self._answer_end(asked)
            return [(answer, asked[len(begin) : end], "")] if asked.startswith(begin) else []
        thought = _THOUGHT.format(plan="@plan@", answer="@answer@")
        texts = [("@answer@", "@answer@"), (thought, thought), (thought, thought.removeprefix("<think>\n"))]
        prefixes = dict.fromkeys(["", self.answer_prefix])
        return [
            ({"role": "assistant", "content": text}, sampled, prefix) for prefix in prefixes for text, sampled in texts
        ]


def _shared(first: str, second: str) -> str:
    """What two texts begin with alike: ids cut inside a character decode to something else at the cut."""
    return first[: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))]


def _slot(number: int) -> str:
    return f"{_PAD}@slot-{number}@{_PAD}"


def _as_dict(message: Message, content: str) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": message.role, "content": content}
    if message.call_id:
        turn["tool_call_id"] = message.call_id
    return turn if message.name is None else {**turn, "name": message.name}


def _fill(rendered: str, contents: Sequence[Sequence[Piece]]) -> list[Piece]:
    """Put contents into the slots of rendered text as the template does: stripped, or as the inside of a JSON string.

    The first piece is the template's own text.
    """
    pieces: list[Piece] = []
    position = 0
    seen: list[int] = []
    for slot in _SLOT.finditer(rendered):
        pieces.append((rendered[position : slot.start()], True))
        position = slot.end()
        number = int(slot[2])
        seen.append(number)
        parts = [text for text, _ in contents[number]]
        if _PAD_IN_JSON in (slot[1], slot[3]):
            parts = [json.dumps(text, ensure_ascii=False)[1:-1] for text in parts]
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
