"""Long memory: condensers, segments when history is rewritten, thinking kept or stripped, native tool calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyenv import formats
from skyenv.engines.openai import OpenAIEngine
from skyenv.errors import ConfigError, EnvError
from skyenv.history import (
    CONDENSERS,
    Condenser,
    Exchange,
    ForgetHalf,
    History,
    KeepFirstLast,
    MaskObservations,
    Room,
    Summarise,
    condenser,
)
from skyenv.renderer import ByteTokenizer, Renderer
from skyenv.rollout import RolloutOptions, TurnRules, rollout
from skyenv.stuck import StuckRule
from skyenv.types import Completion, Limits, Message, SamplingParams, StopReason, ToolCall, Trajectory
from tests.rollout.adventure import END, RENDERER, Adventure, Quest, go, say

STRIP = Renderer(ByteTokenizer(), formats.get("codeact"), history="strip")


@dataclass
class Walker:
    """An engine that walks from room to room, whatever it is shown, and writes summaries when asked."""

    renderer: Renderer = RENDERER
    turns: int = 100
    thought: str = ""
    rooms: int = 1000
    summary: str = "I walked."
    asked: list[tuple[int, ...]] = field(default_factory=list)
    shown: list[tuple[Message, ...]] = field(default_factory=list)
    summaries: int = 0

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        messages: Sequence[Message] = (),
        session_id: str = "",
    ) -> Completion:
        if messages[0].content.startswith("Below is what was done"):
            self.summaries += 1
            text = self.summary
        else:
            self.asked.append(tuple(prompt_ids))
            self.shown.append(tuple(messages))
            turn = len(self.asked)
            text = self.thought + say(go(turn % self.rooms) if turn <= self.turns else END)
        ids = (*self.renderer.encode(text), self.renderer.end_of_turn)
        return Completion(text, ids, (-0.5,) * len(ids))


LIMITS = Limits(max_context=3500, max_tokens_per_turn=300, max_turns=60)
NO_STUCK = TurnRules(stuck=None)


async def play(engine: Any, rules: TurnRules, limits: Limits = LIMITS, renderer: Renderer = RENDERER) -> Trajectory:
    """One episode; checks what must hold whatever was forgotten."""
    trajectory = Trajectory("cave")
    async with Adventure() as env:
        await env.areset(options={"task": Quest("cave")})
        await rollout(env, engine, renderer, trajectory, RolloutOptions(limits, SamplingParams(), rules))
    for segment in trajectory.segments:
        segment.check()
        assert len(segment.token_ids) <= limits.max_context
        assert segment.loss_mask[-1] == 1
    assert renderer.drift(trajectory) == 0
    assert sum(sum(s.loss_mask) for s in trajectory.segments) == trajectory.sampled_tokens
    return trajectory


async def test_without_a_condenser_the_context_ends_the_episode() -> None:
    trajectory = await play(Walker(), NO_STUCK)
    assert trajectory.stop_reason is StopReason.CONTEXT
    assert len(trajectory.segments) == 1
    assert trajectory.counters["no_finish"] == 1


@pytest.mark.parametrize("thresholds", [{}, {"condense_turns": 8}, {"condense_tokens": 2500}])
@pytest.mark.parametrize("name", ["keep_first_last", "forget_half", "summarise"])
async def test_condensing_goes_on_to_the_end(name: str, thresholds: dict[str, int]) -> None:
    engine = Walker(turns=40)
    long = replace(NO_STUCK, condenser=condenser(name), **thresholds)
    trajectory = await play(engine, long)
    assert trajectory.stop_reason is StopReason.FINISH
    assert len(trajectory.turns) == 41
    assert "no_finish" not in trajectory.counters
    assert trajectory.counters["condensations"] == len(trajectory.segments) - 1 > 0
    assert trajectory.counters["tokens_saved"] > 0
    assert trajectory.counters["prefix_tokens_recomputed"] > 0
    system, task = trajectory.prompt
    prompts = [RENDERER.decode(ids) for ids in engine.asked]
    assert all(system.content in text and task.content in text for text in prompts)


async def test_each_segment_begins_with_what_is_remembered() -> None:
    engine = Walker(turns=20)
    trajectory = await play(engine, replace(NO_STUCK, condenser=KeepFirstLast(1, 3), condense_turns=6))
    first, second = trajectory.segments[:2]
    assert first.loss_mask.count(1) > 0
    prompt = RENDERER.tokenizer.decode(second.token_ids[: second.prompt_length])
    rooms = [room for room in range(1, 21) if f"You stand in room {room}.\n" in prompt.replace("<|im_end|>", "\n")]
    assert rooms == [1, 4, 5, 6]
    assert "2 earlier turns of this conversation were left out" in prompt
    for call, observation in ((r"<parameter=room>4<", "room 4."), (r"<parameter=room>1<", "room 1.")):
        assert call in prompt
        assert observation in prompt
    # What the model is shown as text is the same conversation.
    shown = engine.shown[6]
    assert [m.role for m in shown] == ["system", "user"] + ["assistant", "user"] * 4


class Reader(Adventure):
    """Every room has a long inscription."""

    async def astep(self, action: Any) -> Any:
        step = await super().astep(action)
        return step._replace(observation=step.observation + " " + "inscription " * 30)


async def long_reads(rules: TurnRules, turns: int = 12) -> tuple[Trajectory, Walker]:
    trajectory, engine = Trajectory("cave"), Walker(turns=turns)
    limits = Limits(max_context=6000, max_tokens_per_turn=200)
    async with Reader() as env:
        await env.areset(options={"task": Quest("cave")})
        await rollout(env, engine, RENDERER, trajectory, RolloutOptions(limits, SamplingParams(), rules))
    return trajectory, engine


async def test_masked_observations_keep_their_calls() -> None:
    trajectory, engine = await long_reads(replace(NO_STUCK, condenser=MaskObservations(window=2)))
    assert trajectory.stop_reason is StopReason.FINISH
    last = RENDERER.decode(engine.asked[-1])
    assert last.count("<parameter=room>") >= 12
    assert 1 <= last.count("This output was left out") < 12
    assert RENDERER.drift(trajectory) == 0


async def test_observations_are_cut_to_a_budget_of_tokens() -> None:
    trajectory, engine = await long_reads(replace(NO_STUCK, observation_tokens=60), turns=3)
    assert trajectory.counters["clipped_observations"] == 4
    observed = trajectory.turns[0].observation
    assert observed.startswith("You stand in room 1.")
    assert "tokens (" in observed
    assert observed.endswith("inscription ")
    assert len(observed) < 130
    assert observed in RENDERER.decode(engine.asked[-1])


async def test_s14_repeats_across_a_condensation_still_count() -> None:
    rules = TurnRules(
        stuck=StuckRule(same_pairs=4, same_failures=0, cycles=0), condenser=ForgetHalf(), condense_turns=3
    )
    trajectory = await play(Walker(rooms=1, thought="Nothing was found yet, so I walk on. " * 3), rules)
    assert trajectory.stop_reason is StopReason.STUCK
    assert len(trajectory.turns) == 4
    assert trajectory.counters.get("condensations") == 1, trajectory.counters


async def test_summaries_come_from_the_same_engine_and_are_not_trained() -> None:
    engine = Walker(turns=20, summary="<think>hm</think>\nRooms 1 to 5 are empty.")
    trajectory = await play(engine, replace(NO_STUCK, condenser=Summarise(last=2), condense_turns=6))
    assert trajectory.stop_reason is StopReason.FINISH
    assert engine.summaries == trajectory.counters["summaries"] > 1
    last = RENDERER.decode(engine.asked[-1])
    assert "earlier turns that were left out to save room:]\nRooms 1 to 5 are empty." in last
    assert "<think>" not in last
    assert trajectory.sampled_tokens == sum(len(RENDERER.encode(turn.text)) + 1 for turn in trajectory.turns)


@pytest.mark.parametrize("summary", ["", "  \n"])
async def test_no_summary_is_no_progress(summary: str) -> None:
    engine = Walker(turns=100, summary=summary)
    trajectory = await play(engine, replace(NO_STUCK, condenser=Summarise(last=2), condense_turns=4))
    assert trajectory.stop_reason is StopReason.CONTEXT
    assert engine.summaries == 2, "once at the threshold, once more when the context is full"
    assert trajectory.counters["condensations_without_progress"] == 2
    assert len(trajectory.segments) == 1


class Stubborn:
    """A condenser of a user's own."""

    async def condense(self, history: History, room: Room) -> History:
        return history


