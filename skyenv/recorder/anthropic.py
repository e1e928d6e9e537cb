"""Anthropic's messages. https://docs.anthropic.com/en/api/messages"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from skyenv.recorder.wire import (
    Answer,
    Event,
    NamedEvent,
    Refused,
    Request,
    bad,
    ignored,
    is_hosted,
    listed,
    name_of,
    number_of,
    text_of,
    tool,
)
from skyenv.types import Message, NativeCall, ToolSpec

_KNOWN = ("model", "messages", "system", "tools", "stream", "max_tokens", "metadata")
_DROPPED = ("thinking", "redacted_thinking")
_FINISH = {"stop": "end_turn", "length": "max_tokens", "calls": "tool_use"}
_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 503: "overloaded_error"}


class Anthropic:
    """See `skyenv.recorder.wire.Dialect`."""

    path = "/v1/messages"

    def read(self, body: Mapping[str, Any]) -> Request:
        """Read a request; tool results become messages of their own."""
        system = text_of(body.get("system"), "system")
        messages = [Message("system", system)] if system else []
        for i, item in enumerate(listed(body, "messages")):
            messages += _messages(item, f"messages[{i}]")
        if not any(message.role != "system" for message in messages):
            raise bad("messages", "must hold at least one message")
        choice = body.get("tool_choice")
        nothing = isinstance(choice, dict) and choice.get("type") == "none"
        return Request(
            messages=tuple(messages),
            tools=() if nothing else _tools(body),
            max_tokens=number_of(body, "max_tokens"),
            stream=body.get("stream") is True,
            model=str(body.get("model") or ""),
            ignored=ignored(body, _KNOWN),
        )

    def write(self, answer: Answer) -> dict[str, Any]:
        """The message with its blocks."""
        return {
            **_head(answer),
            "content": _blocks(answer),
            "stop_reason": _FINISH[answer.finish],
            "stop_sequence": None,
            "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.sampled_tokens},
        }

    def events(self, answer: Answer) -> Iterator[Event]:
        """The events of a message whose blocks arrive whole."""
        for name, data in self._events(answer):
            yield name, {"type": name, **data}

    def _events(self, answer: Answer) -> Iterator[NamedEvent]:
        usage = {"input_tokens": answer.prompt_tokens, "output_tokens": 0}
        begun = {**_head(answer), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield "message_start", {"message": begun}
        for index, block in enumerate(_blocks(answer)):
            if block["type"] == "text":
                empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
            else:
                written = json.dumps(block["input"], ensure_ascii=False)
                empty, delta = {**block, "input": {}}, {"type": "input_json_delta", "partial_json": written}
            yield "content_block_start", {"index": index, "content_block": empty}
            yield "content_block_delta", {"index": index, "delta": delta}
            yield "content_block_stop", {"index": index}
        end = {"stop_reason": _FINISH[answer.finish], "stop_sequence": None}
        yield "message_delta", {"delta": end, "usage": {"output_tokens": answer.sampled_tokens}}
        yield "message_stop", {}

    def error(self, refused: Refused) -> dict[str, Any]:
        """As Anthropic writes it."""
        kind = _KINDS.get(refused.status, "invalid_request_error" if refused.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": str(refused)}}


def _messages(item: Mapping[str, Any], field: str) -> list[Message]:
    role, content = item.get("role"), item.get("content")
    if role not in ("user", "assistant", "system"):
        raise bad(f"{field}.role", f"is {role!r}; it must be user, assistant or system")
    if isinstance(content, str):
        return [Message(role, content)]
    blocks = listed(item, "content")
    if role == "system":
        return [Message("system", text_of(list(blocks), f"{field}.content"))]
    if role == "assistant":
        calls = tuple(_call(block, f"{field}.content") for block in blocks if block.get("type") == "tool_use")
        return [
            Message(
                "assistant", text_of(list(blocks), f"{field}.content", dropped=(*_DROPPED, "tool_use")), calls=calls
            )
        ]
    messages = [_result(block, f"{field}.content") for block in blocks if block.get("type") == "tool_result"]
    text = text_of(list(blocks), f"{field}.content", dropped=("tool_result",))
    return [*messages, Message("user", text)] if text or not messages else messages


def _call(block: Mapping[str, Any], field: str) -> NativeCall:
    return NativeCall(name_of(block, "id", field), name_of(block, "name", field), block.get("input") or {})


def _result(block: Mapping[str, Any], field: str) -> Message:
    content = text_of(block.get("content"), f"{field}.content")
    return Message("tool", content, call_id=name_of(block, "tool_use_id", field))


def _tools(body: Mapping[str, Any]) -> tuple[ToolSpec, ...]:
    specs = []
    for i, item in enumerate(listed(body, "tools")):
        if is_hosted(item):
            continue
        if item.get("type", "custom") != "custom":
            raise bad(f"tools[{i}].type", f"is {item['type']!r}; the model here does not know what such a tool takes")
        specs.append(tool(item, "input_schema", f"tools[{i}]"))
    return tuple(specs)


def _head(answer: Answer) -> dict[str, Any]:
    return {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": answer.model}


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answer.content or not answer.calls:
        blocks.append({"type": "text", "text": answer.content})
    uses = [{"type": "tool_use", "id": c.id, "name": c.name, "input": json.loads(c.arguments)} for c in answer.calls]
    return blocks + uses
