"""Checks a tool call's arguments against the tool's schema, and turns what models write into the types it names.

A small subset of JSON schema is read: `type` (one name), `enum`, `items` of arrays, `required`; unknown keys are
refused. Every message is a function of the input alone, because rollouts of one group are compared. Checking is
idempotent: arguments that passed pass again unchanged.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from skyenv.types import ToolSpec

_INTEGER = re.compile(r"[+-]?\d{1,18}(?:\.0*)?")
_NUMBER = re.compile(r"[+-]?(?:\d{1,18}(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?")
_INTEGER_LIST = re.compile(r"[(\[]?\s*(-?\d{1,18}(?:\s*,\s*-?\d{1,18})+)\s*,?\s*[)\]]?")
_IGNORED = frozenset({"security_risk"})


def check_arguments(spec: ToolSpec, arguments: object) -> dict[str, Any] | str:
    """Return the arguments with the types of the schema, or the text of an error for the model.

    Booleans may be strings in any case, integers may be `"5"` or `5.0`, arrays and objects may be JSON text, null
    counts as absent unless the schema allows it. `security_risk` is dropped unless the tool declares it. Parameters
    that are not named are allowed where `additionalProperties` says so; what else of a schema is not known here allows
    anything.
    """
    if not isinstance(arguments, Mapping):
        return f"The arguments of tool '{spec.name}' must be an object with named parameters."
    properties: Mapping[str, Mapping[str, Any]] = spec.parameters.get("properties", {})
    given = {
        str(name): value
        for name, value in arguments.items()
        if (value is not None or _nullable(properties.get(name))) and (name in properties or name not in _IGNORED)
    }
    others = spec.parameters.get("additionalProperties", False) is not False  # only where the schema says so
    if not others and (unknown := sorted(set(given) - set(properties))):
        allowed = ", ".join(sorted(properties)) or "none"
        return f"Tool '{spec.name}' has no parameter named {_names(unknown)}. Its parameters: {allowed}."
    if missing := sorted(set(spec.parameters.get("required", ())) - set(given)):
        return f"Tool '{spec.name}' needs the parameter {_names(missing)}, which is missing."
    checked: dict[str, Any] = {}
    for name, value in given.items():
        try:
            checked[name] = _plain(_coerce(value, properties.get(name, {})))
        except ValueError as error:
            return f"Parameter '{name}' of tool '{spec.name}' must be {error}; got {_show(value)}."
    return checked


def _nullable(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return False
    kind, choices = schema.get("type"), schema.get("anyOf")
    if isinstance(choices, list) and any(_nullable(choice) for choice in choices):
        return True
    return kind == "null" or (isinstance(kind, list) and "null" in kind)


def _coerce(value: Any, schema: Any) -> Any:
    """Raises ValueError whose text completes the sentence "must be ..."."""
    if not isinstance(schema, Mapping) or (value is None and _nullable(schema)):
        return value
    kind, enum = schema.get("type"), schema.get("enum")
    if isinstance(kind, list):  # of several kinds any may be meant
        kinds = [each for each in kind if each != "null"]
        kind = kinds[0] if len(kinds) == 1 else None
    if kind == "string" and enum in (["true", "false"], ["false", "true"]) and isinstance(value, bool | str):
        value = str(value).strip().lower()
    if isinstance(kind, str) and kind in _COERCERS:
        value = _COERCERS[kind](value, schema)
    if isinstance(enum, list) and value not in enum:
        raise ValueError("one of " + ", ".join(sorted(map(str, enum))))
    return value


def _plain(value: Any) -> Any:
    """The value, if it can be written as JSON and UTF-8 again. Raises ValueError as `_coerce` does."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("valid Unicode text, without lone surrogates") from error
    except (RecursionError, TypeError) as error:
        raise ValueError("plain JSON that is not nested too deeply") from error
    return value


def _string(value: Any, _: Mapping[str, Any]) -> str:
    if not isinstance(value, str):
        raise ValueError("a string")
    return value


def _integer(value: Any, _: Mapping[str, Any]) -> int:
    if isinstance(value, str) and _INTEGER.fullmatch(value.strip()):
        return int(value.strip().partition(".")[0])
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("an integer")
    return value


def _number(value: Any, _: Mapping[str, Any]) -> float:
    """A whole number stays one: programs read `2000.0` otherwise than `2000`."""
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        text = value.strip()
        value = int(text) if text.lstrip("+-").isdecimal() else float(text)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("a number")
    try:
        finite = math.isfinite(value)
    except OverflowError:
        finite = False
    if not finite:
        raise ValueError("a finite number")
    return value


def _boolean(value: Any, _: Mapping[str, Any]) -> bool:
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _array(value: Any, schema: Mapping[str, Any]) -> list[Any]:
    if isinstance(value, str):
        bare = _INTEGER_LIST.fullmatch(value.strip())
        value = parse_json(f"[{bare[1]}]" if bare else value, "an array")
    if not isinstance(value, list | tuple):
        raise ValueError("an array")
    items = schema.get("items", {})
    try:
        return [_coerce(item, items) for item in value]
    except ValueError as error:
        raise ValueError(f"an array whose items are each {error}") from error


def _object(value: Any, _: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(value, str):
        value = parse_json(value, "an object")
    if not isinstance(value, Mapping):
        raise ValueError("an object")
    return dict(value)


_COERCERS = {
    "string": _string,
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "array": _array,
    "object": _object,
}


def parse_json(text: str, what: str) -> Any:
    """Read JSON text whose strings may hold raw newlines. Raises ValueError(`what`) and nothing else."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError) as error:
        raise ValueError(what) from error


def _names(names: list[str]) -> str:
    listed = ", ".join(f"'{name[:80]}'" for name in names)
    return listed.encode("utf-8", "backslashreplace").decode()


def _show(value: Any) -> str:
    try:
        text = json.dumps(value, default=str)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= 120 else text[:117] + "..."
