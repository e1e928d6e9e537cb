"""Native tool calls of OpenAI-compatible servers: calls beside the text, each with an id that must be answered.

The tools travel on the first message and not in its text. Written as text, for records and scripts, the calls are
`{"tool_calls": [...]}` with the objects of the interface; a server that answers such text is read the same way.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from skyenv.formats.contract import Parsed, Reader, ReadWhole, Written, read_all, reject
from skyenv.formats.json_calls import JsonText, call_id, dumps
from skyenv.types import FinishReason, Message, NativeCall, ToolCall, ToolSpec

_MARK = re.compile(r'</?think>|(?:^|(?<=>))[ \t]*\{(?=\s*"tool_calls"\s*:)', re.MULTILINE)
_SHAPE = 'Call a tool with its name and one JSON object of arguments: {"parameter_name": "value"}'
UNANSWERED = "Not run."


class OpenAITools(ReadWhole):
    """See the module."""

    name = "openai"

    def render_tools(self, specs: Sequence[ToolSpec]) -> str:
        """Nothing: servers describe the tools to their model themselves."""
        return ""

    def render_call(self, call: ToolCall) -> str:
        """Write a call as a list of one."""
        function = {"name": call.name, "arguments": dumps(dict(call.arguments))}
        return dumps({"tool_calls": [{"id": call_id(call), "type": "function", "function": function}]})

    def reader(self, text: str, tools: Sequence[ToolSpec], *, cut: bool) -> Reader:
        """See `ReadWhole`."""
        return _Reader(text, cut=cut, shape=_SHAPE)

    def parse_native(
        self, content: str, calls: Sequence[NativeCall], tools: Sequence[ToolSpec], *, finish_reason: FinishReason
    ) -> Parsed:
        """Check what a server reported; calls in the text beside it are refused as text."""
        cut = finish_reason != "stop"
        return read_all(_NativeReader(content, calls, cut=cut), tools, cut=cut, thinking_open=False)

    def observation(self, text: str, call: ToolCall | None) -> Message:
        """Results travel in the tool role under the call's id; what answers no call is user text."""
        if call is None:
            return Message("user", text)
        return Message("tool", text, name=call.name, call_id=call_id(call))


class _Reader(JsonText):
    def read(self, thinking_open: bool) -> list[Written]:
        """Objects with a list of calls, prose around them."""
        return self.walk(_MARK, self._list, thinking_open)

    def _list(self, found: re.Match[str]) -> tuple[list[Written], int]:
        value, end = self.object(found.end() - 1)
        listed = value.get("tool_calls") if isinstance(value, dict) and set(value) == {"tool_calls"} else None
        if not isinstance(listed, list) or not listed:
            raise reject("tool_calls is not a list of calls.", self.shape)
        return [_of_object(item, self) for item in listed], end


class _NativeReader(JsonText):
    """Reads reported calls; the text beside them may hold none."""

    def __init__(self, content: str, calls: Sequence[NativeCall], *, cut: bool) -> None:
        super().__init__(content, cut=cut, shape=_SHAPE)
        self._calls = calls

    def read(self, thinking_open: bool) -> list[Written]:
        """The reported calls. Raises Rejected."""
        written = [Written(call.name, _arguments(call.arguments, self), call.id) for call in self._calls]
        in_text = _Reader(self.text, cut=False, shape=_SHAPE)
        if in_text.read(thinking_open) and written:
            raise reject("Calls stand both in the text and beside it.", self.shape)
        self._prose.append(in_text.content())
        return written


def _of_object(item: Any, reader: JsonText) -> Written:
    function = item.get("function") if isinstance(item, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise reject("A tool call must have a function with a name.", _SHAPE)
    return Written(function["name"], _arguments(function.get("arguments"), reader), str(item.get("id") or ""))


def _arguments(arguments: Any, reader: JsonText) -> Any:
    """Arguments as they come: an object, its JSON text, that text encoded again, or nothing."""
    if not isinstance(arguments, str) or not arguments.strip():
        return reader.arguments(arguments)
    text = JsonText(arguments, cut=reader.cut, shape=_SHAPE)
    value, end = text.object(0)
    if end < len(arguments):
        raise reject("Text follows the JSON object of the arguments.", _SHAPE)
    reader.repairs += text.repairs
    return reader.arguments(value)


def answer_all(calls: Sequence[NativeCall], results: Sequence[tuple[str, ToolCall | None]]) -> list[Message]:
    """One tool message for each reported call: a server refuses a conversation in which an id is unanswered.

    What answers no call of its own (an error, that nothing was run) stands under the first id that is free.
    """
    texts = {call.id: text for text, call in results if call is not None}
    spare = [text for text, call in results if call is None]
    messages = []
    for call in calls:
        text = texts.get(call.id) or (spare.pop(0) if spare else UNANSWERED)
        messages.append(Message("tool", text, name=call.name, call_id=call.id))
    return messages + [Message("user", text) for text in spare]
