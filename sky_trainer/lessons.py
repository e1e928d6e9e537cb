"""Demonstrations -> segments to learn from: which are taken, and with which ids.

Invariants: sampled ids are taken as they are when this tokenizer decodes them to the recorded text, so nothing is
tokenised again; every other demonstration goes through the context of a rollout, its answers under mask 1 with the
token that ends them. Nothing is cut: a demonstration is taken whole or left out, and counted by the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from sky_trainer.demonstrations import Demonstration, Said
from sky_trainer.sections.sft import SftConfig
from skyenv.context import Context
from skyenv.errors import ConfigError
from skyenv.formats.wrapped import WrappedFormat
from skyenv.renderer import Renderer
from skyenv.types import Completion, Message, Segment, ToolCall, ToolSpec, Trajectory


@dataclass(slots=True)
class Lessons:
    """What there is to learn. `taken` counts demonstrations by where their ids come from, `left_out` by the reason."""

    segments: list[Segment] = field(default_factory=list)
    taken: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)

    def describe(self) -> str:
        """One line for people."""
        tokens = sum(sum(segment.loss_mask) for segment in self.segments)
        rows = f"{sum(self.taken.values())} demonstrations, {len(self.segments)} rows, {tokens} tokens to learn"
        return "; ".join([rows, *(f"{count} {how}" for how, count in (self.taken + self.left_out).items())])


@dataclass(frozen=True, slots=True)
class Classroom:
    """What turns demonstrations into segments: two renderers of one tokenizer, its size, the environment's tools.

    `plain` wraps nothing, for demonstrations that say everything themselves. `environment_tools` is asked only when
    a demonstration needs them.
    """

    renderer: Renderer
    plain: Renderer
    vocab_size: int
    environment_tools: Callable[[], tuple[ToolSpec, ...]]

    def lessons(self, demonstrations: Iterable[Demonstration], config: SftConfig) -> Lessons:
        """Take what `config` asks for. ConfigError when nothing is left, with what was left out and why."""
        found = Lessons()
        for demonstration in demonstrations:
            reason, how, segments = unwanted(demonstration, config), "", list[Segment]()
            if not reason:
                try:
                    how, segments = self.segments(demonstration)
                except _LeftOutError as error:
                    reason = str(error)
            if any(len(segment.token_ids) > config.max_length for segment in segments):
                reason = f"left out, longer than sft.max_length {config.max_length}"
            if reason:
                found.left_out[reason] += 1
            else:
                found.taken[how] += 1
                found.segments += segments
        if not found.segments:
            raise ConfigError(f"sft.data: there is nothing to learn from: {found.describe()}")
        return found

    def segments(self, demonstration: Demonstration) -> tuple[str, list[Segment]]:
        """Where the ids come from, and the ids."""
        if demonstration.segments and self.knows(demonstration):
            return "with the ids that were sampled", list(demonstration.segments)
        if not demonstration.prompt:
            raise _LeftOutError("left out, ids of another tokenizer and no prompt to render")
        if demonstration.whole:
            return "rendered as written", rendered(
                demonstration.prompt, self._answers(demonstration, self.plain, ()), (), self.plain
            )
        tools = self.environment_tools() if demonstration.tools is None else demonstration.tools
        answers = self._answers(demonstration, self.renderer, tools)
        return "rendered with this model's format", rendered(demonstration.prompt, answers, tools, self.renderer)

    def knows(self, demonstration: Demonstration) -> bool:
        """Whether the recorded ids are this tokenizer's: each sampled run decodes to an answer."""
        texts = {said.text for said in demonstration.said}
        return all(
            max(segment.token_ids) < self.vocab_size
            and all(self.renderer.decode(ids) in texts for ids in sampled_runs(segment))
            for segment in demonstration.segments
        )

    def _answers(
        self, demonstration: Demonstration, renderer: Renderer, tools: Sequence[ToolSpec]
    ) -> list[tuple[str, Said]]:
        """Each answer as this model would write it."""
        return [(_written(said, demonstration, renderer, tools), said) for said in demonstration.said]


class _LeftOutError(Exception):
    """Why a demonstration cannot be taught."""


def unwanted(demonstration: Demonstration, config: SftConfig) -> str:
    """Why the filters leave a demonstration out; empty when they do not."""
    if demonstration.failed:
        return "left out, spoiled by infrastructure"
    if config.resolved and not demonstration.resolved:
        return "left out, not resolved"
    if config.min_reward is not None and (demonstration.reward is None or demonstration.reward < config.min_reward):
        return f"left out, reward below {config.min_reward:g} or none"
    return ""


def rendered(
    prompt: Sequence[Message], answers: Sequence[tuple[str, Said]], tools: Sequence[ToolSpec], renderer: Renderer
) -> list[Segment]:
    """The segments that a rollout would have made of these answers; logprobs are 0."""
    trajectory = Trajectory("", prompt=tuple(prompt))
    context = Context(renderer, trajectory, tools)
    for text, said in answers:
        ids = (*renderer.encode(text), renderer.end_of_turn)
        completion = Completion(text, ids, (0.0,) * len(ids))
        context.append(completion)
        context.observe(text, ids, said.results or (("", None),), completion)
    return [segment for segment in trajectory.segments if 1 in segment.loss_mask]


def replayed(trajectory: Trajectory, tools: Sequence[ToolSpec], renderer: Renderer) -> list[Segment]:
    """The ids of a recorded trajectory under another tokenizer, put together as a rollout does; logprobs are 0."""
    answers = [
        (turn.text, Said(turn.text, turn.calls, ((turn.observation, turn.calls[0] if turn.calls else None),)))
        for turn in trajectory.turns
    ]
    return rendered(trajectory.prompt, answers, tools, renderer)


def sampled_runs(segment: Segment) -> list[list[int]]:
    """The ids under mask 1, one list for each run of them."""
    runs = groupby(zip(segment.token_ids, segment.loss_mask, strict=True), key=lambda pair: pair[1])
    return [[token for token, _ in run] for mask, run in runs if mask]


def _written(said: Said, demonstration: Demonstration, renderer: Renderer, tools: Sequence[ToolSpec]) -> str:
    format, text = renderer.format, said.text
    if demonstration.beside:
        added = [format.render_call(call) for call in said.calls]
        text = "\n".join([text, *added] if text else added)
    if renderer.thinking_open:
        if "</think>" not in text:
            raise _LeftOutError("left out, answers without thinking; set template_options.enable_thinking to false")
        text = text.removeprefix("<think>\n")
    calls = said.calls if demonstration.whole else format.parse(text, tools, thinking_open=renderer.thinking_open).calls
    if said.calls and calls != said.calls:
        raise _LeftOutError(f"left out, calls not written in format {format.name} or not of these tools")
    if any(stop in renderer.encode(text) for stop in renderer.stop_token_ids):
        raise _LeftOutError("left out, an answer holds the token that ends answers")
    return text


class AsWritten(WrappedFormat):
    """A format for conversations that say everything themselves: tools are not described, results not wrapped."""

    def render_tools(self, specs: Sequence[ToolSpec]) -> str:
        """Nothing."""
        return ""

    def observation(self, text: str, call: ToolCall | None) -> Message:
        """The text as it is."""
        return Message("user", text)
