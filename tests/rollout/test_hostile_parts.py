"""Engines, renderers, environments and rewards that break their contracts: each costs its own trajectory, no other one.

Every sample comes back, those of the well-behaved task with their reward, those of the other with a typed failure.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio
import numpy as np
import pytest

from skyenv import formats
from skyenv.core import Beginning, Task
from skyenv.engines.scripted import ScriptedEngine
from skyenv.errors import ConfigError, EnvError, SandboxUnavailable, boundary
from skyenv.renderer import ByteTokenizer, Renderer
from skyenv.rollout import RolloutOptions
from skyenv.types import Completion, Limits, Message, SamplingParams, Step, StopReason, ToolCall, ToolSpec, Trajectory
from skyenv.vector.pipeline import RolloutPipeline
from skyenv.vector.stopping import FailureThreshold
from tests.rollout.adventure import RENDERER, WIN, Adventure, Ledger, Plan, Quest, virtual
from tests.rollout.camp import Camp, Camper, Sharing

BAD = "q1"


async def roll_out(ledger: Ledger, make_env: Callable[[], Adventure] | None = None, **options: Any) -> list[Trajectory]:
    options.setdefault("engine", ScriptedEngine(RENDERER, WIN))
    options.setdefault("renderer", RENDERER)
    pipeline = RolloutPipeline(
        make_env=make_env or (lambda: Adventure(ledger)), failures=FailureThreshold(share=1.0), **options
    )
    return [trajectory async for trajectory in pipeline.run([Quest("q0"), Quest(BAD), Quest("q2")], 2)]


def check(found: Sequence[Trajectory], stage: str, kind: str, message: str) -> None:
    """All are back; what is bad about the bad ones is said, and the others won."""
    assert sorted((t.group_id, t.sample_index) for t in found) == [(g, s) for g in range(3) for s in range(2)]
    for trajectory in found:
        if trajectory.task_id != BAD:
            assert (trajectory.reward, trajectory.failure) == (1.0, None)
            continue
        assert trajectory.reward is None
        assert trajectory.failure is not None
        assert (trajectory.failure.stage, trajectory.failure.kind) == (stage, kind)
        assert message in trajectory.failure.message


class Answering:
    """A scripted engine that answers the requests of the bad task with something of its own."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        self._engine, self._answer = ScriptedEngine(RENDERER, WIN), answer

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        messages: Sequence[Message] = (),
        session_id: str = "",
    ) -> Completion:
        if session_id.startswith(BAD):
            answer: Completion = self._answer()
            return answer
        return await self._engine.generate(prompt_ids, sampling, messages=messages, session_id=session_id)


def sampled(*ids: Any, logprob: Any = -0.1) -> Callable[[], Completion]:
    return lambda: Completion("x", ids, (logprob,) * len(ids))


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*args: Any, **options: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (raising(KeyError("choices")), "KeyError"),
        (raising(ExceptionGroup("several", [ValueError("a")])), "ValueError('a')"),
        (lambda: None, "NoneType"),
        (sampled(*[1] * 9999), "9999 tokens"),
        (sampled(65, logprob=math.nan), "no log probability"),
        (sampled(65, logprob=-math.inf), "no log probability"),
        (sampled(65, logprob=None), "NoneType"),
        (lambda: Completion("x", (65, 66), (-0.1,)), "2 token ids but 1 logprobs"),
        (sampled("a"), "no token ids"),
        (sampled(65.0), "no token ids"),
        (sampled(-5), "no token ids"),
        (sampled(1 << 40), "no token ids"),
        (sampled(1000), "decoded"),
    ],
)
def test_an_engine_that_answers_nonsense(answer: Callable[[], Any], message: str) -> None:
    ledger = Ledger()
    found = virtual(lambda: roll_out(ledger, engine=Answering(answer)))
    check(found, "run", "EngineError", message)
    assert (ledger.live, ledger.made) == (0, 4 + 2 * 2)


class Breaking(Renderer):
    """Raises in one of its methods where the bad task is spoken of."""

    def __init__(self, method: str) -> None:
        self._method = ""
        super().__init__(ByteTokenizer(), formats.get("codeact"))
        self._method = method

    def _break(self, method: str, text: str) -> None:
        if method == self._method and BAD in text:
            raise KeyError("template")

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        self._break("prompt", "".join(message.content for message in messages))
        return super().prompt(messages, tools)

    def observations(self, results: Any, *, completion_ids: Sequence[int]) -> list[int]:
        self._break("observations", "".join(text for text, _ in results))
        return super().observations(results, completion_ids=completion_ids)


