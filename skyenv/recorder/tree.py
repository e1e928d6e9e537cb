"""Conversations as they grow and fork, and the segments that they are recorded in.

An agent sends its whole history with every call. What of it is ours is found by the messages themselves: each answer
is known by a digest of everything up to it. A call whose last answer is known goes on behind the ids that were really
sampled; when another call has gone on from the same place before, it does so in a segment of its own, in which those
ids are context. A call whose answers are not known (another conversation, a sub-agent, a rewritten history) begins a
segment with all of its history as context. So sampled ids stand under mask 1 in exactly one segment, behind exactly
the ids that they were sampled behind, and no segment is ever cut.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyenv.recorder.wire import Request
from skyenv.renderer import Renderer
from skyenv.types import Completion, Message, NativeCall, Segment, ToolCall, ToolSpec


@dataclass(frozen=True, slots=True)
class Point:
    """Where an answer ended: the first `length` ids of a segment are the conversation up to there."""

    segment: Segment
    length: int
    turn: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a call is sampled behind. `digest` stands for its messages, `base` is the answer that it goes on from."""

    ids: tuple[int, ...]
    messages: tuple[Message, ...]
    digest: bytes
    base: Point | None
    news: tuple[Message, ...]


class Conversations:
    """Everything that one session's calls said. Sampled ids enter by `record` and never leave.

    `counters`: `conversations` begun, `forks` of known ones, `rewritten` answers that came back otherwise than they
    were sampled.
    """

    def __init__(self, renderer: Renderer) -> None:
        self.segments: list[Segment] = []
        self.counters: Counter[str] = Counter()
        self._renderer = renderer
        self._known: dict[bytes, Point] = {}
        self._turns: list[list[int]] = []

    def prompt(self, request: Request) -> Prompt:
        """The ids that a call's history is for the model. Changes nothing."""
        digests = _digests(request.tools, request.messages)
        last = max((i for i, m in enumerate(request.messages) if m.role == "assistant"), default=-1)
        base = self._known.get(digests[last + 1]) if last >= 0 else None
        rendered = tuple(self._rendered(request.messages))
        if base is None:
            ids = self._renderer.prompt(_one_system(rendered), request.tools)
            return Prompt(tuple(ids), rendered, digests[-1], None, rendered[last + 1 :])
        before, news = base.segment.token_ids[: base.length], rendered[last + 1 :]
        ids = [*before, *self._renderer.delta(news, completion_ids=before[-1:])]
        return Prompt(tuple(ids), rendered, digests[-1], base, news)

    def record(self, prompt: Prompt, completion: Completion, answer: Message, turn: int) -> None:
        """Put what was sampled behind a prompt into the segment that it belongs to."""
        base = prompt.base
        if base is not None and len(base.segment.token_ids) == base.length:
            segment, known = base.segment, base.length
        else:
            segment, known = Segment(), 0
            self.segments.append(segment)
            self._turns.append([])
            self.counters["conversations" if base is None else "forks"] += 1
            if base is None:
                self.counters["rewritten"] += sum(message.role == "assistant" for message in prompt.messages)
        segment.append_context(prompt.ids[known:])
        if completion.token_ids:
            segment.append_sampled(completion.token_ids, completion.logprobs)
        else:
            segment.append_context(self._renderer.encode(completion.text))
        self._turns[next(i for i, each in enumerate(self.segments) if each is segment)].append(turn)
        self._known[_extend(prompt.digest, answer)] = Point(segment, len(segment.token_ids), turn)

    def order(self) -> list[int]:
        """The numbers of all turns as their answers stand in the segments, one after the other."""
        return [turn for turns in self._turns for turn in turns]

    def _rendered(self, messages: Sequence[Message]) -> list[Message]:
        """Messages as the format writes them: calls as text, results under the name of their call.

        System messages after the beginning are user messages: few chat templates take them there.
        """
        format, rendered, names = self._renderer.format, list[Message](), dict[str, ToolCall]()
        for message in messages:
            if message.role == "assistant":
                calls = [ToolCall(call.name, _arguments(call), call.id) for call in message.calls]
                names |= {call.id: call for call in calls}
                parts = [message.content, *(format.render_call(call) for call in calls)]
                rendered.append(Message("assistant", "\n".join(part for part in parts if part)))
            elif message.role == "tool":
                rendered.append(format.observation(message.content, names.get(message.call_id)))
            elif message.role == "system" and any(known.role != "system" for known in rendered):
                rendered.append(Message("user", message.content))
            else:
                rendered.append(message)
        return rendered


def _one_system(messages: Sequence[Message]) -> list[Message]:
    """Leading system messages as one: chat templates take no more."""
    count = next((i for i, message in enumerate(messages) if message.role != "system"), len(messages))
    joined = "\n\n".join(message.content for message in messages[:count])
    return [*([Message("system", joined)] if count else []), *messages[count:]]


def _arguments(call: NativeCall) -> Mapping[str, Any]:
    """The arguments of a call that an agent sent back; what is no object stands under a name of its own."""
    value = call.arguments
    if isinstance(value, str):
        try:
            value = json.loads(value or "{}")
        except ValueError:
            value = {"": value}
    return value if isinstance(value, Mapping) else {"": value}


def _digests(tools: Sequence[ToolSpec], messages: Sequence[Message]) -> list[bytes]:
    """A digest for every prefix of the messages, the empty one first; tools are part of all."""
    specs = [[spec.name, spec.description, spec.parameters] for spec in tools]
    digests = [_digest(b"", specs)]
    for message in messages:
        digests.append(_extend(digests[-1], message))
    return digests


def _extend(before: bytes, message: Message) -> bytes:
    """The digest of one message more. Ids of calls, white space around text and the order of keys say nothing."""
    calls = [[call.name, _arguments(call)] for call in message.calls]
    return _digest(before, [message.role, message.content.strip(), calls])


def _digest(before: bytes, value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(before + text.encode()).digest()
