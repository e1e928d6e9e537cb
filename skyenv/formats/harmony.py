"""Harmony, the format of gpt-oss: messages on channels, a call is JSON on `commentary` to `functions.N`.

The prompt ends with `<|start|>assistant`; the answer goes on with its header. Thinking is the `analysis` channel. A
call ends the answer with `<|call|>`, a text with `<|return|>`, and both are left out of the decoded text; `<|end|>`
ends a message inside an answer. Text without any marker is what the user sees.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from skyenv.formats.contract import CUT_OFF, MAX_CALLS, Reader, ReadWhole, Written, refuse_foreign, reject, too_many
from skyenv.formats.json_calls import SPACE, JsonText, dumps
from skyenv.types import Message, ToolCall, ToolSpec

_MARK = re.compile(r"<\|(?:start|channel|constrain|message|end|call|return)\|>")
_HEADER = re.compile(
    r"(?:<\|start\|>)?(?:assistant)?(?: to=(?P<before>[^\s<]+))?"
    r" ?(?:<\|channel\|> ?(?P<channel>analysis|commentary|final)(?: to=(?P<after>[^\s<]+))?)?"
    r" ?(?:<\|constrain\|>)? ?(?:json)?"
)
_LONGEST_HEADER = 400
_MOST_MESSAGES = 256
_END = re.compile(r"<\|(?:end|call|return)\|>")
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_START, _MESSAGE = "<|start|>", "<|message|>"
_PREFIX = "functions."
_SHAPE = (
    "Expected format:\n<|channel|>commentary to=functions.tool_name <|constrain|>json<|message|>"
    '{"parameter_name": "value"}<|call|>'
)
_THINK = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)


class Harmony(ReadWhole):
    """See the module."""

    name = "harmony"

    def render_tools(self, specs: Sequence[ToolSpec]) -> str:
        """Describe the tools as the namespace of types that the models were trained on."""
        return _PROMPT.format(types="".join(_describe(spec) for spec in specs))

    def render_call(self, call: ToolCall) -> str:
        """Write a call as the rest of an answer that begins behind `<|start|>assistant`."""
        header = f"<|channel|>commentary to={_PREFIX}{call.name} <|constrain|>json"
        return f"{header}<|message|>{dumps(dict(call.arguments))}"

    def reader(self, text: str, tools: Sequence[ToolSpec], *, cut: bool) -> Reader:
        """See `ReadWhole`."""
        return _Reader(text, cut=cut, shape=_SHAPE)

    def observation(self, text: str, call: ToolCall | None) -> Message:
        """Results travel in the tool role; what answers no call is user text."""
        return Message("user", text) if call is None else Message("tool", text, name=call.name)


class _Reader(JsonText):
    def read(self, thinking_open: bool) -> list[Written]:
        """Message after message. Raises Rejected."""
        written: list[Written] = []
        first = _MARK.search(self.text)
        if first is None:
            visible = "" if thinking_open else _THINK.sub("", self.text)
            self._show(visible)
            return written
        position = first.start()
        if lead := re.search(r"assistant\s*\Z|\A\s*(?:to=\S+\s*)\Z", self.text[:position]):
            position = lead.start()
        self._prose.append(_THINK.sub("", self.text[:position]))
        for _ in range(_MOST_MESSAGES):
            if position >= len(self.text):
                break
            call, position = self._message(position)
            written += [call] if call else []
            if len(written) > MAX_CALLS:
                raise too_many()
        else:
            raise reject(f"One answer may hold at most {_MOST_MESSAGES} messages.")
        self._show("")
        return written

    def _show(self, text: str) -> None:
        self._prose.append(text)
        refuse_foreign("".join(self._prose), self.shape)

    def _message(self, position: int) -> tuple[Written | None, int]:
        """One message from its header on, and where the next begins."""
        body = self.text.find(_MESSAGE, position)
        if body == -1:
            raise reject(CUT_OFF) if self.cut else reject("A message has no <|message|>.", self.shape)
        words = " ".join(self.text[position : min(body, position + _LONGEST_HEADER)].split())
        header = _HEADER.fullmatch(words) or _HEADER.fullmatch(f" {words}")
        if header is None:
            raise reject("The header of a message is not written exactly.", self.shape)
        body += len(_MESSAGE)
        recipient, channel = header["before"] or header["after"], header["channel"] or "final"
        if recipient is not None:
            return self._call(recipient, channel, body)
        found = _END.search(self.text, body)
        end = found.start() if found else len(self.text)
        if channel != "analysis":
            self._prose.append(self.text[body:end])
        return None, self._next(end)

    def _call(self, recipient: str, channel: str, body: int) -> tuple[Written, int]:
        if not recipient.startswith(_PREFIX) or channel != "commentary":
            raise reject("A call goes to functions.tool_name on the commentary channel.", self.shape)
        value, end = self.object(body)
        if end < len(self.text) and not self.text.startswith(_ENDS, end) and not self._truncated_end(end):
            raise reject("Text follows the JSON object of a tool call.", self.shape)
        return Written(recipient.removeprefix(_PREFIX), self.arguments(value)), self._next(end)

    def _truncated_end(self, position: int) -> bool:
        return any(mark.startswith(self.text[position:]) for mark in _ENDS)

    def _next(self, end: int) -> int:
        """Where the message behind the end marker at `end` begins. Raises Rejected for text that is in no message."""
        found = _END.match(self.text, end)
        if found is None:
            return len(self.text)
        position = self.skip(SPACE, found.end())
        if position < len(self.text) and not self.text.startswith(_START, position):
            raise reject("Text stands between two messages.", self.shape)
        return position


def _describe(spec: ToolSpec) -> str:
    properties = spec.parameters.get("properties", {})
    required = set(spec.parameters.get("required", ()))
    comment = "".join(f"// {line}\n" for line in spec.description.splitlines())
    if not properties:
        return f"{comment}type {spec.name} = () => any;\n\n"
    fields = ""
    for name, schema in properties.items():
        fields += "".join(f"// {line}\n" for line in str(schema.get("description", "")).splitlines())
        fields += f"{name}{'' if name in required else '?'}: {_type(schema)},\n"
    return f"{comment}type {spec.name} = (_: {{\n{fields}}}) => any;\n\n"


def _type(schema: dict[str, object]) -> str:
    values = schema.get("enum")
    if isinstance(values, list | tuple):
        return " | ".join(json.dumps(value) for value in values)
    items = schema.get("items")
    if schema.get("type") == "array" and isinstance(items, dict):
        return f"{_type(items)}[]"
    return {"integer": "number", "array": "any[]"}.get(str(schema.get("type")), str(schema.get("type", "any")))


_PROMPT = """

# Tools

Calls to these tools must go to the commentary channel: 'functions'.

## functions

namespace functions {{

{types}}} // namespace functions"""
