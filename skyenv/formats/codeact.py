r"""The CodeAct text format: `<function=N>`, `<parameter=K>V</parameter>`, `</function>`, results as user text.

Values are raw text, so a value may itself contain tags. A closing tag counts only where structure allows:
`</parameter>` must be followed by the next parameter or by a `</function>` after which no closing tag is left over.
Tags that nest properly inside a value are paired first. Where two readings remain, the text is refused.
Exactly one line break is stripped at each end of a value.

`<parameter=K json>` holds the value as a JSON string with `<` written as `\u003c`: the way to write any text at all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from skyenv.formats.contract import CUT_OFF, Parsed, Rejected, checked_call, reject
from skyenv.types import FinishReason, Message, ToolCall, ToolSpec

_Kind = Literal["fopen", "fclose", "popen", "pclose", "think", "unthink"]

_TAG = re.compile(
    r"<(?:function=(?P<fopen>[^\s<>=/]+)>"
    r"|(?P<fclose>/function>)"
    r"|parameter=(?P<popen>[^\s<>=/]+)(?P<json> json)?>"
    r"|(?P<pclose>/parameter>)"
    r"|(?P<think>think>)|(?P<unthink>/think>))"
)
_LOOKALIKE = re.compile(r"<\s*(?:(?i:function|parameter)\s*=|/\s*(?i:function|parameter)\s*>)")
_JSON_CALL = re.compile(r"<tool_call>\s*\{")
_WRAPPER = re.compile(r"\n?</?tool_call>\n?")
_NEEDS_JSON = re.compile(r"</?(?:function|parameter|think|tool_call)\b|\r\Z")
_SHAPE = (
    "Expected format:\n<function=tool_name>\n<parameter=parameter_name>value</parameter>\n</function>\n"
    '(To write a value that itself contains such tags: <parameter=parameter_name json>"a JSON string with < written '
    'as \\u003c"</parameter>)'
)
_CLOSE = "</function>"


@dataclass(frozen=True, slots=True)
class _Tag:
    kind: _Kind
    start: int
    end: int
    name: str
    json: bool


class CodeAct:
    """See the module; `finish_reason` other than stop makes everything unclosed an error."""

    name = "codeact"

    def render_tools(self, specs: Sequence[ToolSpec]) -> str:
        """Describe the tools in the words that models of this format were trained on."""
        return _PROMPT.format(description="\n".join(_describe(i, spec) for i, spec in enumerate(specs, start=1)))

    def render_call(self, call: ToolCall) -> str:
        """Write a call; values that could be misread go out in the JSON form."""
        parameters = "".join(_render_parameter(name, value) for name, value in call.arguments.items())
        return f"<function={call.name}>\n{parameters}</function>"

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
            return Parsed((), str(error), reader.content())
        return Parsed(calls, None, reader.content())

    def observation(self, text: str, call: ToolCall | None) -> Message:
        """Results are user text with a fixed first line; errors and reminders go without it."""
        return Message("user", text if call is None else f"EXECUTION RESULT of [{call.name}]:\n{text}")


class _Reader:
    """One pass over the tags of one text."""

    def __init__(self, text: str, *, cut: bool) -> None:
        self._text = text
        self._cut = cut
        self._tags = [_tag(found) for found in _TAG.finditer(text)]
        self._partner = _pair_parameters(self._tags)
        self._prose: list[str] = []

    def content(self) -> str:
        """The visible text read so far, without calls and wrappers."""
        return _WRAPPER.sub("\n", "".join(self._prose)).strip()

    def read(self, thinking_open: bool) -> list[tuple[str, dict[str, Any]]]:
        """Walk the top level: prose, thinking, calls. Raises Rejected."""
        calls: list[tuple[str, dict[str, Any]]] = []
        at, position = self._after_thinking(0) if thinking_open else (0, 0)
        while at < len(self._tags):
            tag = self._tags[at]
            self._prose.append(self._text[position : tag.start])
            if tag.kind == "fopen":
                call, at, position = self._call(at)
                calls.append(call)
            elif tag.kind == "think":
                at, position = self._after_thinking(at)
            elif tag.kind == "unthink" and not calls:
                self._prose.clear()
                at, position = at + 1, tag.end
            else:
                raise reject(f"{self._text[tag.start : tag.end]} stands where no such tag can.", _SHAPE)
        self._prose.append(self._text[position:])
        visible = "".join(self._prose)
        if _JSON_CALL.search(visible):
            raise reject("The tool call is written as JSON, which is not the format used here.", _SHAPE)
        if _LOOKALIKE.search(visible):
            raise reject(CUT_OFF) if self._cut else reject("A tag of the tool call is not written exactly.", _SHAPE)
        return calls

    def _after_thinking(self, at: int) -> tuple[int, int]:
        """Index of the tag and position in the text behind the next `</think>`; the end when there is none."""
        while at < len(self._tags):
            if self._tags[at].kind == "unthink":
                return at + 1, self._tags[at].end
            at += 1
        return at, len(self._text)

    def _call(self, at: int) -> tuple[tuple[str, dict[str, Any]], int, int]:
        """Read the call that opens at tag `at`; returns it and where to go on."""
        name, position = self._tags[at].name, self._tags[at].end
        arguments: dict[str, Any] = {}
        at += 1
        while True:
            if at >= len(self._tags):
                return (name, arguments), at, self._accept_unclosed(position)
            tag = self._tags[at]
            if self._between(position, at):
                raise reject(f"Text stands between the tags of the call of '{name[:80]}'.", _SHAPE)
            if tag.kind == "fclose":
                return (name, arguments), at + 1, tag.end
            if tag.kind != "popen":
                raise reject(f"{self._text[tag.start : tag.end]} stands where no such tag can.", _SHAPE)
            if tag.name in arguments:
                raise reject(f"Parameter '{tag.name[:80]}' is given twice.")
            end = self._value_end(at)
            arguments[tag.name] = _value(self._text[tag.end : self._tags[end].start], tag)
            at, position = end + 1, self._tags[end].end

    def _accept_unclosed(self, position: int) -> int:
        """The text ends behind the last parameter: a missing `</function>` is fine unless more may have followed."""
        if self._cut:
            raise reject(CUT_OFF)
        if not _CLOSE.startswith(self._text[position:].strip()):
            raise reject("The call has no </function>.", _SHAPE)
        return len(self._text)

    def _between(self, position: int, at: int) -> bool:
        """Whether anything but white space stands between a position and tag `at`."""
        gap = self._text[position : self._tags[at].start]
        return bool(gap) and not gap.isspace()

    def _value_end(self, at: int) -> int:
        """Index of the `</parameter>` that ends the value opened at tag `at`. Raises Rejected."""
        paired = self._partner.get(at)
        if paired is not None and self._is_structural(paired):
            return paired
        for end in range(at + 1, len(self._tags)):
            if self._tags[end].kind == "pclose" and self._is_structural(end):
                if any(self._opens_call(inner) for inner in range(at + 1, end)):
                    raise reject(f"Parameter '{self._tags[at].name[:80]}' has no unambiguous end.", _SHAPE)
                return end
        if self._cut:
            raise reject(CUT_OFF)
        name = self._tags[at].name[:80]
        raise reject(f"Parameter '{name}' is not closed, or closing tags are left over behind its call.", _SHAPE)

    def _is_structural(self, at: int) -> bool:
        """Whether the `</parameter>` at tag `at` stands where the structure of a call allows it."""
        tags, following = self._tags, at + 1
        if following == len(tags):
            return _CLOSE.startswith(self._text[tags[at].end :].strip())
        if self._between(tags[at].end, following):
            return False
        if tags[following].kind == "fclose":
            return following + 1 == len(tags) or tags[following + 1].kind in ("fopen", "think", "unthink")
        return tags[following].kind == "popen"

    def _opens_call(self, at: int) -> bool:
        tags = self._tags
        return tags[at].kind == "fopen" and tags[at + 1].kind == "popen" and not self._between(tags[at].end, at + 1)


def _tag(found: re.Match[str]) -> _Tag:
    kind: Any = found.lastgroup if found.lastgroup != "json" else "popen"
    return _Tag(kind, found.start(), found.end(), found[kind], found["json"] is not None)


def _pair_parameters(tags: Sequence[_Tag]) -> dict[int, int]:
    """Pair opening and closing parameter tags as brackets are paired."""
    stack: list[int] = []
    pairs: dict[int, int] = {}
    for at, tag in enumerate(tags):
        if tag.kind == "popen":
            stack.append(at)
        elif tag.kind == "pclose" and stack:
            pairs[stack.pop()] = at
    return pairs


def _value(raw: str, tag: _Tag) -> Any:
    if not tag.json:
        raw = raw.removeprefix("\n") if not raw.startswith("\r\n") else raw[2:]
        return raw.removesuffix("\r\n") if raw.endswith("\r\n") else raw.removesuffix("\n")
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, str):
        raise reject(f"Parameter '{tag.name[:80]}' is marked json, but its value is not one JSON string.")
    return value


def _render_parameter(name: str, value: Any) -> str:
    if not isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False).replace("<", "\\u003c")
        return f"<parameter={name}>{text}</parameter>\n"
    if _NEEDS_JSON.search(value):
        text = json.dumps(value, ensure_ascii=False).replace("<", "\\u003c")
        return f"<parameter={name} json>{text}</parameter>\n"
    wrap = "\n" if "\n" in value else ""
    return f"<parameter={name}>{wrap}{value}{wrap}</parameter>\n"


def _describe(number: int, spec: ToolSpec) -> str:
    properties = spec.parameters.get("properties", {})
    required = set(spec.parameters.get("required", ()))
    lines = [f"---- BEGIN FUNCTION #{number}: {spec.name} ----", f"Description: {spec.description}"]
    lines.append("Parameters:" if properties else "No parameters are required for this function.")
    for i, (name, schema) in enumerate(properties.items(), start=1):
        status = "required" if name in required else "optional"
        text = schema.get("description", "No description provided")
        if "enum" in schema:
            text += "\nAllowed values: [" + ", ".join(f"`{value}`" for value in schema["enum"]) + "]"
        lines.append(f"  ({i}) {name} ({schema.get('type', 'string')}, {status}): {text}")
    return "\n".join([*lines, f"---- END FUNCTION #{number} ----\n"])


_PROMPT = """

You have access to the following functions:

{description}
If you choose to call a function ONLY reply in the following format with NO suffix:

<function=example_function_name>
<parameter=example_parameter_1>value_1</parameter>
<parameter=example_parameter_2>
This is the value for the second parameter
that can span
multiple lines
</parameter>
</function>

<IMPORTANT>
Reminder:
- Function calls MUST follow the specified format, start with <function= and end with </function>
- Required parameters MUST be specified
- Only call one function at a time
- You may provide optional reasoning for your function call in natural language BEFORE the function call, but NOT after.
- If there is no function call available, answer the question like normal with your current knowledge and do not tell \
the user about function calls
</IMPORTANT>
"""
