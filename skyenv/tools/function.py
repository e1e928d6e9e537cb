"""Makes a function a tool: its schema comes from its signature, its descriptions from its docstring.

Parameters are str, int, float, bool, Literal of strings or of integers, list of these, and `| None`; one named
`sandbox` is not part of the schema and gets the sandbox. A plain function runs in a worker thread, so that it may
block. What the function returns is what the model sees, and so is a path that the sandbox refuses; anything else that
it raises is a bug of its author.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import anyio.to_thread

from skyenv.core import Sandbox
from skyenv.errors import ConfigError, EnvError, SandboxPathError
from skyenv.types import ToolSpec

_TYPES: Mapping[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}
_SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Returns|Raises|Example|Examples):\s*$")
_ARGUMENT = re.compile(r"^\s*\*{0,2}`{0,2}(\w+)`{0,2}\s*(?:\([^)]*\))?\s*:\s+(.*)$")
_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class FunctionTool:
    """A `Tool` made of a function by `tool`. Without state of its own, so episodes may share it; still callable."""

    def __init__(self, function: Callable[..., Any], name: str | None = None) -> None:
        self._function = function
        self._wants_sandbox = "sandbox" in inspect.signature(function).parameters
        self._is_async = inspect.iscoroutinefunction(function)
        self.spec, self._nullable = _read(function, name or function.__name__)
        if self._wants_sandbox and not self._is_async:
            raise ConfigError(f"tool {self.spec.name!r}: a function that takes `sandbox` must be an async def")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself, as if it had not been made a tool."""
        return self._function(*args, **kwargs)

    async def run(self, arguments: Mapping[str, Any], sandbox: Sandbox) -> str:
        """Call the function with checked arguments. EnvError when it returns something that is not text."""
        given = dict.fromkeys(self._nullable) | dict(arguments) | ({"sandbox": sandbox} if self._wants_sandbox else {})
        try:
            if self._is_async:
                result = await self._function(**given)
            else:
                result = await anyio.to_thread.run_sync(partial(self._function, **given))
        except SandboxPathError as error:
            return f"ERROR: {error}"
        if not isinstance(result, str):
            raise EnvError(f"tool {self.spec.name!r} returned a {type(result).__name__}; it must return text")
        return result


@typing.overload
def tool(function: Callable[..., Any], /) -> FunctionTool: ...
@typing.overload
def tool(*, name: str) -> Callable[[Callable[..., Any]], FunctionTool]: ...


def tool(
    function: Callable[..., Any] | None = None, /, *, name: str | None = None
) -> FunctionTool | Callable[[Callable[..., Any]], FunctionTool]:
    """Make a function a tool, as `@tool` or `@tool(name="...")`.

    ConfigError when a parameter has no type or one that a schema cannot express, or there is no docstring.
    """
    if function is None:
        return lambda made: FunctionTool(made, name)
    return FunctionTool(function, name)


def _read(function: Callable[..., Any], name: str) -> tuple[ToolSpec, tuple[str, ...]]:
    """The spec, and the parameters that may be None and have no default: absent means None for them."""
    description, described = _docstring(inspect.getdoc(function) or "")
    if not description:
        raise ConfigError(f"tool {name!r}: write a docstring; the model is told what the tool does from it")
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError) as error:
        raise ConfigError(f"tool {name!r}: a type in its signature cannot be resolved: {error}") from error
    properties: dict[str, Any] = {}
    required: list[str] = []
    nullable: list[str] = []
    for key, parameter in inspect.signature(function).parameters.items():
        if key == "sandbox":
            continue
        if parameter.kind not in _KINDS:
            raise ConfigError(f"tool {name!r}: parameter {key!r} cannot be given by name")
        if key not in hints:
            raise ConfigError(f"tool {name!r}: parameter {key!r} needs a type")
        properties[key] = _schema(hints[key], f"tool {name!r}: parameter {key!r}")
        if key in described:
            properties[key]["description"] = described[key]
        if parameter.default is inspect.Parameter.empty:
            (nullable if type(None) in typing.get_args(hints[key]) else required).append(key)
    schema = {"type": "object", "properties": properties, "required": required}
    return ToolSpec(name, description, schema), tuple(nullable)


def _schema(hint: Any, where: str) -> dict[str, Any]:
    if hint in _TYPES:
        return {"type": _TYPES[hint]}
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        kept = [part for part in inner if part is not type(None)]
        if len(kept) == 1:
            return _schema(kept[0], where)
    if origin is Literal and len({type(value) for value in inner}) == 1 and type(inner[0]) in (str, int):
        return {"type": _TYPES[type(inner[0])], "enum": list(inner)}
    if origin is list and len(inner) == 1:
        return {"type": "array", "items": _schema(inner[0], where)}
    allowed = "str, int, float, bool, Literal, list[...] and `| None`"
    raise ConfigError(f"{where} has the type {hint}; use {allowed}")


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """Description, and what the `Args:` section says of each parameter."""
    description: list[str] = []
    described: dict[str, str] = {}
    section, current = "", ""
    for line in text.split("\n"):
        if found := _SECTION.match(line):
            section, current = found[1], ""
        elif not section:
            description.append(line)
        elif section in ("Args", "Arguments", "Parameters"):
            if found := _ARGUMENT.match(line):
                current = found[1]
                described[current] = found[2].strip()
            elif current and line.strip():
                described[current] += " " + line.strip()
    return "\n".join(description).strip(), described
