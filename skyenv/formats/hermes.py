"""The Hermes format of Qwen2.5 and Qwen3: JSON objects between `<tool_call>` tags, results in the tool role."""

from __future__ import annotations

import re
from collections.abc import Sequence

from skyenv.formats.contract import Reader, ReadWhole, Written, reject
from skyenv.formats.json_calls import JsonText, as_function, dumps
from skyenv.types import Message, ToolCall, ToolSpec

_TAG = re.compile(r"</?(?:tool_call|think)>")
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_SHAPE = 'Expected format:\n<tool_call>\n{"name": "tool_name", "arguments": {"parameter_name": "value"}}\n</tool_call>'


class Hermes(ReadWhole):
    """See the module; the last call of a text may lack its closing tag."""

    name = "hermes"

    def render_tools(self, specs: Sequence[ToolSpec]) -> str:
        """Describe the tools exactly as the chat templates of Qwen2.5 and Qwen3 do."""
        return _PROMPT.format(tools="".join("\n" + dumps(as_function(spec)) for spec in specs))

    def render_call(self, call: ToolCall) -> str:
        """Write a call as one JSON object between tags."""
        return f'{_OPEN}\n{{"name": {dumps(call.name)}, "arguments": {dumps(dict(call.arguments))}}}\n{_CLOSE}'

    def reader(self, text: str, tools: Sequence[ToolSpec], *, cut: bool) -> Reader:
        """See `ReadWhole`."""
        return _Reader(text, cut=cut, shape=_SHAPE)

    def observation(self, text: str, call: ToolCall | None) -> Message:
        """Everything that comes back travels in the tool role, so that templates keep earlier thinking."""
        return Message("tool", text, name=call.name if call else None)


class _Reader(JsonText):
    def read(self, thinking_open: bool) -> list[Written]:
        """Objects between tags, prose around them."""
        return self.walk(_TAG, self._call, thinking_open)

    def _call(self, found: re.Match[str]) -> tuple[list[Written], int] | None:
        if found[0] != _OPEN:
            return None
        value, after = self.object(found.end())
        end = self.closed(_CLOSE, after)
        if end is None:
            raise reject("Text follows the JSON object of a tool call.", self.shape)
        return [self.call(value)], end


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
