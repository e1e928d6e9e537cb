"""What the model sees: the ids of one trajectory's segments, the exchanges they were made of, and rewriting them.

Invariants: sampled ids stand under mask 1 once, in the segment in which they were sampled; a segment only grows at its
end; history that is rewritten goes on in the same segment when it merely extends it, and opens a new one otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from skyenv.formats.openai import answer_all
from skyenv.history import Exchange, History
from skyenv.renderer import Renderer
from skyenv.types import Completion, Message, Segment, ToolCall, ToolSpec, Trajectory

Results = Sequence[tuple[str, ToolCall | None]]


class Context:
    """Grows `trajectory.segments`. `pending` are the ids that the next generation will see behind the segment."""

    def __init__(self, renderer: Renderer, trajectory: Trajectory, tools: Sequence[ToolSpec]) -> None:
        self._renderer, self._trajectory, self._tools = renderer, trajectory, tuple(tools)
        self.history = History(())
        self.messages: list[Message] = list(renderer.conversation(trajectory.prompt, tools))
        self.pending: list[int] = renderer.prompt(trajectory.prompt, tools)
        trajectory.prompt_hash = renderer.prompt_hash(trajectory.prompt, tools)
        self._segment = Segment()
        trajectory.segments.append(self._segment)

    @property
    def ids(self) -> tuple[int, ...]:
        """All that the next generation will see."""
        return (*self._segment.token_ids, *self.pending)

    @property
    def size(self) -> int:
        """How many ids that is."""
        return len(self._segment.token_ids) + len(self.pending)

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter of the trajectory."""
        counters = self._trajectory.counters
        counters[name] = counters.get(name, 0) + amount

    def append(self, completion: Completion) -> tuple[str, Sequence[int]]:
        """Put what the engine saw and what it answered into the segment; returns the answer's text and ids.

        Text without ids is tokenised here: mask 0, and the trajectory is no longer exact.
        """
        if self._segment is not self._trajectory.segments[-1]:
            self._trajectory.segments.append(self._segment)
        self._segment.append_context(self.pending)
        self.pending = []
        if completion.token_ids:
            self._segment.append_sampled(completion.token_ids, completion.logprobs)
            return self._renderer.decode(completion.token_ids), completion.token_ids
        written = completion.text + "".join(f"{call.name}{call.arguments}" for call in completion.calls)
        ids = self._renderer.encode(written) if written else []
        self._segment.append_context(ids)
        self._trajectory.exact = self._trajectory.exact and not ids
        self.count("text_tokens", len(ids))
        return completion.text, ids

    def observe(self, text: str, ids: Sequence[int], results: Results, completion: Completion) -> None:
        """Make what came back the next generation's context. Thinking that is not kept ends the segment."""
        delta = self._renderer.observations(results, completion_ids=ids)
        self.count("observation_tokens", len(delta))
        answer = self._renderer.remembered(ids)
        if len(answer) != len(ids) and not completion.calls:
            text = self._renderer.decode(answer)
        exchange = Exchange(text, tuple(answer), tuple(results), tuple(delta), completion.calls)
        self.history = replace(self.history, exchanges=(*self.history.exchanges, exchange))
        self.messages += self._as_messages(exchange)
        if self._renderer.history == "strip":
            self._continue_with(self._ids_of(self.history))
        else:
            self.pending = list(delta)

    def tokens(self, history: History) -> int:
        """How many ids a history would take."""
        return len(self._ids_of(history))

    def rewrite(self, history: History) -> None:
        """Go on with another history. Counts what that saves and what an engine must compute again."""
        before = self.size
        self.history = history
        prompt = self._prompt(history.note)
        self.messages = list(self._renderer.conversation(prompt, self._tools))
        for exchange in history.exchanges:
            self.messages += self._as_messages(exchange)
        self._continue_with(self._ids_of(history))
        self.count("condensations")
        self.count("tokens_saved", before - self.size)

    def _continue_with(self, ids: list[int]) -> None:
        old = self._segment.token_ids
        if ids[: len(old)] == old:
            self.pending = ids[len(old) :]
            return
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, old, strict=False)))
        self.count("prefix_tokens_recomputed", len(ids) - common)
        self._segment = Segment()  # part of the trajectory once something is sampled in it
        self.pending = ids

    def _ids_of(self, history: History) -> list[int]:
        ids = self._renderer.prompt(self._prompt(history.note), self._tools)
        for exchange in history.exchanges:
            self._renderer.drop_answer_prefix(ids)
            ids += exchange.answer_ids
            ids += exchange.delta_ids or self._renderer.observations(
                exchange.results, completion_ids=exchange.answer_ids
            )
        return ids

    def _prompt(self, note: str) -> tuple[Message, ...]:
        """System and task, with the note of what was forgotten behind them."""
        prompt = self._trajectory.prompt
        if not note or not prompt:
            return prompt
        return (*prompt[:-1], replace(prompt[-1], content=f"{prompt[-1].content}\n\n{note}"))

    def _as_messages(self, exchange: Exchange) -> list[Message]:
        answer = Message("assistant", exchange.text, calls=exchange.calls)
        if exchange.calls:
            return [answer, *answer_all(exchange.calls, exchange.results)]
        return [answer, *(self._renderer.format.observation(*result) for result in exchange.results)]
