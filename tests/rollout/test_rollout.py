"""The turn loop: exact ids, budgets, mistakes of the policy, failures of everything else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import anyio
import pytest

from skyenv.core import Engine
from skyenv.engines.scripted import ScriptedEngine
from skyenv.errors import ConfigError, EngineError, EnvError, SandboxError, SandboxLost
from skyenv.rollout import FIRST_ONLY, NUDGE, RolloutOptions, TurnRules, rollout
from skyenv.stuck import SKYRL
from skyenv.types import Completion, Limits, Message, SamplingParams, StopReason, Trajectory
from tests.rollout.adventure import DIG, END, RENDERER, WIN, Adventure, Plan, Quest, go, say, virtual


async def play(
    script: Any,
    limits: Limits | None = None,
    rules: TurnRules | None = None,
    plan: Plan | None = None,
    *,
    engine: Engine | None = None,
    sampling: SamplingParams | None = None,
) -> Trajectory:
    """One episode of the adventure; checks what must hold for every trajectory."""
    options = RolloutOptions(limits or Limits(), sampling or SamplingParams(), rules or TurnRules())
    trajectory = Trajectory("cave")
    async with Adventure(plan=lambda task_id: plan or Plan()) as env:
        await env.areset(options={"task": Quest("cave")})
        await rollout(env, engine or ScriptedEngine(RENDERER, script), RENDERER, trajectory, options)
    for segment in trajectory.segments:
        segment.check()
        assert len(segment.token_ids) <= options.limits.max_context
        assert not segment.loss_mask or segment.loss_mask[-1] == 1 or not trajectory.exact
    return trajectory


async def test_ids_are_the_prompt_then_answers_and_observations_in_turn() -> None:
    engine = Recorder(ScriptedEngine(RENDERER, WIN, logprob=-0.5, policy_version=7))
    trajectory = await play(WIN, engine=engine)
    assert trajectory.stop_reason is StopReason.FINISH
    (segment,) = trajectory.segments
    async with Adventure() as env:
        await env.areset(options={"task": "cave"})
        ids = list(RENDERER.prompt(env.prompt, env.tools))
        prompt_length = len(ids)
    for number, (prompt, completion) in enumerate(engine.seen):
        assert prompt == tuple(ids), f"the prompt of turn {number} is not what the segment holds"
        ids += completion.token_ids
        if number < 2:
            turn = trajectory.turns[number]
            ids += RENDERER.observation(turn.observation, turn.calls[0], completion_ids=completion.token_ids)
    assert segment.token_ids == ids
    assert segment.prompt_length == prompt_length
    sampled = [token for _, completion in engine.seen for token in completion.token_ids]
    assert [t for t, m in zip(segment.token_ids, segment.loss_mask, strict=True) if m] == sampled
    assert {lp for lp, m in zip(segment.logprobs, segment.loss_mask, strict=True) if m} == {-0.5}
    assert {lp for lp, m in zip(segment.logprobs, segment.loss_mask, strict=True) if not m} == {0.0}
    assert trajectory.exact
    assert RENDERER.drift(trajectory) == 0
    assert [turn.policy_version for turn in trajectory.turns] == [7, 7, 7]
    assert [turn.observation for turn in trajectory.turns][1] == "You found the treasure!"
    assert trajectory.prompt_hash


class Recorder:
    """An engine that remembers what it was asked."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.seen: list[tuple[tuple[int, ...], Completion]] = []
        self.sampling: list[SamplingParams] = []
        self.messages: list[tuple[Message, ...]] = []

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        messages: Sequence[Message] = (),
        session_id: str = "",
    ) -> Completion:
        completion = await self._engine.generate(prompt_ids, sampling, messages=messages, session_id=session_id)
        self.seen.append((tuple(prompt_ids), completion))
        self.sampling.append(sampling)
        self.messages.append(tuple(messages))
        return completion


class Answers:
    """An engine that gives the same completion forever."""

    def __init__(self, completion: Completion) -> None:
        self.completion = completion

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        messages: Sequence[Message] = (),
        session_id: str = "",
    ) -> Completion:
        return self.completion


async def test_max_turns() -> None:
    trajectory = await play([say(go(n)) for n in range(9)], Limits(max_turns=3))
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.MAX_TURNS, 3)


async def test_the_context_budget_reserves_a_whole_answer() -> None:
    full = await play([say(go(n)) for n in range(9)] + [say(END)])
    used = len(full.segments[0].token_ids)
    limits = Limits(max_context=used - 40, max_tokens_per_turn=200)
    trajectory = await play([say(go(n)) for n in range(9)] + [say(END)], limits)
    assert trajectory.stop_reason is StopReason.CONTEXT
    assert 1 <= len(trajectory.turns) < 9
    assert trajectory.segments[0].token_ids == full.segments[0].token_ids[: len(trajectory.segments[0].token_ids)]


