"""What a format is, and the pieces that all formats share."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from skyenv.tools.schema import check_arguments
from skyenv.types import FinishReason, Message, NativeCall, ToolCall, ToolSpec

MAX_CALLS = 64
_FOREIGN = tuple(
    (literal, re.compile(pattern), how)
    for literal, pattern, how in (
        ("=", r"(?i:<function\s*=)", "with <function=...>"),
        ("<tool_call>", r"<tool_call>\s*\{", "as JSON between <tool_call> tags"),
        (
            '"name"',
            r'\{\s*"name"\s*:\s*"[^"\n]{1,80}"\s*,\s*"(?:arguments|parameters)"\s*:',
            "as a JSON object",
        ),
        ("[TOOL_CALLS]", r"\[TOOL_CALLS\]", "with [TOOL_CALLS]"),
        ("[ARGS]", r"\w\[ARGS\]", "with [ARGS] but without [TOOL_CALLS]"),
        ("\u2581begin", "<\uff5ctool\u2581calls?\u2581begin\uff5c>", "with DeepSeek's tool call tokens"),
        ("to=functions.", r"\bto=functions\.\w", "with to=functions"),
        ('"tool_calls"', r'\{\s*"tool_calls"\s*:\s*\[', "as a list of tool_calls"),
    )
)
"""What calls of other formats look like: a literal that is quick to look for, the pattern, and how to name it."""


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


class Written(NamedTuple):
    """A call as it stands in a text: nothing checked but its shape."""

    name: str
    arguments: Any
    id: str = ""


class Reader(Protocol):
    """Reads one text once; `content` and `repairs` hold what was met until then."""

    repairs: int

    def read(self, thinking_open: bool) -> list[Written]:
        """The calls of the text. Raises Rejected."""
        ...

    def content(self) -> str:
        """The visible text read so far, without calls."""
        ...


@runtime_checkable
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


@runtime_checkable
class NativeFormat(Format, Protocol):
    """A format whose calls travel beside the text, as servers with tool calling of their own report them."""

    def parse_native(
        self, content: str, calls: Sequence[NativeCall], tools: Sequence[ToolSpec], *, finish_reason: FinishReason
    ) -> Parsed:
        """Check the calls that a server reported; as strict as `parse`."""
        ...


class Rejected(Exception):
    """Text that does not parse; raised and caught within a format. The message is for the model."""


CUT_OFF = (
    "Your answer was cut off at the token limit before its tool call was complete. Take smaller steps: write long "
    "files in several parts, and think more briefly."
)


def reject(reason: str, shape: str = "") -> Rejected:
    """Make the error for the model: the reason, that nothing was run, and the expected shape."""
    return Rejected(_unicode(f"ERROR: {reason} Nothing was run." + (f"\n{shape}" if shape else "")))


def read_all(reader: Reader, tools: Sequence[ToolSpec], *, cut: bool, thinking_open: bool) -> Parsed:
    """All calls that a reader finds, checked, or none and the error for the model."""
    try:
        written = reader.read(thinking_open)
        if len(written) > MAX_CALLS:
            raise too_many()
        calls = tuple(checked_call(*call, tools=tools) for call in written)
        if not calls and cut:
            raise reject(CUT_OFF)
    except Rejected as error:
        return Parsed((), str(error), reader.content(), reader.repairs)
    return Parsed(calls, None, reader.content(), reader.repairs)


def too_many() -> Rejected:
    """More calls than any sane answer makes; readers stop there, so their cost is bounded."""
    return reject(f"One answer may make at most {MAX_CALLS} calls.")


def refuse_foreign(visible: str, shape: str) -> None:
    """Raise Rejected when text outside calls holds a call in another format."""
    for literal, pattern, how in _FOREIGN:
        if literal in visible and pattern.search(visible):
            raise reject(f"The tool call is written {how}, which is not the format used here.", shape)


def checked_call(name: str, arguments: object, id: str = "", *, tools: Sequence[ToolSpec]) -> ToolCall:
    """Make a call with arguments of the schema's types. Raises Rejected."""
    for spec in tools:
        if spec.name == name:
            result = check_arguments(spec, arguments)
            if isinstance(result, str):
                raise reject(result)
            return ToolCall(name, result, _unicode(id))
    known = ", ".join(sorted(spec.name for spec in tools))
    raise reject(f"There is no tool named {json.dumps(name[:80])}. Available tools: {known}.")


def _unicode(text: str) -> str:
    """The text with lone surrogates, which JSON may hold and no tokenizer encodes, written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object. Raises ValueError when a key stands in it twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return found


def refuse_constant(name: str) -> Any:
    """Refuse NaN and Infinity, which are not JSON. Raises ValueError."""
    raise ValueError(f"{name} is not JSON")


class ReadWhole(ABC):
    """`Format.parse` for a format whose reading is all in its reader: every call of a text, or none and an error."""

    @abstractmethod
    def reader(self, text: str, tools: Sequence[ToolSpec], *, cut: bool) -> Reader:
        """A reader of `text`; `cut` when generation did not come to its own end."""

    def parse(
        self,
        text: str,
        tools: Sequence[ToolSpec],
        *,
        finish_reason: FinishReason = "stop",
        thinking_open: bool = False,
    ) -> Parsed:
        """Read all calls of the text or none."""
        cut = finish_reason != "stop"
        return read_all(self.reader(text, tools, cut=cut), tools, cut=cut, thinking_open=thinking_open)