class Careless:
    async def condense(self, history: History, room: Room) -> History:
        return History(())


async def test_a_condenser_of_ones_own() -> None:
    own = condenser(f"{__name__}:Stubborn")
    assert isinstance(own, Stubborn)
    assert (await play(Walker(), replace(NO_STUCK, condenser=own))).stop_reason is StopReason.CONTEXT
    with pytest.raises(EnvError, match="last exchange must stay"):
        await play(Walker(), replace(NO_STUCK, condenser=Careless()))
    with pytest.raises(ConfigError, match="unknown name 'half'"):
        condenser("half")
    with pytest.raises(ConfigError, match="no method condense"):
        condenser("json:dumps")
    with pytest.raises(ConfigError, match="no condenser"):
        RolloutOptions(rules=TurnRules(condense_turns=5))
    assert condenser("none") is None


EXCHANGES = st.lists(st.integers(0, 400), min_size=1, max_size=30)


@pytest.mark.parametrize("name", [name for name, found in CONDENSERS if found])
@given(sizes=EXCHANGES, target=st.integers(0, 5000))
async def test_condensers_keep_pairs_and_the_last_exchange(name: str, sizes: list[int], target: int) -> None:
    exchanges = tuple(
        Exchange(f"call {n}", (n,), ((f"result {n} " + "x" * size, ToolCall("go", {"room": n})),))
        for n, size in enumerate(sizes)
    )

    async def ask(question: str, text: str) -> str:
        return "what happened"

    def tokens(history: History) -> int:
        return sum(len(text) for e in history.exchanges for text, _ in e.results) + len(history.note)

    found: Condenser | None = condenser(name)
    assert found is not None
    shorter = await found.condense(History(exchanges), Room(target, tokens, ask))
    assert shorter.exchanges
    assert shorter.exchanges[-1] == exchanges[-1]
    numbers = [e.answer_ids[0] for e in shorter.exchanges]
    assert numbers == sorted(set(numbers))
    for exchange in shorter.exchanges:
        (_, call), original = exchange.results[0], exchanges[exchange.answer_ids[0]]
        assert call == original.results[0][1]
        assert exchange.text == original.text
    assert shorter.forgotten == len(exchanges) - len(shorter.exchanges)
    assert len(shorter.exchanges) == len(exchanges) or str(shorter.forgotten) in shorter.note