class Odd(Adventure):
    """Tells its task in every observation, and breaks one promise in the bad one."""

    def __init__(self, ledger: Ledger, broken: str = "", value: Any = None) -> None:
        super().__init__(ledger)
        self._broken, self._value = broken, value

    def _breaks(self, promise: str) -> bool:
        return promise == self._broken and self._quest is not None and self._quest.task_id == BAD

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        if self._breaks("tools"):
            raise ValueError("no tools")
        return super().tools

    async def astep(self, action: ToolCall | Mapping[str, Any]) -> Step:
        step = await super().astep(action)
        assert self._quest is not None
        if self._breaks("astep"):
            broken: Step = self._value
            return broken
        return step._replace(observation=f"{self._quest.task_id}: {step.observation}")


@pytest.mark.parametrize("method", ["prompt", "observations"])
def test_a_renderer_that_raises(method: str) -> None:
    ledger = Ledger()
    found = virtual(lambda: roll_out(ledger, lambda: Odd(ledger), renderer=Breaking(method)))
    check(found, "run", "EnvError", "KeyError: 'template'")


@pytest.mark.parametrize(
    ("promise", "value", "message"),
    [
        ("tools", None, "no tools"),
        ("astep", None, "NoneType"),
        ("astep", Step(None, 0.0, False, False, {}), "NoneType"),  # type: ignore[arg-type]
        ("astep", Step("x", 0.0, False, False, None), "NoneType"),  # type: ignore[arg-type]
        ("astep", Step("x", "much", False, False, {}), "could not convert"),  # type: ignore[arg-type]
    ],
)
def test_an_environment_that_answers_nonsense(promise: str, value: Any, message: str) -> None:
    ledger = Ledger()
    found = virtual(lambda: roll_out(ledger, lambda: Odd(ledger, promise, value)))
    check(found, "run", "EnvError", message)


class Program(Odd):
    """Plays itself, and dies of a bug in the bad task."""

    async def aplay(self, engine: Any, renderer: Any, trajectory: Trajectory, limits: Any, sampling: Any) -> StopReason:
        assert self._quest is not None
        if self._quest.task_id == BAD:
            raise KeyError("agent")
        self._found = True
        return StopReason.FINISH


class Unprepared(Odd):
    """Raises when it is told how its siblings begin."""

    def begin_with(self, beginning: Beginning) -> None:
        raise KeyError("beginning")


def test_an_agent_program_that_raises() -> None:
    ledger = Ledger()
    check(virtual(lambda: roll_out(ledger, lambda: Program(ledger))), "run", "EnvError", "KeyError: 'agent'")
    assert ledger.live == 0


def test_an_environment_that_cannot_be_told_its_beginning() -> None:
    ledger = Ledger()
    found = virtual(lambda: roll_out(ledger, lambda: Unprepared(ledger)))
    assert len(found) == 6
    assert {t.failure.kind if t.failure else "" for t in found} == {"EnvError"}
    assert ledger.closed == ledger.made == 6


