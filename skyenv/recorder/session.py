"""One agent's calls: answered by the engine, recorded as ids before the agent hears of them.

A session belongs to one trajectory. Its own sampling parameters and limits hold, whatever the agent asks for, so that
logprobs stay comparable with the trainer's; parameters without effect are counted. A failing engine is told to the
agent, which may try again, and kept as `failure` until a later call succeeds.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import anyio

from skyenv.core import Engine
from skyenv.errors import EngineError, EnvError, boundary
from skyenv.formats.contract import NativeFormat, Parsed
from skyenv.recorder.tree import Conversations, Prompt
from skyenv.recorder.wire import Answer, Finish, Refused, Request, bad
from skyenv.renderer import Renderer
from skyenv.sampling import Sampler
from skyenv.types import (
    Completion,
    Limits,
    Message,
    NativeCall,
    SamplingParams,
    StopReason,
    ToolCall,
    ToolSpec,
    Trajectory,
    Turn,
)

_ANYTHING: Mapping[str, Any] = MappingProxyType({"type": "object", "additionalProperties": True})


@dataclass(frozen=True, slots=True)
class Call:
    """What one recorded call was made with and came to. `template_hash` is the renderer's; tokens and seconds."""

    model: str
    policy_version: int
    template_hash: str
    prompt_tokens: int
    sampled_tokens: int
    seconds: float