# Thinking.


async def test_kept_thinking_stays_in_one_segment() -> None:
    engine = Walker(turns=5, thought="<think>\nLet me see.\n</think>\n\n")
    trajectory = await play(engine, NO_STUCK)
    assert len(trajectory.segments) == 1
    assert RENDERER.decode(engine.asked[-1]).count("Let me see.") == 5


async def test_stripped_thinking_makes_each_turn_a_segment() -> None:
    engine = Walker(STRIP, turns=5, thought="<think>\nLet me see.\n</think>\n\n")
    trajectory = await play(engine, NO_STUCK, renderer=STRIP)
    assert len(trajectory.segments) == len(trajectory.turns) == 6
    assert trajectory.counters["prefix_tokens_recomputed"] > 0
    for number, (segment, asked) in enumerate(zip(trajectory.segments, engine.asked, strict=True)):
        assert tuple(segment.token_ids[: segment.prompt_length]) == asked
        assert "Let me see." not in STRIP.decode(asked)
        assert STRIP.decode(segment.token_ids[segment.prompt_length :]) == trajectory.turns[number].text
        assert f"You stand in room {number}." in STRIP.decode(asked) or number == 0
    assert all("Let me see." not in message.content for message in engine.shown[-1])


async def test_stripping_nothing_needs_no_new_segment() -> None:
    trajectory = await play(Walker(STRIP, turns=5), NO_STUCK, renderer=STRIP)
    assert len(trajectory.segments) == 1