@pytest.mark.parametrize("close", [{"close_error": OSError("no")}, {"close": 1e9}])
def test_a_prefetch_whose_environment_does_not_close(close: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    camp = Camp()

    class Held(Camper):
        async def aprefetch(self, tasks: Sequence[Task | str], count: int) -> None:
            await self.areset()

    async def main() -> None:
        plan = Plan(**close)
        make_env = lambda: Held(camp, lambda task_id: plan, Sharing(prepare=0.0))  # noqa: E731
        with anyio.fail_after(100):
            await RolloutPipeline(engine=ScriptedEngine(RENDERER, WIN), make_env=make_env).prefetch(["q0"])

    virtual(main)
    assert "not closed" in caplog.text


@pytest.mark.parametrize("value", [math.nan, math.inf, "much", True])
def test_a_reward_that_is_no_number(value: Any) -> None:
    found = virtual(lambda: roll_out(Ledger(), reward=lambda t: value if t.task_id == BAD else 1.0))
    check(found, "eval", "RewardError", "not a finite number")


@pytest.mark.parametrize("value", [1, np.float32(1.0), np.int64(1)])
def test_a_reward_of_any_kind_of_number(value: Any) -> None:
    found = virtual(lambda: roll_out(Ledger(), reward=lambda t: value))
    assert [(t.reward, type(t.reward)) for t in found] == [(1.0, float)] * 6


@pytest.mark.parametrize("asked", [math.nan, math.inf, -5.0])
def test_a_server_that_asks_for_odd_pauses(asked: float) -> None:
    plan = lambda task_id: Plan(init_error=SandboxUnavailable("full", asked) if task_id == BAD else None)  # noqa: E731

    async def main() -> list[Trajectory]:
        with anyio.fail_after(100):
            ledger = Ledger()
            return await roll_out(ledger, lambda: Adventure(ledger, plan))

    check(virtual(main), "init", "SandboxUnavailable", "full")


# Cancellations that nobody asked for: a library's own future was cancelled


async def lost(*args: Any, **options: Any) -> Any:
    """Wait for a future that somebody else cancels."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.cancel()
    await future


class Lost(Adventure):
    """Has one of its phases cancelled from within in the bad task."""

    def __init__(self, ledger: Ledger, phase: str) -> None:
        super().__init__(ledger)
        self._phase = phase

    async def areset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> Any:
        answer = await super().areset(seed=seed, options=options)
        await self._lost("init")
        return answer

    async def astep(self, action: ToolCall | Mapping[str, Any]) -> Step:
        await self._lost("run")
        return await super().astep(action)

    async def aevaluate(self) -> tuple[float | None, dict[str, Any]]:
        await self._lost("eval")
        return await super().aevaluate()

    async def aclose(self) -> None:
        await super().aclose()
        await self._lost("close")

    async def _lost(self, phase: str) -> None:
        if phase == self._phase and self._quest is not None and self._quest.task_id == BAD:
            await lost()


@pytest.mark.parametrize(("phase", "kind"), [("init", "EnvError"), ("run", "EnvError"), ("eval", "RewardError")])
async def test_an_environment_whose_own_future_is_cancelled(phase: str, kind: str) -> None:
    ledger = Ledger()
    check(await roll_out(ledger, lambda: Lost(ledger, phase)), phase, kind, "cancelled from within")
    assert ledger.live == 0


async def test_a_closing_whose_own_future_is_cancelled() -> None:
    ledger = Ledger()
    found = await roll_out(ledger, lambda: Lost(ledger, "close"))
    assert len(found) == 6
    assert all(t.reward == 1.0 for t in found)
    assert {t.task_id for t in found if "close_errors" in t.counters} == {BAD}


async def test_an_engine_whose_own_future_is_cancelled() -> None:
    class Forgetting(ScriptedEngine):
        async def generate(self, *args: Any, session_id: str = "", **options: Any) -> Completion:
            if session_id.startswith(BAD):
                await lost()
            return await super().generate(*args, session_id=session_id, **options)

    ledger = Ledger()
    check(await roll_out(ledger, engine=Forgetting(RENDERER, WIN)), "run", "EngineError", "cancelled from within")


async def test_a_cancellation_that_was_asked_for_passes_a_boundary() -> None:
    async def wait(outcome: list[str]) -> None:
        try:
            with boundary(EnvError, "waiting"):
                await anyio.sleep_forever()
        except asyncio.CancelledError:
            outcome.append("cancelled")
            raise

    by_scope, by_task, by_deadline = list[str](), list[str](), list[str]()
    async with anyio.create_task_group() as group:
        group.start_soon(wait, by_scope)
        await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    task = asyncio.create_task(wait(by_task))
    await anyio.lowlevel.checkpoint()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with anyio.move_on_after(0.01):
        await wait(by_deadline)
    assert by_scope == by_task == by_deadline == ["cancelled"]


@pytest.mark.parametrize(
    "name", [name for name in Limits.__dataclass_fields__ if name.endswith("timeout") or name == "wall_clock"]
)
@pytest.mark.parametrize("value", [math.nan, -1.0])
def test_deadlines_that_are_none(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"limits.{name}"):
        RolloutOptions(Limits(**{name: value}))
