"""The CodeAct text format: calls written as tags, results as user text.

`formats.tagged` says how tags inside values are told from tags of the call.
"""

from __future__ import annotations

from collections.abc import Sequence

from skyenv.formats.contract import Reader, ReadWhole
from skyenv.formats.tagged import TaggedText, write_parameter
from skyenv.types import Message, ToolCall, ToolSpec

_SHAPE = (
    "Expected format:\n<function=tool_name>\n<parameter=parameter_name>value</parameter>\n</function>\n"
    '(To write a value that itself contains such tags: <parameter=parameter_name json>"a JSON string with < written '
    'as \\u003c"</parameter>)'
)


class CodeAct(ReadWhole):
    """See the module; `finish_reason` other than stop makes everything unclosed an error."""

    name = "codeact"

    def render_tools(self, specs: Sequence[ToolSpec]) -> str:
        """Describe the tools in the words that models of this format were trained on."""
        return _PROMPT.format(description="\n".join(_describe(i, spec) for i, spec in enumerate(specs, start=1)))

    def render_call(self, call: ToolCall) -> str:
        """Write a call; values that could be misread go out in the JSON form."""
        parameters = "".join(write_parameter(name, value) for name, value in call.arguments.items())
        return f"<function={call.name}>\n{parameters}</function>"

    def reader(self, text: str, tools: Sequence[ToolSpec], *, cut: bool) -> Reader:
        """See `ReadWhole`."""
        return TaggedText(text, cut=cut, shape=_SHAPE)

    def observation(self, text: str, call: ToolCall | None) -> Message:
        """Results are user text with a fixed first line; errors and reminders go without it."""
        return Message("user", text if call is None else f"EXECUTION RESULT of [{call.name}]:\n{text}")


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
