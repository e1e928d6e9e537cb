"""Condensers: what a conversation forgets when it outgrows its context.

A history is a list of exchanges, each an answer with all that came back, so a call and its observation stay together.
The prompt (system and task) is no part of it and always stays; the last exchange always stays. A condenser returns a
shorter history, or the same one when it cannot make progress; the loop decides whether the progress is worth a new
segment. A condenser of one's own is any object that satisfies `Condenser`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from skyenv.errors import ConfigError
from skyenv.plugins import load
from skyenv.types import NativeCall, ToolCall

OMITTED = "[This output was left out to save room. Run the call again if it is needed.]"
FORGOTTEN = "[{turns} earlier turns of this conversation were left out to save room.]"
SUMMARY = "[Summary of {turns} earlier turns that were left out to save room:]\n{summary}"
ASK = (
    "Below is what was done so far on a task. Summarise it for the one who goes on with it: what is wanted, what was "
    "found out (paths, names, causes), what was changed, what failed, what remains. Be exact and brief. Answer with "
    "the summary alone, without tool calls."
)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One answer and what came back. `delta_ids` are the results' ids, empty when they have to be made anew.

    `calls` are those that a server reported beside the text.
    """

    text: str
    answer_ids: tuple[int, ...]
    results: tuple[tuple[str, ToolCall | None], ...]
    delta_ids: tuple[int, ...] = ()
    calls: tuple[NativeCall, ...] = ()


@dataclass(frozen=True, slots=True)
class History:
    """Exchanges, oldest first; `note` stands behind the task and says what of the `forgotten` turns is known."""

    exchanges: tuple[Exchange, ...]
    note: str = ""
    forgotten: int = 0

    def dropping(self, start: int, stop: int) -> History:
        """Without the exchanges from `start` up to `stop`, with a note of how many are gone in all."""
        gone = self.forgotten + max(0, stop - start)
        kept = (*self.exchanges[:start], *self.exchanges[stop:])
        return History(kept, FORGOTTEN.format(turns=gone), gone) if stop > start else self


@dataclass(frozen=True, slots=True)
class Room:
    """What a condenser may use: the `target` in tokens, what a history would take, and the model itself.

    `ask` answers a question about a text with the same engine; the text is cut in its middle where it is too long.
    """

    target: int
    tokens: Callable[[History], int]
    ask: Callable[[str, str], Awaitable[str]]

    def first_fit(self, candidates: Iterable[History]) -> History:
        """The first candidate within the target, or the last of all."""
        for candidate in candidates:
            if self.tokens(candidate) <= self.target:
                break
        return candidate


@runtime_checkable
class Condenser(Protocol):
    """Makes histories shorter; stateless and shared."""

    async def condense(self, history: History, room: Room) -> History:
        """A history of fewer tokens that keeps at least the last exchange; `history` itself for no progress."""
        ...


@dataclass(frozen=True, slots=True)
class KeepFirstLast:
    """Keeps the `first` and the `last` exchanges; fewer of the last while the target is not met."""

    first: int = 1
    last: int = 10

    async def condense(self, history: History, room: Room) -> History:
        """See the class."""
        count = len(history.exchanges)
        return room.first_fit(
            history.dropping(self.first, max(self.first, count - last)) for last in _halves(self.last)
        )


@dataclass(frozen=True, slots=True)
class MaskObservations:
    """Replaces all observations but the last `window`; a smaller window while the target is not met."""

    window: int = 5

    async def condense(self, history: History, room: Room) -> History:
        """See the class."""
        return room.first_fit(self._masked(history, window) for window in _halves(self.window))

    def _masked(self, history: History, window: int) -> History:
        old = max(0, len(history.exchanges) - window)
        masked = tuple(_mask(exchange) for exchange in history.exchanges[:old])
        return replace(history, exchanges=(*masked, *history.exchanges[old:]))


@dataclass(frozen=True, slots=True)
class ForgetHalf:
    """Forgets the older half behind the `first` exchanges, again and again while the target is not met.

    Amortised: an exchange is forgotten once, and a history of n tokens is rewritten about log n times.
    """

    first: int = 1

    async def condense(self, history: History, room: Room) -> History:
        """See the class."""
        count = len(history.exchanges)
        keep = count - self.first
        return room.first_fit(
            history.dropping(self.first, max(self.first, count - last)) for last in _halves(keep // 2)
        )


@dataclass(frozen=True, slots=True)
class Summarise:
    """Puts a summary, written by the model itself, in the place of all but the `last` exchanges.

    Summaries are context: they are not trained on. An empty one means no progress.
    """

    last: int = 4

    async def condense(self, history: History, room: Room) -> History:
        """See the class."""
        shortened = room.first_fit(
            history.dropping(0, max(0, len(history.exchanges) - last)) for last in _halves(self.last)
        )
        gone = history.exchanges[: len(history.exchanges) - len(shortened.exchanges)]
        if not gone:
            return history
        summary = (await room.ask(ASK, _as_text(history.note, gone))).strip()
        if not summary:
            return history
        return replace(shortened, note=SUMMARY.format(turns=shortened.forgotten, summary=summary))


CONDENSERS: tuple[tuple[str, Condenser | None], ...] = (
    ("none", None),
    ("keep_first_last", KeepFirstLast()),
    ("mask_observations", MaskObservations()),
    ("forget_half", ForgetHalf()),
    ("summarise", Summarise()),
)


def condenser(name: str | Condenser | None) -> Condenser | None:
    """The condenser of that name, the one at `package.module:Name`, or `name` itself. ConfigError otherwise."""
    if isinstance(name, str):
        for known, found in CONDENSERS:
            if known == name:
                return found
        if ":" not in name:
            known_names = ", ".join(known for known, _ in CONDENSERS)
            raise ConfigError(f"condenser: unknown name {name!r}; choose {known_names} or package.module:Name")
        name = load("condenser", name)
    if name is not None and not isinstance(name, Condenser):
        raise ConfigError(f"condenser: {name!r} has no method condense")
    return name


def _halves(count: int) -> list[int]:
    """`count`, half of it, and so on down to 1."""
    counts = [max(1, count)]
    while counts[-1] > 1:
        counts.append(counts[-1] // 2)
    return counts


def _mask(exchange: Exchange) -> Exchange:
    results = tuple((OMITTED if len(text) > len(OMITTED) else text, call) for text, call in exchange.results)
    return exchange if results == exchange.results else replace(exchange, results=results, delta_ids=())


def _as_text(note: str, exchanges: Sequence[Exchange]) -> str:
    parts = [note] if note else []
    for exchange in exchanges:
        calls = "".join(f"\n{call.name} {call.arguments}" for call in exchange.calls)
        parts.append(f"ANSWER:\n{exchange.text}{calls}")
        parts += [f"RESULT:\n{text}" for text, _ in exchange.results]
    return "\n\n".join(parts)
