"""What a format is, and the pieces that all formats share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from skyenv.tools.schema import check_arguments
from skyenv.types import FinishReason, Message, ToolCall, ToolSpec


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a model's text asks for.

    `calls` is empty whenever `error`, a text for the model, is set; both are empty when the text holds no call.
    `content` is the text without thinking and calls. `repairs` counts damage that was mended without doubt about
    what was meant.
    """

    calls: tuple[ToolCall, ...]
    error: str | None
    content: str
    repairs: int = 0


class Format(Protocol):
    """One wire format. Implementations are stateless and shared."""

    @property
    def name(self) -> str:
        """What `skyenv.formats.get` knows it by."""
        ...

    def render_tools(self, specs: Sequence[ToolSpec]) -> str:
        """Describe the tools and how to call them; the text is appended to the system prompt as it is."""
        ...

    def render_call(self, call: ToolCall) -> str:
        """Write a call as a model should; `parse` gives it back."""
        ...

    def parse(
        self,
        text: str,
        tools: Sequence[ToolSpec],
        *,
        finish_reason: FinishReason = "stop",
        thinking_open: bool = False,
    ) -> Parsed:
        """Read the calls in `text`. Thinking is skipped; `thinking_open` says that the prompt ended inside it."""
        ...

    def observation(self, text: str, call: ToolCall | None) -> Message:
        """The message in which a result travels; `call` None for errors of the format and for reminders."""
        ...


class Rejected(Exception):
    """Text that does not parse; raised and caught within a format. The message is for the model."""


CUT_OFF = (
    "Your answer was cut off at the token limit before its tool call was complete. Take smaller steps: write long "
    "files in several parts, and think more briefly."
)


def reject(reason: str, shape: str = "") -> Rejected:
    """Make the error for the model: the reason, that nothing was run, and the expected shape."""
    return Rejected(f"ERROR: {reason} Nothing was run." + (f"\n{shape}" if shape else ""))


def checked_call(name: str, arguments: object, tools: Sequence[ToolSpec]) -> ToolCall:
    """Make a call with arguments of the schema's types. Raises Rejected."""
    for spec in tools:
        if spec.name == name:
            result = check_arguments(spec, arguments)
            if isinstance(result, str):
                raise reject(result)
            return ToolCall(name, result)
    known = ", ".join(sorted(spec.name for spec in tools))
    raise reject(f"There is no tool named {json.dumps(name[:80])}. Available tools: {known}.")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object. Raises ValueError when a key stands in it twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return found


def refuse_constant(name: str) -> Any:
    """Refuse NaN and Infinity, which are not JSON. Raises ValueError."""
    raise ValueError(f"{name} is not JSON")