def stripped(text: str) -> str:
    return STRIP.decode(STRIP.without_thinking([*STRIP.encode(text), STRIP.end_of_turn]))


def test_what_is_stripped() -> None:
    assert stripped("<think>\na\n</think>\n\nb") == "b"
    assert stripped("a\n</think>\n\n\n b") == " b"
    assert stripped("no thinking") == "no thinking"
    assert stripped("<think>never ends") == ""
    assert stripped("<think>a</think>x<think>b</think>y") == "y"
    assert stripped("<think>a</think>\u00e9") == "\u00e9"


# Reminders.


async def test_reminders_stand_inside_observations() -> None:
    rules = replace(NO_STUCK, remind_turns=2, remind_tokens=900, remind_seconds=1e6)
    trajectory = await play(Walker(), rules, replace(LIMITS, max_turns=8, max_context=4000))
    notes = [turn.observation.count("turns left") for turn in trajectory.turns]
    assert notes == [0, 0, 0, 0, 0, 1, 1, 0]
    assert all("seconds left" in turn.observation for turn in trajectory.turns[:-1])
    full = await play(Walker(), rules)
    assert "tokens of context left" in full.turns[-2].observation
    assert "tokens of context left" not in full.turns[0].observation


# Calls beside the text.


class ChatServer:
    """A server with tool calling of its own that refuses what real ones refuse."""

    def __init__(self, answers: list[dict[str, Any]]) -> None:
        self.answers, self.bodies = answers, list[dict[str, Any]]()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.bodies.append(body)
        open_ids: set[str] = set()
        for message in body["messages"]:
            if message["role"] == "tool":
                open_ids.remove(message["tool_call_id"])
            elif open_ids:
                return httpx.Response(400, text=f"unanswered tool calls {sorted(open_ids)}")
            for call in message.get("tool_calls", ()):
                assert isinstance(json.loads(call["function"]["arguments"]), dict)
                open_ids.add(call["id"])
        if open_ids:
            return httpx.Response(400, text=f"unanswered tool calls {sorted(open_ids)}")
        return httpx.Response(200, json={"choices": [{"message": self.answers.pop(0), "finish_reason": "tool_calls"}]})


def native(*calls: tuple[str, str, Any]) -> dict[str, Any]:
    listed = [{"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in calls]
    return {"role": "assistant", "content": None, "tool_calls": listed}


async def test_p40_native_calls_over_http() -> None:
    server = ChatServer(
        [
            native(("a", "go", '{"room": 3}'), ("b", "dig", "{}")),
            native(("c", "go", "{'room': 3}"), ("c", "dig", "")),
            native(("d", "jump", "{}")),
            {"role": "assistant", "content": "I think I am done."},
            native(("e", "dig", None)),
            native(("f", "finish", {})),
        ]
    )
    renderer = Renderer(ByteTokenizer(), formats.get("openai"))
    trajectory = Trajectory("cave")
    transport = httpx.MockTransport(server)
    async with OpenAIEngine("http://x", "m", flavour="chat", transport=transport) as engine, Adventure() as env:
        await env.areset(options={"task": Quest("cave")})
        await rollout(env, engine, renderer, trajectory, RolloutOptions(Limits(max_nudges=3)))
        assert (await env.aevaluate())[0] == 1.0
    assert trajectory.stop_reason is StopReason.FINISH
    assert [turn.calls[0].name if turn.calls else None for turn in trajectory.turns] == [
        "go", None, None, None, "dig", "finish",
    ]  # fmt: skip
    assert not trajectory.trainable
    first, last = server.bodies[0], server.bodies[-1]
    assert [tool["function"]["name"] for tool in first["tools"]] == ["go", "dig", "finish"]
    assert "function" not in first["messages"][0]["content"]
    answers = {m["tool_call_id"]: m["content"] for m in last["messages"] if m["role"] == "tool"}
    assert "You stand in room 3." in answers["a"]
    assert answers["b"] == "Not run."
    assert "not valid JSON" in answers["c"]
    assert answers["call_1"] == "Not run."
    assert "no tool named" in answers["d"]
    assert any(m["role"] == "user" and "No tool call found" in m["content"] for m in last["messages"])
