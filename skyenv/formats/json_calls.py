"""Calls written as JSON: what the JSON formats share.

The JSON decides where a call ends, so markers inside its strings are text. Damage without doubt about the meaning is
repaired and counted: raw line breaks in strings, surplus closing braces, arguments encoded twice.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection
from typing import Any

from skyenv.formats.contract import (
    CUT_OFF,
    MAX_CALLS,
    Written,
    refuse_constant,
    refuse_foreign,
    reject,
    too_many,
    unique_keys,
)
from skyenv.types import ToolCall, ToolSpec

SPACE = re.compile(r"\s*")
SURPLUS = re.compile(r"[\s}]*")
_CONTROL = re.compile(r"[\x00-\x1f]")
_STRICT = json.JSONDecoder(object_pairs_hook=unique_keys, parse_constant=refuse_constant)
_LENIENT = json.JSONDecoder(object_pairs_hook=unique_keys, parse_constant=refuse_constant, strict=False)
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


class JsonText:
    """One text of a model. `markers` finds what may open thinking or calls, `calls` reads at what opens calls.

    `calls(text, found)` returns the calls behind a marker and the position behind them, None for a marker that may not
    stand there. `thinking` maps the markers that open thinking to those that close it.
    """

    def __init__(self, text: str, *, cut: bool, shape: str) -> None:
        self.text = text
        self.cut = cut
        self.shape = shape
        self.repairs = 0
        self._prose: list[str] = []

    def content(self) -> str:
        """The visible text read so far, without calls."""
        return "".join(self._prose).strip()

    def walk(
        self,
        markers: re.Pattern[str],
        calls: Callable[[re.Match[str]], tuple[list[Written], int] | None],
        thinking_open: bool,
    ) -> list[Written]:
        """Go along the top level: prose, thinking, calls. Raises Rejected."""
        text, written = self.text, list[Written]()
        position = self._after("</think>", 0) if thinking_open else 0
        while found := markers.search(text, position):
            self._prose.append(text[position : found.start()])
            opened = found[0]
            if opened in _THINKING:
                position = self._after(_THINKING[opened], found.end())
            elif opened == "</think>" and not written:
                self._prose.clear()
                position = found.end()
            elif opened != "</think>" and (read := calls(found)) is not None:
                written += read[0]
                position = read[1]
                if len(written) > MAX_CALLS:
                    raise too_many()
            else:
                raise reject(f"{opened} stands where no such tag can.", self.shape)
        self._prose.append(text[position:])
        refuse_foreign("".join(self._prose), self.shape)
        return written

    def value(self, start: int) -> tuple[Any, int]:
        """The JSON value at `start` and where it ends. Raises Rejected."""
        try:
            value, end = _LENIENT.raw_decode(self.text, start)
        except (ValueError, RecursionError) as error:
            if self.cut:
                raise reject(CUT_OFF) from error
            raise reject(f"The tool call is not valid JSON: {_reason(error, start)}.", self.shape) from error
        if _CONTROL.search(self.text, start, end):
            try:
                _STRICT.decode(self.text[start:end])
            except (ValueError, RecursionError):
                self.repairs += 1
        return value, end

    def object(self, position: int) -> tuple[Any, int]:
        """As `value`, white space before it and surplus braces behind it skipped."""
        value, end = self.value(self.skip(SPACE, position))
        after = self.skip(SURPLUS, end)
        self.repairs += "}" in self.text[end:after]
        return value, after

    def skip(self, pattern: re.Pattern[str], position: int) -> int:
        """End of the match of a pattern that matches anywhere, if only the empty text."""
        found = pattern.match(self.text, position)
        return found.end() if found else position

    def closed(self, closing: str, position: int) -> int | None:
        """Position behind a closing marker; the end of a text that ends before or inside it; else None."""
        if self.text.startswith(closing, position):
            return position + len(closing)
        rest = self.text[position : position + len(closing)]
        return len(self.text) if len(rest) < len(closing) and closing.startswith(rest) else None

    def call(self, value: Any, keys: Collection[str] = ("arguments",), also: Collection[str] = ()) -> Written:
        """A call out of an object with a name and one of `keys`; `also` names keys without meaning. Raises Rejected."""
        known = isinstance(value, dict) and not set(value) - {"name", *keys, *also}
        if not known or not isinstance(value.get("name"), str) or sum(key in value for key in keys) > 1:
            raise reject(f'A tool call must be one JSON object with "name" and "{next(iter(keys))}".', self.shape)
        arguments = next((value[key] for key in keys if key in value), None)
        return Written(value["name"], self.arguments(arguments), str(value.get("id") or ""))

    def arguments(self, arguments: Any) -> Any:
        """Arguments as a value: nothing means none, JSON in a string is decoded and counted. Raises Rejected."""
        if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
            return {}
        if not isinstance(arguments, str):
            return arguments
        try:
            decoded = _LENIENT.decode(arguments)
        except (ValueError, RecursionError) as error:
            raise reject("The arguments of a tool call must be a JSON object, not a string.", self.shape) from error
        self.repairs += 1
        return decoded

    def _after(self, closing: str, position: int) -> int:
        end = self.text.find(closing, position)
        return len(self.text) if end == -1 else end + len(closing)


_THINKING = {"<think>": "</think>", "[THINK]": "[/THINK]"}


def dumps(value: Any) -> str:
    """JSON as models write it."""
    return json.dumps(value, ensure_ascii=False)


def as_function(spec: ToolSpec) -> dict[str, Any]:
    """A tool as chat templates and OpenAI's interface take it."""
    function = {"name": spec.name, "description": spec.description, "parameters": dict(spec.parameters)}
    return {"type": "function", "function": function}


def call_id(call: ToolCall) -> str:
    """The call's id, or nine letters and digits that follow from the call."""
    if call.id:
        return call.id
    written = f"{call.name} {dumps(dict(call.arguments))}"
    number = int.from_bytes(hashlib.sha256(written.encode("utf-8", "replace")).digest())
    letters = ""
    for _ in range(9):
        number, digit = divmod(number, len(_DIGITS))
        letters += _DIGITS[digit]
    return letters


def _reason(error: Exception, start: int) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg[:1].lower()}{error.msg[1:]} at character {error.pos - start}"
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
