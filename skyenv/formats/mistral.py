"""Mistral's formats: `[TOOL_CALLS][{"name", "arguments", "id"}, ...]` and `[TOOL_CALLS]N[ARGS]{...}`, read alike.

Ids are nine letters and digits. One that is not is replaced, and counted as a repair: it says nothing about the call.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from skyenv.formats.contract import Reader, ReadWhole, Written, reject
from skyenv.formats.json_calls import SPACE, JsonText, as_function, call_id, dumps
from skyenv.types import Message, ToolCall, ToolSpec

_MARK = re.compile(r"\[TOOL_CALLS\]|\[/?THINK\]|</?think>")
_NAME = re.compile(r"([^\[\]\s{}\"]{1,128})(?:\[CALL_ID\]([^\[\]\s]{0,64}))?\[ARGS\]")
_ID = re.compile(r"[A-Za-z0-9]{9}")
_OPEN = "[TOOL_CALLS]"
_LIST_SHAPE = 'Expected format:\n[TOOL_CALLS][{"name": "tool_name", "arguments": {"parameter_name": "value"}}]'
_NAME_SHAPE = 'Expected format:\n[TOOL_CALLS]tool_name[ARGS]{"parameter_name": "value"}'


class Mistral(ReadWhole):
    """See the module. `named` renders the second shape, of tokenizers from version 11 on."""

    def __init__(self, *, named: bool = False) -> None:
        self._named = named
        self._shape = _NAME_SHAPE if named else _LIST_SHAPE

    @property
    def name(self) -> str:
        """`mistral`, or `mistral_named` for the second shape."""
        return "mistral_named" if self._named else "mistral"

    def render_tools(self, specs: Sequence[ToolSpec]) -> str:
        """Describe the tools as one list behind the instructions."""
        return f"\n\n[AVAILABLE_TOOLS]{dumps([as_function(spec) for spec in specs])}[/AVAILABLE_TOOLS]"

    def render_call(self, call: ToolCall) -> str:
        """Write a call in the format's own shape."""
        arguments = dumps(dict(call.arguments))
        if self._named:
            return f"{_OPEN}{call.name}[ARGS]{arguments}"
        return f'{_OPEN}[{{"name": {dumps(call.name)}, "arguments": {arguments}, "id": {dumps(call_id(call))}}}]'

    def reader(self, text: str, tools: Sequence[ToolSpec], *, cut: bool) -> Reader:
        """See `ReadWhole`."""
        return _Reader(text, cut=cut, shape=self._shape)

    def observation(self, text: str, call: ToolCall | None) -> Message:
        """Results travel in the tool role with the call's id; what answers no call is user text."""
        if call is None:
            return Message("user", text)
        return Message("tool", text, name=call.name, call_id=call_id(call))


class _Reader(JsonText):
    def read(self, thinking_open: bool) -> list[Written]:
        """Calls behind their marker, prose around them."""
        return self.walk(_MARK, self._calls, thinking_open)

    def _calls(self, found: re.Match[str]) -> tuple[list[Written], int] | None:
        if found[0] != _OPEN:
            return None
        position = self.skip(SPACE, found.end())
        if named := _NAME.match(self.text, position):
            value, end = self.object(named.end())
            return [self._with_id(Written(named[1], self.arguments(value), named[2] or ""))], end
        if not self.text.startswith("[", position) and not self.cut:
            raise reject("No call stands behind [TOOL_CALLS].", self.shape)
        values, end = self.value(position)
        if not isinstance(values, list) or not values:
            raise reject("What stands behind [TOOL_CALLS] is no list of calls.", self.shape)
        return [self._with_id(self.call(value, also=("id",))) for value in values], end

    def _with_id(self, call: Written) -> Written:
        if not call.id or _ID.fullmatch(call.id):
            return call
        self.repairs += 1
        return call._replace(id="")