class RecordedSession:
    """Answers requests and fills `trajectory` with exact segments and readable turns.

    `key` is the secret that an agent presents as its API key; `calls` are those that were answered.
    `stop_reason` says which budget was used up. Safe for calls at the same time: each is recorded as a whole, in the
    order in which they end; `close` sorts the turns by conversation.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        trajectory: Trajectory,
        *,
        limits: Limits | None = None,
        sampling: SamplingParams | None = None,
    ) -> None:
        self.key = secrets.token_urlsafe(24)
        self.trajectory = trajectory
        self.limits = limits or Limits()
        self.sampling = sampling or SamplingParams()
        self.stop_reason: StopReason | None = None
        self.failure: EngineError | None = None
        self._renderer = renderer
        self._sampler = Sampler(engine, renderer, trajectory, self.sampling, self.limits.turn_timeout)
        self._conversations = Conversations(renderer)
        trajectory.segments = self._conversations.segments
        self.calls: list[Call] = []
        self._asked = 0
        self._closed = False

    async def answer(self, request: Request) -> Answer:
        """Sample an answer and record it. Raises Refused; a cancelled call is not recorded, nor one after `close`."""
        self._check(request)
        with boundary(EnvError, "recorder"):
            prompt = self._conversations.prompt(request)
        budget = min(request.max_tokens or 1 << 30, self.limits.max_tokens_per_turn, self.sampling.max_tokens)
        if len(prompt.ids) + budget > self.limits.max_context:
            self.stop_reason = StopReason.CONTEXT
            message = f"this conversation has {len(prompt.ids)} tokens; with {budget} for the answer it is over the"
            raise Refused(400, "context_length_exceeded", f"{message} maximum context of {self.limits.max_context}")
        self._asked += 1
        started = anyio.current_time()
        try:
            completion = await self._sampler.sample(
                prompt.ids,
                prompt.messages,
                turn=self._asked,
                max_tokens=budget,
                deadline=started + self.limits.turn_timeout,
            )
        except EngineError as error:
            self.failure = error
            raise Refused(503, "engine_error", str(error)) from error
        if self._closed:
            raise Refused(401, "invalid_api_key", "the session of this key is over")
        self.failure = None
        if self.stop_reason is StopReason.CONTEXT:  # the agent has made room
            self.stop_reason = None
        with boundary(EnvError, "recorder"):
            return self._record(request, prompt, completion, anyio.current_time() - started)

    def count_tokens(self, request: Request) -> int:
        """How many ids the history of a request is."""
        with boundary(EnvError, "recorder"):
            return len(self._conversations.prompt(request).ids)

    def close(self) -> None:
        """Write the session's counts into the trajectory and put its turns in the order of its segments. Idempotent.

        Calls that are still under way are not recorded.
        """
        if not self._closed:
            self._closed = True
            trajectory = self.trajectory
            trajectory.counters |= self._conversations.counters
            trajectory.turns = [trajectory.turns[index] for index in self._conversations.order()]

    def _check(self, request: Request) -> None:
        if request.messages[-1].role == "assistant":
            raise bad("messages", "the last one is an answer; going on inside an answer is not recorded")
        if self._asked >= self.limits.max_turns:
            self.stop_reason = StopReason.MAX_TURNS
            raise Refused(403, "budget_exceeded", f"all {self.limits.max_turns} calls of this session are used up")

    def _record(self, request: Request, prompt: Prompt, completion: Completion, seconds: float) -> Answer:
        trajectory, ids = self.trajectory, completion.token_ids
        text = self._renderer.decode(ids) if ids else completion.text
        content, calls, error = self._read(text, request, completion)
        native = tuple(NativeCall(f"call_{secrets.token_hex(8)}", c.name, _json(c)) for c in calls)
        turn = Turn(text, calls, "", completion.finish_reason, completion.policy_version, seconds, 0.0, error)
        trajectory.turns.append(turn)
        self._observe(prompt)
        trajectory.exact = trajectory.exact and bool(ids)
        answer = Message("assistant", content, calls=native)
        self._conversations.record(prompt, completion, answer, len(trajectory.turns) - 1)
        self.calls.append(
            Call(
                request.model,
                completion.policy_version,
                self._renderer.template_hash,
                len(prompt.ids),
                len(ids),
                seconds,
            )
        )
        counters = trajectory.counters
        for name, amount in (("parse_errors", error is not None), ("ignored_parameters", len(request.ignored))):
            counters[name] = counters.get(name, 0) + int(amount)
        finish: Finish = "length" if completion.finish_reason == "length" else "calls" if native else "stop"
        return Answer(
            id=secrets.token_hex(12),
            model=request.model,
            content=content,
            calls=native,
            finish=finish,
            prompt_tokens=len(prompt.ids),
            sampled_tokens=len(ids),
            created=int(time.time()),
            usage=request.usage,
        )

    def _observe(self, prompt: Prompt) -> None:
        """What came back is the observation of the turn that it answers."""
        if prompt.base is None:
            if not self.trajectory.prompt:
                self.trajectory.prompt = prompt.messages
            return
        turn = self.trajectory.turns[prompt.base.turn]
        if not turn.observation:
            text = "\n".join(message.content for message in prompt.news)
            self.trajectory.turns[prompt.base.turn] = replace(turn, observation=text)

    def _read(
        self, text: str, request: Request, completion: Completion
    ) -> tuple[str, tuple[ToolCall, ...], str | None]:
        """Visible text, calls, and what is wrong with them.

        Arguments that do not fit their tool are the agent's to complain of, as with any server; text that cannot be
        read as calls at all is passed as text.
        """
        opened = self._renderer.thinking_open
        if not request.tools:
            return _visible(text, opened), (), None

        def parse(tools: Sequence[ToolSpec]) -> Parsed:
            return self._renderer.format.parse(
                text, tools, finish_reason=completion.finish_reason, thinking_open=opened
            )

        parsed = parse(request.tools)
        if parsed.error is None:
            return parsed.content, parsed.calls, None
        unchecked = parse([replace(spec, parameters=_ANYTHING) for spec in request.tools])
        if unchecked.error is None and unchecked.calls:
            return unchecked.content, unchecked.calls, parsed.error
        return _visible(text, opened), (), parsed.error


def recordable(renderer: Renderer) -> str | None:
    """Why a renderer cannot be recorded with, or None."""
    if isinstance(renderer.format, NativeFormat):
        return f"format {renderer.format.name} leaves calls to a server; recording needs one written as text"
    if renderer.history != "keep":
        return "history: recording keeps what the model saw; set it to keep"
    return None


def _visible(text: str, thinking_open: bool) -> str:
    """The text behind its thinking."""
    _, closed, rest = text.partition("</think>")
    return rest.strip() if closed else "" if thinking_open else text


def _json(call: ToolCall) -> str:
    return json.dumps(dict(call.arguments), ensure_ascii=False)
