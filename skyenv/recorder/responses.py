"""OpenAI's responses, without state on the server. https://platform.openai.com/docs/api-reference/responses"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
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
    openai_error,
    text_of,
    tool,
)
from skyenv.types import Message, NativeCall, ToolSpec

_KNOWN = ("model", "input", "instructions", "tools", "stream", "max_output_tokens", "store", "include")
_TEXTS = ("input_text", "output_text", "text", "refusal")
_STORED = "nothing is stored here; send the whole history as input"


class Responses:
    """See `skyenv.recorder.wire.Dialect`."""

    path = "/v1/responses"

    def read(self, body: Mapping[str, Any]) -> Request:
        """Read a request that carries its whole history."""
        for field in ("previous_response_id", "conversation"):
            if body.get(field) is not None:
                raise bad(field, _STORED)
        if body.get("background"):
            raise bad("background", "answers are not stored; wait for them")
        messages = [Message("system", text) for text in [text_of(body.get("instructions"), "instructions")] if text]
        if isinstance(body.get("input"), str):
            messages.append(Message("user", body["input"]))
        else:
            messages += _messages(listed(body, "input"))
        if not any(message.role != "system" for message in messages):
            raise bad("input", "must hold at least one message")
        return Request(
            messages=tuple(messages),
            tools=() if body.get("tool_choice") == "none" else _tools(body),
            max_tokens=number_of(body, "max_output_tokens"),
            stream=body.get("stream") is True,
            model=str(body.get("model") or ""),
            ignored=ignored(body, _KNOWN),
        )

    def write(self, answer: Answer) -> dict[str, Any]:
        """The finished response."""
        return _response(answer, "incomplete" if answer.finish == "length" else "completed", _items(answer))

    def events(self, answer: Answer) -> Iterator[Event]:
        """The events of a response whose items arrive whole."""
        for number, (name, data) in enumerate(self._events(answer)):
            yield name, {"type": name, "sequence_number": number, **data}

    def _events(self, answer: Answer) -> Iterator[NamedEvent]:
        started = _response(answer, "in_progress", [])
        yield "response.created", {"response": started}
        yield "response.in_progress", {"response": started}
        for index, item in enumerate(_items(answer)):
            place = {"output_index": index, "item_id": item["id"]}
            empty: dict[str, Any] = {"content": []} if item["type"] == "message" else {"arguments": ""}
            yield "response.output_item.added", {**place, "item": {**item, **empty, "status": "in_progress"}}
            yield from _text_events(item, place) if item["type"] == "message" else _call_events(item, place)
            yield "response.output_item.done", {**place, "item": item}
        whole = self.write(answer)
        yield f"response.{whole['status']}", {"response": whole}

    def error(self, refused: Refused) -> dict[str, Any]:
        """As OpenAI writes it."""
        return openai_error(refused)


def _messages(items: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Items as messages; calls are part of the answer before them."""
    messages: list[Message] = []
    for i, item in enumerate(items):
        field, kind = f"input[{i}]", item.get("type", "message")
        if kind == "reasoning":
            continue
        if kind == "item_reference":
            raise bad(field, f"refers to an item, but {_STORED}")
        if kind == "function_call":
            name = ".".join([*([item["namespace"]] if item.get("namespace") else []), name_of(item, "name", field)])
            call = NativeCall(name_of(item, "call_id", field), name, item.get("arguments"))
            if not messages or messages[-1].role != "assistant":
                messages.append(Message("assistant", ""))
            messages[-1] = replace(messages[-1], calls=(*messages[-1].calls, call))
        elif kind == "function_call_output":
            output = text_of(item.get("output"), f"{field}.output", kinds=_TEXTS)
            messages.append(Message("tool", output, call_id=name_of(item, "call_id", field)))
        elif kind == "message":
            messages.append(_message(item, field))
        else:
            raise bad(f"{field}.type", f"is {kind!r}; messages, function calls and their outputs can be recorded")
    return messages


def _message(item: Mapping[str, Any], field: str) -> Message:
    content = text_of(item.get("content"), f"{field}.content", kinds=_TEXTS)
    match item.get("role"):
        case "system" | "developer":
            return Message("system", content)
        case "user":
            return Message("user", content)
        case "assistant":
            return Message("assistant", content)
    raise bad(f"{field}.role", f"is {item.get('role')!r}; it must be system, developer, user or assistant")


def _tools(body: Mapping[str, Any], within: str = "", namespace: str = "") -> tuple[ToolSpec, ...]:
    """The tools; those of a namespace are called `NAMESPACE.NAME`, which no function's own name can be."""
    specs: list[ToolSpec] = []
    for i, item in enumerate(listed(body, "tools")):
        field = f"{within}tools[{i}]"
        if item.get("type") == "namespace" and not namespace:
            specs += _tools(item, f"{field}.", f"{name_of(item, 'name', field)}.")
        elif item.get("type") == "function":
            spec = tool(item, "parameters", field)
            specs.append(replace(spec, name=f"{namespace}{spec.name}"))
        elif not is_hosted(item):
            known = f"is {item.get('type')!r}; the model here does not know what such a tool takes"
            raise bad(f"{field}.type", known)
    return tuple(specs)


def _items(answer: Answer) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if answer.content or not answer.calls:
        part = {"type": "output_text", "text": answer.content, "annotations": [], "logprobs": []}
        head = {"type": "message", "id": f"msg_{answer.id}", "role": "assistant", "status": "completed"}
        items.append({**head, "content": [part]})
    for number, call in enumerate(answer.calls):
        head = {"type": "function_call", "id": f"fc_{answer.id}_{number}", "status": "completed"}
        namespace, _, name = call.name.rpartition(".")
        called = {"name": name, "namespace": namespace} if namespace else {"name": name}
        items.append({**head, "call_id": call.id, **called, "arguments": call.arguments})
    return items


def _text_events(item: Mapping[str, Any], place: Mapping[str, Any]) -> Iterator[NamedEvent]:
    place = {**place, "content_index": 0}
    part = item["content"][0]
    yield "response.content_part.added", {**place, "part": {**part, "text": ""}}
    yield "response.output_text.delta", {**place, "delta": part["text"], "logprobs": []}
    yield "response.output_text.done", {**place, "text": part["text"], "logprobs": []}
    yield "response.content_part.done", {**place, "part": part}


def _call_events(item: Mapping[str, Any], place: Mapping[str, Any]) -> Iterator[NamedEvent]:
    yield "response.function_call_arguments.delta", {**place, "delta": item["arguments"]}
    yield "response.function_call_arguments.done", {**place, "arguments": item["arguments"], "name": item["name"]}


def _response(answer: Answer, status: str, items: list[dict[str, Any]]) -> dict[str, Any]:
    prompt, sampled = answer.prompt_tokens, answer.sampled_tokens
    usage = {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + sampled,
    }
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": answer.created,
        "model": answer.model,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "output": items,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": None if status == "in_progress" else usage,
    }
