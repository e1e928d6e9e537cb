"""The JSON format of Llama 3: `{"name": ..., "parameters": {...}}`, several with `;` between, results in the tool role.

Calls stand at the end of an answer: behind `<|python_tag|>`, or from the first line that begins with such an object.
`arguments` is understood for `parameters`. Llama 3.1's chat template drops nothing, so its turns only append.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from skyenv.formats.contract import CUT_OFF, MAX_CALLS, Reader, ReadWhole, Written, reject, too_many
from skyenv.formats.json_calls import SPACE, JsonText, as_function, dumps
from skyenv.types import Message, ToolCall, ToolSpec

_MARK = re.compile(r'<\|python_tag\|>|</?think>|(?:^|(?<=>))[ \t]*\{(?=\s*"(?:name|type)"\s*:)', re.MULTILINE)
_PYTHON = "<|python_tag|>"
_SHAPE = (
    'Expected format, as all of the answer\'s end:\n{"name": "tool_name", "parameters": {"parameter_name": "value"}}'
)


class Llama3Json(ReadWhole):
    """See the module."""

    name = "llama3_json"

    def render_tools(self, specs: Sequence[ToolSpec]) -> str:
        """Describe the tools in the words of the models' chat templates."""
        return _PROMPT.format(tools="".join(dumps(as_function(spec)) + "\n\n" for spec in specs))

    def render_call(self, call: ToolCall) -> str:
        """Write a call as one JSON object."""
        return f'{{"name": {dumps(call.name)}, "parameters": {dumps(dict(call.arguments))}}}'

    def reader(self, text: str, tools: Sequence[ToolSpec], *, cut: bool) -> Reader:
        """See `ReadWhole`."""
        return _Reader(text, cut=cut, shape=_SHAPE)

    def observation(self, text: str, call: ToolCall | None) -> Message:
        """Everything that comes back travels in the tool role."""
        return Message("tool", text, name=call.name if call else None)


class _Reader(JsonText):
    def read(self, thinking_open: bool) -> list[Written]:
        """Prose, then nothing but objects."""
        return self.walk(_MARK, self._calls, thinking_open)

    def _calls(self, found: re.Match[str]) -> tuple[list[Written], int]:
        position = found.end() if found[0] == _PYTHON else found.end() - 1
        written: list[Written] = []
        while True:
            value, position = self.object(position)
            written.append(self._one(value))
            if len(written) > MAX_CALLS:
                raise too_many()
            separated = self.text.startswith(";", position)
            position = self.skip(SPACE, position + separated)
            if position == len(self.text) and not (separated and self.cut):
                return written, position
            if not self.text.startswith("{", position):
                if self.cut:
                    raise reject(CUT_OFF)
                raise reject("Text follows the JSON object of a tool call.", self.shape)

    def _one(self, value: object) -> Written:
        if isinstance(value, dict) and value.get("type", "function") != "function":
            raise reject('The "type" of a tool call can only be "function".', self.shape)
        return self.call(value, ("parameters", "arguments"), ("type",))


_PROMPT = """

You have access to the following functions. To call a function, please respond with JSON for a function call. Respond \
in the format {{"name": function name, "parameters": dictionary of argument name and its value}}. Do not use variables.

{tools}"""
