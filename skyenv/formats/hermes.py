"""The Hermes format of Qwen2.5 and Qwen3: JSON objects between `<tool_call>` tags, results in the tool role.

The JSON decides where a call ends, so tags inside its strings are text. Damage without doubt about the meaning is
repaired and counted: raw line breaks in strings, surplus closing braces, arguments encoded twice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from skyenv.formats.contract import CUT_OFF, Parsed, Rejected, checked_call, refuse_constant, reject, unique_keys
from skyenv.types import FinishReason, Message, ToolCall, ToolSpec

_TAG = re.compile(r"</?(?:tool_call|think)>")
_SPACE = re.compile(r"\s*")
_SURPLUS = re.compile(r"[\s}]*")
_FOREIGN = re.compile(r"<function\s*=", re.IGNORECASE)
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_SHAPE = 'Expected format:\n<tool_call>\n{"name": "tool_name", "arguments": {"parameter_name": "value"}}\n</tool_call>'
_STRICT = json.JSONDecoder(object_pairs_hook=unique_keys, parse_constant=refuse_constant)
_LENIENT = json.JSONDecoder(object_pairs_hook=unique_keys, parse_constant=refuse_constant, strict=False)


class Hermes:
    """See the module; the last call of a text may lack its closing tag."""

    name = "hermes"

    def render_tools(self, specs: Sequence[ToolSpec]) -> str:
        """Describe the tools exactly as the chat templates of Qwen2.5 and Qwen3 do."""
        functions = (
            {
                "type": "function",
                "function": {
                    "name": spec.name,
                    "description": spec.description,
                    "parameters": dict(spec.parameters),
                },
            }
            for spec in specs
        )
        return _PROMPT.format(tools="".join("\n" + json.dumps(each, ensure_ascii=False) for each in functions))

    def render_call(self, call: ToolCall) -> str:
        """Write a call as one JSON object between tags."""
        name, arguments = (json.dumps(part, ensure_ascii=False) for part in (call.name, dict(call.arguments)))
        return f'{_OPEN}\n{{"name": {name}, "arguments": {arguments}}}\n{_CLOSE}'

    def parse(
        self,
        text: str,
        tools: Sequence[ToolSpec],
        *,
        finish_reason: FinishReason = "stop",
        thinking_open: bool = False,
    ) -> Parsed:
        """Read all calls of the text or none."""
        reader = _Reader(text, cut=finish_reason != "stop")
        try:
            raw = reader.read(thinking_open)
            calls = tuple(checked_call(name, arguments, tools) for name, arguments in raw)
            if not calls and finish_reason != "stop":
                raise reject(CUT_OFF)
        except Rejected as error:
            return Parsed((), str(error), reader.content(), reader.repairs)
        return Parsed(calls, None, reader.content(), reader.repairs)

    def observation(self, text: str, call: ToolCall | None) -> Message:
        """Everything that comes back travels in the tool role, so that templates keep earlier thinking."""
        return Message("tool", text, name=call.name if call else None)


class _Reader:
    """One pass over one text."""

    def __init__(self, text: str, *, cut: bool) -> None:
        self._text = text
        self._cut = cut
        self._prose: list[str] = []
        self.repairs = 0

    def content(self) -> str:
        """The visible text read so far, without calls."""
        return "".join(self._prose).strip()

    def read(self, thinking_open: bool) -> list[tuple[str, Any]]:
        """Walk the top level: prose, thinking, calls. Raises Rejected."""
        calls: list[tuple[str, Any]] = []
        position = self._after_thinking(0) if thinking_open else 0
        while found := _TAG.search(self._text, position):
            self._prose.append(self._text[position : found.start()])
            tag = found[0]
            if tag == _OPEN:
                call, position = self._call(found.end())
                calls.append(call)
            elif tag == "<think>":
                position = self._after_thinking(found.end())
            elif tag == "</think>" and not calls:
                self._prose.clear()
                position = found.end()
            else:
                raise reject(f"{tag} stands where no such tag can.", _SHAPE)
        self._prose.append(self._text[position:])
        if _FOREIGN.search("".join(self._prose)):
            raise reject("The tool call is written with <function=...>, which is not the format used here.", _SHAPE)
        return calls

    def _after_thinking(self, position: int) -> int:
        end = self._text.find("</think>", position)
        return len(self._text) if end == -1 else end + len("</think>")

    def _call(self, position: int) -> tuple[tuple[str, Any], int]:
        """Read the object behind an opening tag and its closing tag, which may be missing at the end."""
        text = self._text
        value, end = self._object(_skip(_SPACE, text, position))
        after = _skip(_SURPLUS, text, end)
        if "}" in text[end:after]:
            self.repairs += 1
        if text.startswith(_CLOSE, after):
            return self._name_and_arguments(value), after + len(_CLOSE)
        if _CLOSE.startswith(text[after : after + len(_CLOSE)]) and len(text) - after < len(_CLOSE):
            return self._name_and_arguments(value), len(text)
        raise reject("Text follows the JSON object of a tool call.", _SHAPE)

    def _object(self, start: int) -> tuple[Any, int]:
        try:
            return _STRICT.raw_decode(self._text, start)
        except (ValueError, RecursionError):
            pass
        try:
            result = _LENIENT.raw_decode(self._text, start)
        except (ValueError, RecursionError) as error:
            if self._cut:
                raise reject(CUT_OFF) from error
            raise reject(f"The tool call is not valid JSON: {_reason(error, start)}.", _SHAPE) from error
        self.repairs += 1
        return result

    def _name_and_arguments(self, value: Any) -> tuple[str, Any]:
        if not isinstance(value, dict) or not isinstance(value.get("name"), str) or set(value) - {"name", "arguments"}:
            raise reject('A tool call must be one JSON object with "name" and "arguments".', _SHAPE)
        arguments = value.get("arguments")
        if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
            arguments = {}
        if isinstance(arguments, str):
            try:
                arguments = _LENIENT.decode(arguments)
            except (ValueError, RecursionError) as error:
                raise reject("The arguments of a tool call must be a JSON object, not a string.", _SHAPE) from error
            self.repairs += 1
        return value["name"], arguments


def _skip(pattern: re.Pattern[str], text: str, position: int) -> int:
    """End of the match of a pattern that matches anywhere, if only the empty text."""
    found = pattern.match(text, position)
    return found.end() if found else position


def _reason(error: Exception, start: int) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg[:1].lower()}{error.msg[1:]} at character {error.pos - start}"
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


_PROMPT = """

# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
