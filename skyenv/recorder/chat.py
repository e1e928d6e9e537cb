"""OpenAI's chat completions. https://platform.openai.com/docs/api-reference/chat"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from skyenv.recorder.wire import (
    Answer,
    Event,
    Refused,
    Request,
    bad,
    ignored,
    listed,
    name_of,
    number_of,
    openai_error,
    text_of,
    tool,
)
from skyenv.types import Message, NativeCall, ToolSpec

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_KNOWN = ("model", "messages", "tools", "stream", "max_tokens", "max_completion_tokens", "n", "stream_options")
_FINISH = {"stop": "stop", "length": "length", "calls": "tool_calls"}


class Chat:
    """See `skyenv.recorder.wire.Dialect`."""

    path = "/v1/chat/completions"

    def read(self, body: Mapping[str, Any]) -> Request:
        """Read a request; one choice at a time, text only."""
        if body.get("n") not in (None, 1):
            raise bad("n", "one answer a call; ask again for another")
        messages = tuple(_message(item, f"messages[{i}]") for i, item in enumerate(listed(body, "messages")))
        if not messages:
            raise bad("messages", "must hold at least one message")
        tools = () if body.get("tool_choice") == "none" else _tools(body)
        return Request(
            messages=messages,
            tools=tools,
            max_tokens=number_of(body, "max_completion_tokens", "max_tokens"),
            stream=body.get("stream") is True,
            model=str(body.get("model") or ""),
            ignored=ignored(body, _KNOWN),
            usage=isinstance(options := body.get("stream_options"), dict) and options.get("include_usage") is True,
        )

    def write(self, answer: Answer) -> dict[str, Any]:
        """One choice."""
        message: dict[str, Any] = {"role": "assistant", "content": answer.content or None, "refusal": None}
        if answer.calls:
            message["tool_calls"] = [_call(call) for call in answer.calls]
        elif message["content"] is None:
            message["content"] = ""
        choice = {"index": 0, "message": message, "finish_reason": _FINISH[answer.finish], "logprobs": None}
        return {**_head(answer, "chat.completion"), "choices": [choice], "usage": _usage(answer)}

    def events(self, answer: Answer) -> Iterator[Event]:
        """Role, content, calls, finish and, if asked for, usage, a chunk each, and a last event that says so."""
        head = _head(answer, "chat.completion.chunk")

        def chunk(delta: Mapping[str, Any], finish: str | None = None) -> Event:
            return "", {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}]}

        yield chunk({"role": "assistant", "content": ""})
        if answer.content:
            yield chunk({"content": answer.content})
        for index, call in enumerate(answer.calls):
            yield chunk({"tool_calls": [{"index": index, **_call(call)}]})
        yield chunk({}, _FINISH[answer.finish])
        if answer.usage:
            yield "", {**head, "choices": [], "usage": _usage(answer)}
        yield "", "[DONE]"

    def error(self, refused: Refused) -> dict[str, Any]:
        """As OpenAI writes it."""
        return openai_error(refused)


def _message(item: Mapping[str, Any], field: str) -> Message:
    role = _ROLES.get(str(item.get("role")))
    if role is None:
        raise bad(f"{field}.role", f"is {item.get('role')!r}; it must be one of {', '.join(_ROLES)}")
    content = text_of(item.get("content"), f"{field}.content", kinds=("text", "refusal"))
    if role == "assistant":
        calls = tuple(_read_call(call, f"{field}.tool_calls") for call in listed(item, "tool_calls"))
        return Message("assistant", content, calls=calls)
    if role == "tool":
        return Message("tool", content, call_id=name_of(item, "tool_call_id", field))
    return Message("system" if role == "system" else "user", content)


def _read_call(item: Mapping[str, Any], field: str) -> NativeCall:
    function = item.get("function")
    if not isinstance(function, dict):
        raise bad(f"{field}.function", "must be an object")
    return NativeCall(name_of(item, "id", field), name_of(function, "name", field), function.get("arguments"))


def _tools(body: Mapping[str, Any]) -> tuple[ToolSpec, ...]:
    specs = []
    for i, item in enumerate(listed(body, "tools")):
        function = item.get("function")
        if item.get("type") != "function" or not isinstance(function, dict):
            raise bad(f"tools[{i}]", "must be of type function; a provider's own tools cannot be run here")
        specs.append(tool(function, "parameters", f"tools[{i}].function"))
    return tuple(specs)


def _call(call: NativeCall) -> dict[str, Any]:
    arguments = call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": answer.created, "model": answer.model}


def _usage(answer: Answer) -> dict[str, int]:
    prompt, sampled = answer.prompt_tokens, answer.sampled_tokens
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
