"""DeepSeek's formats: calls between special tokens, arguments as fenced JSON (V3) or bare JSON (V3.1), read alike."""

from __future__ import annotations

import re
from collections.abc import Sequence

from skyenv.formats.contract import CUT_OFF, MAX_CALLS, Reader, ReadWhole, Written, reject, too_many
from skyenv.formats.json_calls import SPACE, JsonText, as_function, dumps
from skyenv.types import Message, ToolCall, ToolSpec

_ALL, _END_ALL = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_ONE, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_MARK = re.compile(f"</?think>|{_ALL}|{_END_ALL}|{_ONE}|{_END}")
_NAME = re.compile(f"([^<\\n]{{0,128}}){_SEP}")
_FENCE = re.compile(r"([^\s`{][^\n`{]{0,127}?)[ \t]*\n\s*```(?:json)?")
_V3_CALL = f'{_ONE}function{_SEP}tool_name\n```json\n{{"parameter_name": "value"}}\n```{_END}'
_V3_SHAPE = f"Expected format:\n{_ALL}{_V3_CALL}{_END_ALL}"
_V31_SHAPE = f'Expected format:\n{_ALL}{_ONE}tool_name{_SEP}{{"parameter_name": "value"}}{_END}{_END_ALL}'


class DeepSeek(ReadWhole):
    """See the module. `fenced` renders V3's shape, else V3.1's. Closing tokens may be missing at the end of a text."""

    def __init__(self, *, fenced: bool = True) -> None:
        self._fenced = fenced
        self._shape = _V3_SHAPE if fenced else _V31_SHAPE

    @property
    def name(self) -> str:
        """`deepseek`, or `deepseek_v31`."""
        return "deepseek" if self._fenced else "deepseek_v31"

    def render_tools(self, specs: Sequence[ToolSpec]) -> str:
        """Describe the tools and the shape of a call."""
        described = "".join("\n" + dumps(as_function(spec)) for spec in specs)
        return f"\n\n## Tools\nYou have access to the following tools:\n{described}\n\n{self._shape}\n"

    def render_call(self, call: ToolCall) -> str:
        """Write a call in the format's own shape."""
        arguments = dumps(dict(call.arguments))
        if self._fenced:
            return f"{_ALL}{_ONE}function{_SEP}{call.name}\n```json\n{arguments}\n```{_END}{_END_ALL}"
        return f"{_ALL}{_ONE}{call.name}{_SEP}{arguments}{_END}{_END_ALL}"

    def reader(self, text: str, tools: Sequence[ToolSpec], *, cut: bool) -> Reader:
        """See `ReadWhole`."""
        return _Reader(text, cut=cut, shape=self._shape)

    def observation(self, text: str, call: ToolCall | None) -> Message:
        """Results travel in the tool role; what answers no call is user text."""
        return Message("user", text) if call is None else Message("tool", text, name=call.name)


class _Reader(JsonText):
    def read(self, thinking_open: bool) -> list[Written]:
        """Groups of calls, prose around them."""
        return self.walk(_MARK, self._group, thinking_open)

    def _group(self, found: re.Match[str]) -> tuple[list[Written], int] | None:
        if found[0] != _ALL:
            return None
        written: list[Written] = []
        position = self.skip(SPACE, found.end())
        while self.text.startswith(_ONE, position):
            call, position = self._call(position + len(_ONE))
            written.append(call)
            position = self.skip(SPACE, position)
            if len(written) > MAX_CALLS:
                raise too_many()
        end = self.closed(_END_ALL, position)
        if end is None or not written:
            raise reject(CUT_OFF) if self.cut else reject("A group of calls holds something else.", self.shape)
        return written, end

    def _call(self, position: int) -> tuple[Written, int]:
        head = _NAME.match(self.text, position)
        if head is None:
            raise reject(CUT_OFF) if self.cut else reject(f"A call has no name and {_SEP}.", self.shape)
        name, position = head[1].strip(), head.end()
        fence = _FENCE.match(self.text, self.skip(SPACE, position))
        if fence:
            name, position = fence[1], fence.end()
        value, position = self.object(position)
        if fence:
            position = self._unfenced(position)
        end = self.closed(_END, position)
        if end is None:
            raise reject(f"Text stands between the JSON of the call and {_END}.", self.shape)
        return Written(name, self.arguments(value)), end

    def _unfenced(self, position: int) -> int:
        end = self.closed("```", position)
        if end is None:
            raise reject("The JSON of the call is not followed by ``` alone.", self.shape)
        return self.skip(SPACE, end)
