"""A format that is another one in all but what a subclass says."""

from __future__ import annotations

from collections.abc import Sequence

from skyenv.formats.contract import Format, Parsed
from skyenv.types import FinishReason, Message, ToolCall, ToolSpec


class WrappedFormat:
    """A `Format` that does everything as `format` does, by whose name it goes."""

    def __init__(self, format: Format) -> None:
        self.name = format.name
        self._format = format

    def render_tools(self, specs: Sequence[ToolSpec]) -> str:
        """As the wrapped format."""
        return self._format.render_tools(specs)

    def render_call(self, call: ToolCall) -> str:
        """As the wrapped format."""
        return self._format.render_call(call)

    def parse(
        self,
        text: str,
        tools: Sequence[ToolSpec],
        *,
        finish_reason: FinishReason = "stop",
        thinking_open: bool = False,
    ) -> Parsed:
        """As the wrapped format."""
        return self._format.parse(text, tools, finish_reason=finish_reason, thinking_open=thinking_open)

    def observation(self, text: str, call: ToolCall | None) -> Message:
        """As the wrapped format."""
        return self._format.observation(text, call)
