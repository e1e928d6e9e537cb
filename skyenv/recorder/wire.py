"""What the dialects have in common: a request read, an answer to write, a refusal. Dialects are pure functions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from skyenv.types import Message, NativeCall, ToolSpec

_HOSTED = ("web_search", "web_fetch", "file_search", "code_interpreter", "code_execution", "image_generation", "mcp")
Finish = Literal["stop", "length", "calls"]
NamedEvent = tuple[str, Mapping[str, Any]]
Event = tuple[str, Mapping[str, Any] | str]
"""Name and data of one server-sent event; text is sent as it is."""


@dataclass(frozen=True, slots=True)
class Request:
    """One call of an agent. `ignored` names parameters and tools without effect here; `max_tokens` None: the session's.

    `usage`: a stream tells how many tokens there were.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    max_tokens: int | None = None
    stream: bool = False
    model: str = ""
    ignored: tuple[str, ...] = ()
    usage: bool = True


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model said. `calls` carry their arguments as JSON text; `created` in seconds since the epoch.

    `usage` is the request's.
    """

    id: str
    model: str
    content: str
    calls: tuple[NativeCall, ...]
    finish: Finish
    prompt_tokens: int
    sampled_tokens: int
    created: int
    usage: bool = True


class Refused(Exception):
    """A request that is not answered. `kind` is OpenAI's error code, or its kind where there is none."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


class Dialect(Protocol):
    """One provider's interface: a path, how requests are read and how answers and errors are written."""

    path: str

    def read(self, body: Mapping[str, Any]) -> Request:
        """Read a request. Raises Refused with status 400 naming the field."""
        ...

    def write(self, answer: Answer) -> dict[str, Any]:
        """The answer as one JSON object."""
        ...

    def events(self, answer: Answer) -> Iterator[Event]:
        """The answer as server-sent events; an empty name is sent without one."""
        ...

    def error(self, refused: Refused) -> dict[str, Any]:
        """A refusal as one JSON object."""
        ...


def bad(field: str, message: str) -> Refused:
    """Make the refusal of a request that is not well formed."""
    return Refused(400, "invalid_request_error", f"{field}: {message}")


def listed(body: Mapping[str, Any], field: str) -> Sequence[Mapping[str, Any]]:
    """A list of objects, empty when the field is missing. Raises Refused."""
    value = body.get(field)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise bad(field, "must be a list of objects")
    return value


def text_of(value: Any, field: str, *, kinds: Sequence[str] = ("text",), dropped: Sequence[str] = ()) -> str:
    """The text of a content: a string, or parts of these kinds. Raises Refused for anything but text."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise bad(field, "must be text or a list of parts")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in dropped:
            continue
        if kind not in kinds or not isinstance(part.get("text"), str):
            raise bad(field, f"holds a part of type {kind!r}; only text can be recorded")
        texts.append(part["text"])
    return "".join(texts)


def name_of(item: Mapping[str, Any], key: str, field: str) -> str:
    """A text that must be there and not be empty. Raises Refused."""
    value = item.get(key)
    if not isinstance(value, str) or not value:
        raise bad(f"{field}.{key}", "must be text")
    return value


def number_of(body: Mapping[str, Any], *fields: str) -> int | None:
    """The first of several fields that is set, a positive whole number. Raises Refused."""
    for field in fields:
        value = body.get(field)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise bad(field, "must be a positive whole number")
            return value
    return None


def tool(item: Mapping[str, Any], schema: str, field: str) -> ToolSpec:
    """A tool's description; `schema` is the key of its parameters. Raises Refused."""
    parameters = item.get(schema)
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict) or not _is_schema(parameters):
        raise bad(f"{field}.{schema}", "must be a JSON schema of an object")
    return ToolSpec(name_of(item, "name", field), str(item.get("description") or ""), parameters)


def is_hosted(item: Mapping[str, Any]) -> bool:
    """Whether a provider's servers would run a tool: the model is not told of it, and its agent can do without."""
    return str(item.get("type")).startswith(_HOSTED)


def _is_schema(parameters: Mapping[str, Any]) -> bool:
    """Whether calls can be checked against it, as far down as they are."""
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return False
    if not all(isinstance(name, str) for name in required):
        return False
    return all(isinstance(each, bool | dict) for each in properties.values())


def ignored(body: Mapping[str, Any], known: Sequence[str]) -> tuple[str, ...]:
    """Fields that are set and have no effect here, and hosted tools, by name."""
    fields = sorted(key for key, value in body.items() if key not in known and value is not None)
    return (*fields, *(f"tools.{item['type']}" for item in listed(body, "tools") if is_hosted(item)))


def openai_error(refused: Refused) -> dict[str, Any]:
    """A refusal as OpenAI writes it."""
    return {"error": {"message": str(refused), "type": refused.kind, "param": None, "code": refused.kind}}


def encode(events: Iterator[Event]) -> Iterator[bytes]:
    """Server-sent events as bytes, all ASCII: many readers end lines at characters that JSON leaves as they are."""
    for name, data in events:
        head = f"event: {name}\n" if name else ""
        text = data if isinstance(data, str) else json.dumps(data)
        yield f"{head}data: {text}\n\n".encode()
