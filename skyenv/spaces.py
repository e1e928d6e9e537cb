"""Gymnasium spaces for language: any text, and tool calls that a schema describes.

Both are unbounded in number, so they cannot be flattened to arrays; samples are meant for checking wiring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Space

from skyenv.types import ToolCall, ToolSpec

_WORDS = ("ls", "pwd", "echo", "hello", "x = 1", "README.md", "/tmp/a.txt", "naïve", "", "two words", "line\nline")


class Unicode(Space[str]):
    """Any text of at most `max_length` characters."""

    def __init__(self, max_length: int = 1 << 24, *, seed: int | np.random.Generator | None = None) -> None:
        self.max_length = max_length
        super().__init__(dtype=str, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        """Never."""
        return False

    def sample(self, mask: None = None, probability: None = None) -> str:
        """Return a short text."""
        return str(self.np_random.choice(_WORDS))[: self.max_length]

    def contains(self, x: Any) -> bool:
        """Whether `x` is text within the length."""
        return isinstance(x, str) and len(x) <= self.max_length

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unicode) and other.max_length == self.max_length

    def __hash__(self) -> int:
        return hash(("Unicode", self.max_length))

    def __repr__(self) -> str:
        return f"Unicode({self.max_length})"


class ToolCallSpace(Space[Any]):
    """Calls of the given tools: a `ToolCall`, or a mapping with `name` and `arguments`; samples are mappings."""

    def __init__(self, tools: Sequence[ToolSpec], *, seed: int | np.random.Generator | None = None) -> None:
        self.tools = tuple(tools)
        super().__init__(dtype=object, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        """Never."""
        return False

    def sample(self, mask: None = None, probability: None = None) -> dict[str, Any]:
        """Return a valid call of a random tool: all required arguments, and some of the others."""
        spec = self.tools[int(self.np_random.integers(len(self.tools)))]
        required = spec.parameters.get("required", ())
        arguments = {
            name: self._value(schema)
            for name, schema in spec.parameters.get("properties", {}).items()
            if name in required or self.np_random.random() < 0.25
        }
        return {"name": spec.name, "arguments": arguments}

    def _value(self, schema: Mapping[str, Any]) -> Any:
        if "enum" in schema:
            return schema["enum"][int(self.np_random.integers(len(schema["enum"])))]
        match schema.get("type"):
            case "integer":
                return int(self.np_random.integers(1, 10))
            case "number":
                return float(self.np_random.integers(1, 10))
            case "boolean":
                return bool(self.np_random.integers(2))
            case "array":
                return [self._value(schema.get("items", {})) for _ in range(2)]
            case "object":
                return {name: self._value(inner) for name, inner in schema.get("properties", {}).items()}
            case _:
                return str(self.np_random.choice(_WORDS))

    def contains(self, x: Any) -> bool:
        """Whether `x` names one of the tools and its arguments have the types of the schema."""
        if isinstance(x, ToolCall):
            name, arguments = x.name, x.arguments
        elif isinstance(x, Mapping) and set(x) == {"name", "arguments"}:
            name, arguments = x["name"], x["arguments"]
        else:
            return False
        specs = [spec for spec in self.tools if spec.name == name]
        return bool(specs) and isinstance(arguments, Mapping) and _fits(arguments, specs[0].parameters)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ToolCallSpace) and other.tools == self.tools

    def __hash__(self) -> int:
        return hash(tuple(spec.name for spec in self.tools))

    def __repr__(self) -> str:
        return f"ToolCallSpace({', '.join(spec.name for spec in self.tools)})"


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    if "enum" in schema and value not in schema["enum"]:
        return False
    match schema.get("type"):
        case "object":
            properties = schema.get("properties", {})
            return (
                isinstance(value, Mapping)
                and set(schema.get("required", ())) <= set(value)
                and all(name in properties and _fits(item, properties[name]) for name, item in value.items())
            )
        case "array":
            return isinstance(value, list | tuple) and all(_fits(item, schema.get("items", {})) for item in value)
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "boolean":
            return isinstance(value, bool)
        case "string":
            return isinstance(value, str)
        case _:
            return True