async def test_a_prompt_that_does_not_fit_ends_before_the_first_turn() -> None:
    trajectory = await play(WIN, Limits(max_context=60, max_tokens_per_turn=50))
    assert (trajectory.stop_reason, trajectory.turns) == (StopReason.CONTEXT, [])
    assert not trajectory.trainable


async def test_an_answer_that_is_cut_off_is_told_so_and_may_go_on() -> None:
    trajectory = await play(["x" * 500, say(END)], Limits(max_tokens_per_turn=100))
    assert trajectory.stop_reason is StopReason.FINISH
    assert "cut off" in trajectory.turns[0].observation
    assert trajectory.turns[0].finish_reason == "length"
    assert trajectory.counters["cut_off"] == 1


async def test_cut_off_without_room_for_another_answer_is_max_tokens() -> None:
    first = await play(["x" * 500, say(END)], Limits(max_tokens_per_turn=100))
    prompt = first.segments[0].prompt_length
    trajectory = await play(["x" * 500], Limits(max_tokens_per_turn=100, max_context=prompt + 150))
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.MAX_TOKENS, 1)
    assert trajectory.sampled_tokens == 100


def test_the_agents_clock() -> None:
    async def main() -> Trajectory:
        return await play([say(go(n)) for n in range(99)], Limits(wall_clock=35.0), plan=Plan(step=10.0))

    trajectory = virtual(main)
    assert trajectory.stop_reason is StopReason.WALL_CLOCK
    assert [turn.step_seconds for turn in trajectory.turns] == [10.0, 10.0, 10.0, 0.0]
    assert trajectory.turns[-1].calls == (go(3),)
    assert trajectory.trainable is False  # no reward yet
    assert trajectory.sampled_tokens > 0


def test_a_turn_that_hangs_is_infrastructures_fault() -> None:
    async def tool() -> None:
        with pytest.raises(SandboxError, match="go did not return within 60 s"):
            await play([say(go(1))], Limits(turn_timeout=60.0), plan=Plan(step=1e6))

    async def engine() -> None:
        slow = ScriptedEngine(RENDERER, WIN, latency=1e6)
        with pytest.raises(EngineError, match="no completion within 60 s"):
            await play([], Limits(turn_timeout=60.0), engine=slow)

    virtual(tool)
    virtual(engine)


async def test_s11_prose_is_nudged_and_the_third_in_a_row_ends() -> None:
    trajectory = await play(["hm", "so", "well", say(END)])
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.NO_TOOL_CALL, 3)
    assert [turn.observation for turn in trajectory.turns] == [NUDGE, NUDGE, ""]


async def test_a_call_between_prose_starts_the_count_anew() -> None:
    trajectory = await play(["hm", "so", say(go(1)), "hm", "so", say(END)])
    assert trajectory.stop_reason is StopReason.FINISH
    assert trajectory.counters["nudges"] == 4


async def test_a_malformed_call_is_an_observation() -> None:
    broken = say(go(1)).replace("go", "fly", 1)
    trajectory = await play([broken, say(END)])
    assert trajectory.stop_reason is StopReason.FINISH
    assert trajectory.turns[0].error == trajectory.turns[0].observation != ""
    assert trajectory.counters["parse_errors"] == 1


async def test_the_same_malformed_call_three_times_is_stuck_whatever_the_thoughts() -> None:
    broken = say(go(1)).replace("go", "fly", 1)
    trajectory = await play([f"thought {n}\n{broken}" for n in range(5)])
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.STUCK, 3)


async def test_stuck_with_other_thoughts_and_the_skyrl_preset() -> None:
    texts = [say(go(2), thought=f"thought {n}") for n in range(9)]
    trajectory = await play(texts)
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.STUCK, 4)
    trajectory = await play(texts, rules=TurnRules(stuck=SKYRL))
    assert len(trajectory.turns) == 3
    trajectory = await play([*texts, say(END)], rules=TurnRules(stuck=None))
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.FINISH, 10)


async def test_the_environment_says_what_failed() -> None:
    trajectory = await play([say(DIG)] * 9)
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.STUCK, 3)


async def test_a_warning_before_the_end() -> None:
    trajectory = await play([say(go(2))] * 9, rules=TurnRules(warn_stuck=True))
    assert (trajectory.stop_reason, len(trajectory.turns)) == (StopReason.STUCK, 8)
    assert "You repeat yourself: the same call with the same result 4 times" in trajectory.turns[3].observation


