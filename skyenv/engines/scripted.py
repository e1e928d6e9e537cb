"""An engine that plays what it is told, with real token ids: for tests, reference policies and dry runs.

Stateless: which text comes next follows from the conversation alone, so any number of trajectories share one engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import anyio

from skyenv.errors import ConfigError, EngineError
from skyenv.renderer import Renderer
from skyenv.types import Completion, Message, SamplingParams

Script = Sequence[str] | Callable[[Sequence[Message]], str]
"""Texts turn by turn, or a function from the conversation so far to the next text."""


class ScriptedEngine:
    """Plays `script`, or for each task its own when `script` is a mapping from task id.

    A text is encoded by the renderer and ends with its stop token; what exceeds `max_tokens` is cut off with finish
    reason `length`, and `stop_token_ids` inside a text end it. Every logprob is `logprob`; `policy_version` may be set
    between calls; `latency` is in seconds a call. Raises EngineError past the end of a script and for a task without
    one.
    """

    def __init__(
        self,
        renderer: Renderer,
        script: Script | Mapping[str, Script],
        *,
        latency: float = 0.0,
        logprob: float = -0.25,
        policy_version: int = 0,
    ) -> None:
        if isinstance(script, str):
            raise ConfigError("script: one text is not a script; give a list of texts")
        self.policy_version = policy_version
        self._renderer, self._script = renderer, script
        self._latency, self._logprob = latency, logprob

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        messages: Sequence[Message] = (),
        session_id: str = "",
    ) -> Completion:
        """The script's next text, as an engine would sample it."""
        version = self.policy_version
        await anyio.sleep(self._latency)
        text = self._text(messages, session_id)
        stops = sampling.stop_token_ids or tuple(self._renderer.stop_token_ids)
        ids = [*self._renderer.encode(text), stops[0]]
        end = next(position for position, token in enumerate(ids) if token in stops) + 1
        cut = end > sampling.max_tokens
        ids = ids[: min(end, sampling.max_tokens)]
        return Completion(
            text=self._renderer.decode(ids),
            token_ids=tuple(ids),
            logprobs=(self._logprob,) * len(ids),
            finish_reason="length" if cut else "stop",
            policy_version=version,
            seconds=self._latency,
        )

    def _text(self, messages: Sequence[Message], session_id: str) -> str:
        script = self._script
        if isinstance(script, Mapping):
            task_id = session_id.rpartition("#")[0]
            if task_id not in script:
                raise EngineError(f"there is no script for task {task_id!r}")
            script = script[task_id]
        if callable(script):
            return script(messages)
        turn = sum(message.role == "assistant" for message in messages)
        if turn >= len(script):
            raise EngineError(f"the script has {len(script)} texts, and turn {turn + 1} is asked for")
        return script[turn]
