"""What every inference engine must do, checked through its public interface."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import anyio

from skyenv.core import Engine
from skyenv.errors import EngineError, SkyEnvError, boundary
from skyenv.renderer import Renderer
from skyenv.types import Completion, Message, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
TIMEOUT = 120.0


async def check_engine(engine: Engine, renderer: Renderer, *, vocab_size: int | None = None) -> list[str]:
    """Check an open engine against the tokenizer that `renderer` uses; returns the names of the rules checked.

    Raises an ExceptionGroup of AssertionErrors, one a broken rule. `vocab_size` bounds the ids. Greedy sampling must
    be deterministic when nothing else runs; the weights do not matter. Each rule gets `TIMEOUT` seconds.
    """
    suite = _Suite(engine, renderer, vocab_size)
    rules = (
        suite.ids_and_logprobs,
        suite.greedy_is_deterministic,
        suite.max_tokens_bounds,
        suite.stop_ids_end_the_answer,
        suite.concurrent_calls_do_not_mix,
        suite.cancelling_leaves_it_usable,
    )
    broken = [error for rule in rules if (error := await _broken(rule)) is not None]
    if broken:
        raise ExceptionGroup(f"{len(broken)} of {len(rules)} rules are broken", broken)
    return [rule.__name__ for rule in rules]


async def _broken(rule: Callable[[], Awaitable[None]]) -> AssertionError | None:
    """What a rule complains of, an engine that raises included."""
    name = rule.__name__
    try:
        with anyio.CancelScope(deadline=anyio.current_time() + TIMEOUT), boundary(EngineError, "the engine raised"):
            try:
                await rule()
            except AssertionError as error:
                return AssertionError(f"{name}: {error}")
            return None
    except SkyEnvError as error:
        return AssertionError(f"{name}: {type(error).__name__}: {error}")
    return AssertionError(f"{name}: no end within {TIMEOUT:g} s")


@dataclass(frozen=True, slots=True)
class _Suite:
    engine: Engine
    renderer: Renderer
    vocab_size: int | None

    async def ask(self, number: int, sampling: SamplingParams = GREEDY) -> Completion:
        messages = (Message("user", f"Count from {number}."),)
        stops = sampling.stop_token_ids or tuple(self.renderer.stop_token_ids)
        ids = self.renderer.prompt(messages, ())
        return await self.engine.generate(
            ids, replace(sampling, stop_token_ids=stops), messages=messages, session_id=f"check#{number}"
        )

    async def ids_and_logprobs(self) -> None:
        """Sampled ids with one finite log probability each, in the vocabulary."""
        for temperature in (0.0, 1.0):
            answer = await self.ask(1, replace(GREEDY, temperature=temperature))
            assert answer.token_ids, "no token ids came back"
            assert len(answer.token_ids) == len(answer.logprobs), "lengths differ"
            assert all(math.isfinite(value) and value <= 1e-4 for value in answer.logprobs), (
                f"not log probabilities: {answer.logprobs}"
            )
            bound = self.vocab_size or math.inf
            assert all(0 <= token < bound for token in answer.token_ids), (
                f"ids outside [0, {bound}): {answer.token_ids}"
            )

    async def greedy_is_deterministic(self) -> None:
        """Temperature 0 gives the same ids again."""
        first, second = await self.ask(1), await self.ask(1)
        assert first.token_ids == second.token_ids, "two answers differ"

    async def max_tokens_bounds(self) -> None:
        """Never more than asked for, and `length` exactly when the budget ended the answer."""
        full = await self.ask(1)
        cut = await self.ask(1, replace(GREEDY, max_tokens=1))
        assert cut.token_ids == full.token_ids[:1], "one token is not the first of many"
        stopped = cut.token_ids[-1] in self.renderer.stop_token_ids
        assert cut.finish_reason == ("stop" if stopped else "length"), (
            f"finish reason {cut.finish_reason!r} for one token"
        )

    async def stop_ids_end_the_answer(self) -> None:
        """An answer ends with the first stop id, which is part of it."""
        full = await self.ask(1)
        stop = full.token_ids[len(full.token_ids) // 2]
        answer = await self.ask(1, replace(GREEDY, stop_token_ids=(stop,)))
        wanted: Sequence[int] = full.token_ids[: full.token_ids.index(stop) + 1]
        assert answer.token_ids == tuple(wanted), (
            f"{answer.token_ids} does not end at the first {stop} of {full.token_ids}"
        )
        assert answer.finish_reason == "stop", f"finish reason {answer.finish_reason!r}"

    async def concurrent_calls_do_not_mix(self) -> None:
        """Sixteen at once: each answer is nearer to what its prompt gives alone than to what another's gives.

        Equality would be too much: kernels round differently in batches of another size.
        """
        alone = {number: (await self.ask(number)).token_ids for number in range(4)}
        together: dict[int, tuple[int, ...]] = {}

        async def one(place: int) -> None:
            together[place] = (await self.ask(place % 4)).token_ids

        async with anyio.create_task_group() as group:
            for place in range(16):
                group.start_soon(one, place)
        wrong = [
            place
            for place, ids in together.items()
            if _agreement(ids, alone[place % 4]) < max(_agreement(ids, other) for other in alone.values())
        ]
        assert not wrong, f"calls {wrong} got another's answer"

    async def cancelling_leaves_it_usable(self) -> None:
        """A cancelled call returns at once and the next one is answered as ever."""
        before = await self.ask(1)
        for delay in (0.0, 0.01, 0.05):
            with anyio.move_on_after(delay):
                await self.ask(2, replace(GREEDY, max_tokens=512))
        after = await self.ask(1)
        assert before.token_ids == after.token_ids, "the answer changed"


def _agreement(left: Sequence[int], right: Sequence[int]) -> int:
    """How many ids two answers have in common at their beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))