async def test_several_calls_in_one_turn() -> None:
    renderer = RENDERER
    text = say(go(3), DIG)
    parsed = renderer.format.parse(text, Adventure().tools, finish_reason="stop", thinking_open=False)
    if parsed.error is not None:  # this format allows one call a turn, and says so to the policy
        trajectory = await play([text, say(END)])
        assert trajectory.turns[0].error == parsed.error
        return
    first = await play([text, say(END)])
    assert first.turns[0].observation == "You stand in room 3.\n" + FIRST_ONLY.format(calls=2)
    assert first.counters["dropped_calls"] == 1
    both = await play([text, say(END)], rules=TurnRules(all_calls=True))
    assert "You stand in room 3." in both.turns[0].observation
    assert "You found the treasure!" in both.turns[0].observation


async def test_reminders_stand_inside_the_observation() -> None:
    trajectory = await play([say(go(n)) for n in range(9)], Limits(max_turns=4), TurnRules(remind_turns=2))
    told = ["turns left" in turn.observation for turn in trajectory.turns]
    assert told == [False, True, True, False]
    assert "[1 turns left" in trajectory.turns[2].observation


async def test_a_bug_of_a_tool_is_an_env_error() -> None:
    with pytest.raises(EnvError, match=r"astep\(go\): ZeroDivisionError: x"):
        await play([say(go(1))], plan=Plan(step_error=ZeroDivisionError("x")))
    group = ExceptionGroup("g", [OSError(), ExceptionGroup("h", [SandboxLost("gone")])])
    with pytest.raises(SandboxLost, match="gone"):
        await play([say(go(1))], plan=Plan(step_error=group))


@pytest.mark.parametrize(
    ("completion", "message"),
    [
        (Completion("", (1,) * 101, (-0.1,) * 101), "101 tokens for max_tokens 100"),
        (Completion("", (1,), (float("nan"),)), "no log probability"),
        (Completion("", (1,), (0.5,)), "no log probability"),
        (Completion("", (1,), (-0.5,), "abort"), "aborted"),
    ],
)
async def test_nonsense_of_an_engine_is_an_engine_error(completion: Completion, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        await play([], Limits(max_tokens_per_turn=100), engine=Answers(completion))


async def test_text_without_ids_is_played_but_not_exact() -> None:
    trajectory = await play([], engine=Answers(Completion(say(END))))
    assert trajectory.stop_reason is StopReason.FINISH
    assert not trajectory.exact
    assert trajectory.sampled_tokens == 0
    assert trajectory.counters["text_tokens"] > 0
    assert RENDERER.decode(trajectory.segments[0].token_ids).endswith(say(END))


async def test_seeds_differ_between_turns_and_siblings_and_repeat_between_runs() -> None:
    async def seeds(sample_index: int) -> list[int | None]:
        engine = Recorder(ScriptedEngine(RENDERER, WIN))
        async with Adventure() as env:
            await env.areset()
            trajectory = Trajectory("cave", sample_index=sample_index)
            options = RolloutOptions(sampling=SamplingParams(seed=5))
            await rollout(env, engine, RENDERER, trajectory, options)
        return [sampling.seed for sampling in engine.sampling]

    assert await seeds(0) == await seeds(0)
    assert len({*await seeds(0), *await seeds(1)}) == 6


async def test_sampling_and_messages_reach_the_engine() -> None:
    engine = Recorder(ScriptedEngine(RENDERER, WIN))
    sampling = SamplingParams(temperature=0.7, top_p=0.9, top_k=5, max_tokens=300)
    await play(WIN, engine=engine, sampling=sampling)
    wanted = replace(sampling, stop_token_ids=tuple(RENDERER.stop_token_ids))
    assert engine.sampling == [wanted] * 3
    result = RENDERER.format.observation("You found the treasure!", DIG)
    assert engine.messages[2][-2:] == (Message("assistant", WIN[1]), result)
    assert "dig" in engine.messages[0][0].content, "servers that take text must be told of the tools too"


async def test_cancellation_keeps_what_was_played() -> None:
    trajectory = Trajectory("cave")
    async with Adventure(plan=lambda task_id: Plan(step=0.0)) as env:
        await env.areset()
        with anyio.CancelScope() as scope:

            def script(messages: Sequence[Message]) -> str:
                if len(messages) > 4:
                    scope.cancel()
                return say(go(len(messages)))

            await rollout(env, ScriptedEngine(RENDERER, script), RENDERER, trajectory, RolloutOptions())
    assert scope.cancelled_caught
    assert len(trajectory.turns) == 3
    assert trajectory.stop_reason is None


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (Limits(max_tokens_per_turn=0), "max_tokens"),
        (Limits(max_context=100, max_tokens_per_turn=100), "limits.max_context"),
        (Limits(max_turns=0), "max_turns"),
    ],
)
def test_budgets_that_cannot_work(limits: Limits, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RolloutOptions(limits)
