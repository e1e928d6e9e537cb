"""The format of Qwen3-Coder and later Qwen models: CodeAct's tags inside `<tool_call>`, results in the tool role.

A value stands between line breaks of its own. Values of arrays and objects are JSON; a Python literal in their place
is repaired and counted. A missing `<tool_call>` around the tags does not matter.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from skyenv.formats.contract import Reader, ReadWhole, Written
from skyenv.formats.json_calls import as_function, dumps
from skyenv.formats.tagged import TaggedText, write_parameter
from skyenv.types import Message, ToolCall, ToolSpec

_LONGEST_LITERAL = 65536
_SHAPE = (
    "Expected format:\n<tool_call>\n<function=tool_name>\n<parameter=parameter_name>\nvalue\n</parameter>\n"
    "</function>\n</tool_call>\n(To write a value that itself contains such tags: <parameter=parameter_name json>"
    '"a JSON string with < written as \\u003c"</parameter>)'
)


class Qwen3Coder(ReadWhole):
    """See the module."""

    name = "qwen3_coder"

    def render_tools(self, specs: Sequence[ToolSpec]) -> str:
        """Describe the tools in the words of the models' chat templates."""
        return _PROMPT.format(tools="".join("\n" + dumps(as_function(spec)) for spec in specs))

    def render_call(self, call: ToolCall) -> str:
        """Write a call as the chat templates do; values that could be misread go out in the JSON form."""
        parameters = "".join(write_parameter(name, value, wrap=True) for name, value in call.arguments.items())
        return f"<tool_call>\n<function={call.name}>\n{parameters}</function>\n</tool_call>"

    def reader(self, text: str, tools: Sequence[ToolSpec], *, cut: bool) -> Reader:
        """See `ReadWhole`."""
        return _Reader(text, tools, cut=cut)

    def observation(self, text: str, call: ToolCall | None) -> Message:
        """Everything that comes back travels in the tool role, so that templates keep earlier thinking."""
        return Message("tool", text, name=call.name if call else None)


class _Reader(TaggedText):
    def __init__(self, text: str, tools: Sequence[ToolSpec], *, cut: bool) -> None:
        super().__init__(text, cut=cut, shape=_SHAPE)
        self._schemas = {spec.name: spec.parameters.get("properties", {}) for spec in tools}

    def read(self, thinking_open: bool) -> list[Written]:
        """As tagged text, with values of the types that the tools' schemas name."""
        return [Written(call.name, self._typed(call)) for call in super().read(thinking_open)]

    def _typed(self, call: Written) -> dict[str, Any]:
        schemas: Mapping[str, Any] = self._schemas.get(call.name, {})
        return {name: self._value(value, schemas.get(name, {}).get("type")) for name, value in call.arguments.items()}

    def _value(self, text: Any, kind: object) -> Any:
        if kind in (None, "string") or not isinstance(text, str):
            return text
        if text.strip() in ("null", "None"):
            return None
        if kind not in ("array", "object") or _is_json(text):
            return text
        found, value = _literal(text)
        self.repairs += found
        return value


def _is_json(text: str) -> bool:
    try:
        json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return False
    return True


def _literal(text: str) -> tuple[bool, Any]:
    """Whether the text is a Python literal of a JSON value, and that value; the text itself otherwise."""
    if len(text) > _LONGEST_LITERAL:
        return False, text
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="<unknown>")  # odd escapes, of which Python warns
            value = ast.literal_eval(text.strip())
        plain = json.loads(json.dumps(value, allow_nan=False))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return False, text
    return (True, plain) if _only_text_keys(value) else (False, text)


def _only_text_keys(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _only_text_keys(item) for key, item in value.items())
    return not isinstance(value, list | tuple) or all(map(_only_text_keys, value))


_PROMPT = """

# Tools

You have access to the following functions:

<tools>{tools}
</tools>

If you choose to call a function ONLY reply in the following format with NO suffix:

<tool_call>
<function=example_function_name>
<parameter=example_parameter_1>
value_1
</parameter>
<parameter=example_parameter_2>
This is the value for the second parameter
that can span
multiple lines
</parameter>
</function>
</tool_call>

<IMPORTANT>
Reminder:
- Function calls MUST follow the specified format: an inner <function=...></function> block must be nested within \
<tool_call></tool_call> XML tags
- Required parameters MUST be specified
- You may provide optional reasoning for your function call in natural language BEFORE the function call, but NOT after
- If there is no function call available, answer the question like normal with your current knowledge and do not tell \
the user about function calls
</IMPORTANT>"""
