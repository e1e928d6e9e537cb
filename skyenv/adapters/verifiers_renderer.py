"""Our renderer as one of the package `renderers`, for verifiers' train client: the ids of its traces are then ours.

    [renderer]
    name = "custom"
    import_path = "skyenv.adapters.verifiers_renderer.SkyRenderer"
    format = "hermes"

Calls stay in an answer's text, since `SkyHarness` reads them itself; harnesses that want structured calls have
renderers of their own there. A conversation is extended behind the ids that were sampled, never rendered again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any, ClassVar

from renderers.base import ParsedResponse, RenderedTokens
from renderers.configs import BaseRendererConfig

from skyenv import formats
from skyenv.errors import ConfigError
from skyenv.renderer import Renderer
from skyenv.types import Message, ToolSpec

Wire = Mapping[str, Any]


class SkyRendererConfig(BaseRendererConfig):
    """`format` is a tool-call format of `skyenv.formats` that suits the model."""

    _internal_fields: ClassVar[frozenset[str]] = frozenset({"format"})

    format: str = "hermes"


class SkyRenderer:
    """See `renderers.base.Renderer`. ConfigError for a tokenizer whose chat template cannot be used exactly."""

    config_class = SkyRendererConfig
    supports_tools = True
    is_prefix_stable = True

    def __init__(self, tokenizer: Any, config: SkyRendererConfig) -> None:
        self.config = config
        self._renderer = Renderer(tokenizer, formats.get(config.format))

    def render(
        self, messages: Sequence[Wire], *, tools: Sequence[Wire] | None = None, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        """A whole conversation; earlier answers are encoded from their text."""
        if not add_generation_prompt:
            raise ConfigError("SkyRenderer renders what is to be answered: add_generation_prompt must be true")
        given, specs = [_message(message) for message in messages], [_spec(tool) for tool in tools or ()]
        roles = [message.role for message in given]
        head = roles.index("assistant") if "assistant" in roles else len(roles)
        ids, indices = _attributed(given[:head], lambda some: self._renderer.prompt(some, specs), 0)
        while head < len(given):
            rest = takewhile(lambda role: role != "assistant", roles[head + 1 :])
            end = head + 1 + len(list(rest))
            answer = [*self._renderer.encode(given[head].content), self._renderer.stop_token_ids[0]]
            delta, owners = self._delta(given[head + 1 : end], answer, head + 1)
            ids, indices = [*ids, *answer, *delta], [*indices, *[head] * len(answer), *owners]
            head = end
        return _rendered(ids, indices, messages)

    def render_ids(
        self, messages: Sequence[Wire], *, tools: Sequence[Wire] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """The ids of `render`."""
        return list(self.render(messages, tools=tools, add_generation_prompt=add_generation_prompt).token_ids)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: Sequence[Wire],
        *,
        tools: Sequence[Wire] | None = None,
    ) -> RenderedTokens | None:
        """What was seen and sampled, and behind it what came back; None when an answer is among the new messages."""
        given = [_message(message) for message in new_messages]
        if not given or any(message.role == "assistant" for message in given):
            return None
        delta, owners = self._delta(given, previous_completion_ids, 0)
        before = [*previous_prompt_ids, *previous_completion_ids]
        return _rendered([*before, *delta], [*[-1] * len(before), *owners], new_messages)

    def parse_response(
        self, token_ids: list[int], *, tools: Sequence[Wire] | None = None, prompt_ids: list[int] | None = None
    ) -> ParsedResponse:
        """The answer's text, calls and thinking included."""
        return ParsedResponse(content=self._renderer.decode(token_ids))

    def get_stop_token_ids(self) -> list[int]:
        """The ids that end an answer."""
        return list(self._renderer.stop_token_ids)

    def _delta(self, messages: Sequence[Message], answer: Sequence[int], first: int) -> tuple[list[int], list[int]]:
        return _attributed(messages, lambda some: self._renderer.delta(some, completion_ids=answer), first)


def _attributed(
    messages: Sequence[Message], render: Callable[[Sequence[Message]], list[int]], first: int
) -> tuple[list[int], list[int]]:
    """Ids, and for each the number of the message that brought it, counted from `first`."""
    ids = render(messages)
    owners: list[int] = []
    for number in range(1, len(messages)):
        part = render(messages[:number])
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(part, ids, strict=False)))
        owners += [first + number - 1] * (common - len(owners))
    return ids, [*owners, *[first + len(messages) - 1] * (len(ids) - len(owners))]


def _rendered(ids: list[int], indices: list[int], messages: Sequence[Wire]) -> RenderedTokens:
    roles = [str(message["role"]) for message in messages]
    names = [message.get("name") if message["role"] == "tool" else None for message in messages]
    return RenderedTokens(token_ids=ids, message_indices=indices, message_roles=roles, message_tool_names=names)


def _message(message: Wire) -> Message:
    content = message.get("content") or ""
    if not isinstance(content, str):
        if any(part.get("type") != "text" for part in content):
            raise ConfigError("SkyRenderer: messages hold text only; use a renderer for images")
        content = "".join(part["text"] for part in content)
    if message.get("tool_calls"):
        raise ConfigError(
            "SkyRenderer: an answer has structured calls; it goes with SkyHarness, which keeps their text"
        )
    return Message(message["role"], content, name=message.get("name"))


def _spec(tool: Wire) -> ToolSpec:
    function = tool.get("function", tool)
    return ToolSpec(function["name"], function.get("description") or "", function.get("parameters") or {})
