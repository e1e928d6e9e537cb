"""Agents' own client libraries against the endpoint: what they get, and the ids that are kept of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cached_property
from typing import Any

import anthropic
import anyio
import httpx
import openai
import pytest
from anyio.lowlevel import checkpoint

from skyenv import formats
from skyenv.engines.scripted import ScriptedEngine
from skyenv.errors import ConfigError, EngineError
from skyenv.recorder import RecordedSession, Recorder
from skyenv.renderer import ByteTokenizer, Renderer
from skyenv.types import Completion, Limits, Message, SamplingParams, StopReason, ToolCall, Trajectory

RENDERER = Renderer(ByteTokenizer(), formats.get("hermes"))
LS = {
    "name": "ls",
    "description": "List files.",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
}
CALL = RENDERER.format.render_call(ToolCall("ls", {"path": "/é"}))
Script = Callable[[Sequence[Message]], str]


def turn(texts: Sequence[str]) -> Script:
    """The n-th text to the n-th answer of a conversation."""
    return lambda messages: texts[sum(message.role == "assistant" for message in messages)]


class Opened:
    def __init__(self, session: RecordedSession, url: str) -> None:
        self.session, self.url = session, url

    @cached_property
    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.session.key, max_retries=0)

    @cached_property
    def anthropic(self) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=self.url, api_key=self.session.key, max_retries=0)

    async def close(self) -> None:
        for client in ("openai", "anthropic"):
            if client in vars(self):
                await vars(self)[client].close()

    async def chat(self, messages: list[Any], **options: Any) -> Any:
        return await self.openai.chat.completions.create(model="m", messages=messages, **options)


@asynccontextmanager
async def opened(script: Script | Any, *, engine: Any = None, **options: Any) -> AsyncIterator[Opened]:
    recorder = Recorder(engine or ScriptedEngine(RENDERER, script), RENDERER)
    trajectory = Trajectory("task")
    async with recorder.serve() as url:
        with recorder.session(trajectory, **options) as session:
            opened = Opened(session, url)
            try:
                yield opened
            finally:
                await opened.close()
    check(trajectory)


def check(trajectory: Trajectory) -> None:
    """What holds for every recording: sampled ids once each, and they decode to what was said."""
    for segment in trajectory.segments:
        segment.check()
    assert RENDERER.drift(trajectory) == 0


def text_of(segment: Any) -> str:
    return ByteTokenizer().decode(list(segment.token_ids), skip_special_tokens=False)


def chat_tools() -> list[Any]:
    return [{"type": "function", "function": LS}]


def ask(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


USER = ask("what is there?")


async def test_a_conversation_with_tools_is_one_segment() -> None:
    async with opened(turn([f"Let me look.\n{CALL}", "Two files."])) as o:
        first = (await o.chat([USER], tools=chat_tools())).choices[0]
        assert first.finish_reason == "tool_calls"
        assert first.message.content == "Let me look."
        call = first.message.tool_calls[0]
        assert (call.function.name, json.loads(call.function.arguments)) == ("ls", {"path": "/é"})
        result = {"role": "tool", "tool_call_id": call.id, "content": "a b"}
        second = await o.chat([USER, first.message.model_dump(exclude_none=True), result], tools=chat_tools())
        assert second.choices[0].message.content == "Two files."
        assert second.choices[0].finish_reason == "stop"
        segments = o.session.trajectory.segments
    assert len(segments) == 1
    prompt = RENDERER.prompt([Message("user", USER["content"])], ())
    assert "List files." in text_of(segments[0])
    assert len(prompt) < segments[0].prompt_length
    assert o.session.trajectory.turns[0].observation == "a b"
    assert o.session.trajectory.counters["conversations"] == 1
    assert o.session.trajectory.counters.get("forks", 0) == 0


async def test_the_ids_are_those_of_our_own_loop() -> None:
    """Prompt, answer, result, answer: as the pipeline's loop would have put them together."""
    texts = [CALL, "done"]
    async with opened(turn(texts)) as o:
        first = (await o.chat([USER], tools=chat_tools())).choices[0].message
        result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "a <|im_end|> b"}
        await o.chat([USER, first.model_dump(exclude_none=True), result], tools=chat_tools())
        (segment,) = o.session.trajectory.segments
    from skyenv.recorder.chat import Chat

    request = Chat().read({"messages": [USER], "tools": chat_tools()})
    ids = RENDERER.prompt(request.messages, request.tools)
    sampled = [*RENDERER.encode(CALL), RENDERER.stop_token_ids[0]]
    ids += sampled
    ids += RENDERER.observation("a <|im_end|> b", ToolCall("ls", {}), completion_ids=sampled)
    ids += [*RENDERER.encode("done"), RENDERER.stop_token_ids[0]]
    assert segment.token_ids == ids


async def test_streams_say_the_same() -> None:
    async with opened(lambda _: f"Look:\n{CALL}") as o:
        stream = await o.chat([USER], tools=chat_tools(), stream=True)
        text, arguments, finish = "", "", None
        async for chunk in stream:
            for choice in chunk.choices:
                text += choice.delta.content or ""
                arguments += "".join(c.function.arguments for c in choice.delta.tool_calls or [])
                finish = choice.finish_reason or finish
        assert (text, json.loads(arguments), finish) == ("Look:", {"path": "/é"}, "tool_calls")


async def test_responses() -> None:
    tool = {"type": "function", **LS}
    async with opened(turn([f"Look.\n{CALL}", "Two."])) as o:
        first = await o.openai.responses.create(model="m", input="what?", instructions="Be brief.", tools=[tool])
        assert first.output_text == "Look."
        call = next(item for item in first.output if item.type == "function_call")
        history: list[Any] = [{"role": "user", "content": "what?"}]
        history += [item.model_dump(exclude_none=True) for item in first.output]
        history.append({"type": "function_call_output", "call_id": call.call_id, "output": "a b"})
        options = {"model": "m", "instructions": "Be brief.", "tools": [tool]}
        async with o.openai.responses.stream(input=history, **options) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert final.output_text == "Two."
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.completed"
        assert len(o.session.trajectory.segments) == 1
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await o.openai.responses.create(model="m", input="and?", previous_response_id="x")


async def test_anthropic_messages() -> None:
    tool = {"name": "ls", "description": "List files.", "input_schema": LS["parameters"]}
    options: dict[str, Any] = {"model": "m", "max_tokens": 200, "system": "Be brief.", "tools": [tool]}
    async with opened(turn([f"Look.\n{CALL}", "Two."])) as o:
        history: list[Any] = [{"role": "user", "content": "what?"}]
        first = await o.anthropic.messages.create(messages=history, **options)
        assert [block.type for block in first.content] == ["text", "tool_use"]
        assert first.stop_reason == "tool_use"
        use = first.content[1]
        assert use.input == {"path": "/é"}
        history.append({"role": "assistant", "content": [block.model_dump() for block in first.content]})
        result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "a b"}]}
        history.append({"role": "user", "content": [result]})
        counted = await o.anthropic.messages.count_tokens(messages=history, model="m", system="Be brief.", tools=[tool])
        async with o.anthropic.messages.stream(messages=history, **options) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
        assert text == "Two."
        assert final.stop_reason == "end_turn"
        assert final.usage.input_tokens == counted.input_tokens
        assert len(o.session.trajectory.segments) == 1


async def test_forks_sub_agents_and_rewritten_history_have_segments_of_their_own() -> None:
    async with opened(lambda messages: f"answer to {messages[-1].content}") as o:
        first = (await o.chat([USER])).choices[0].message.model_dump(exclude_none=True)
        await o.chat([USER, first, ask("one")])
        await o.chat([USER, first, ask("other")])
        await o.chat([ask("a sub-agent's own task")])
        await o.chat([USER, {"role": "assistant", "content": "a summary of it"}, ask("go on")])
        segments = o.session.trajectory.segments
    counters = o.session.trajectory.counters
    assert [sum(segment.loss_mask) > 0 for segment in segments] == [True] * 4
    assert (counters["conversations"], counters["forks"], counters["rewritten"]) == (3, 1, 1)
    whole, fork = segments[0], segments[1]
    answered = whole.prompt_length + len(RENDERER.encode("answer to what is there?")) + 1
    assert fork.token_ids[:answered] == whole.token_ids[:answered]
    assert fork.prompt_length > answered  # the answer before the fork is context: it trains in the first segment


async def test_the_same_question_at_the_same_time_is_recorded_twice() -> None:
    async with opened(lambda messages: f"answer to {messages[-1].content}") as o:
        first = (await o.chat([USER])).choices[0].message.model_dump(exclude_none=True)
        async with anyio.create_task_group() as tasks:
            for text in ("one", "two"):
                tasks.start_soon(o.chat, [USER, first, ask(text)])
    assert len(o.session.trajectory.segments) == 2
    assert len(o.session.trajectory.turns) == 3


async def test_keys_are_strict() -> None:
    async with opened(lambda _: "yes") as o:
        key, o.openai.api_key = o.openai.api_key, "another"
        with pytest.raises(openai.AuthenticationError):
            await o.chat([USER])
        o.openai.api_key = key
        async with httpx.AsyncClient(base_url=o.url, timeout=100) as client:
            anonymous = await client.post("/v1/chat/completions", json={"messages": [USER]})
            models = await client.get("/v1/models", headers={"x-session-id": key})
        assert (anonymous.status_code, models.status_code) == (401, 401)
        assert [model.id async for model in o.openai.models.list()] == ["policy"]
        trajectory = o.session.trajectory
    assert trajectory.turns == []


async def test_a_key_ends_with_its_session() -> None:
    recorder = Recorder(ScriptedEngine(RENDERER, lambda _: "yes"), RENDERER)
    async with recorder.serve() as url, httpx.AsyncClient(base_url=url, timeout=100) as client:
        with recorder.session(Trajectory("a")) as session:
            headers = {"authorization": f"Bearer {session.key}"}
            body = {"messages": [USER]}
            assert (await client.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
        assert (await client.post("/v1/chat/completions", json=body, headers=headers)).status_code == 401


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "king", "content": "hi"}]}, r"messages\[0\].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "image_url"),
        ({"messages": [USER], "n": 2}, "n:"),
        ({"messages": [USER], "max_tokens": 0}, "max_tokens"),
        ({"messages": [USER], "tools": [{"type": "web_search"}]}, r"tools\[0\]"),
        ({"messages": [USER, {"role": "assistant", "content": "I"}]}, "last one is an answer"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "tool_call_id"),
    ],
)
async def test_wrong_requests_name_the_field(body: dict[str, Any], named: str) -> None:
    async with opened(lambda _: "yes") as o, httpx.AsyncClient(base_url=o.url, timeout=100) as client:
        headers = {"authorization": f"Bearer {o.session.key}"}
        response = await client.post("/v1/chat/completions", json=body, headers=headers)
        assert response.status_code == 400
        import re

        assert re.search(named, response.json()["error"]["message"])
        garbage = await client.post("/v1/messages", content=b"{", headers=headers)
        assert (garbage.status_code, garbage.json()["type"]) == (400, "error")
        assert o.session.trajectory.turns == []


async def test_budgets_are_told_to_the_agent() -> None:
    async with opened(lambda _: "yes", limits=Limits(max_turns=1)) as o:
        await o.chat([USER])
        with pytest.raises(openai.PermissionDeniedError, match="all 1 calls"):
            await o.chat([USER])
        assert o.session.stop_reason is StopReason.MAX_TURNS
    async with opened(lambda _: "yes", limits=Limits(max_context=300, max_tokens_per_turn=50)) as o:
        with pytest.raises(openai.BadRequestError, match="maximum context of 300"):
            await o.chat([ask("x" * 400)])
        assert o.session.stop_reason is StopReason.CONTEXT
    async with opened(lambda _: "a long answer", limits=Limits(max_tokens_per_turn=4)) as o:
        choice = (await o.chat([USER], max_tokens=100)).choices[0]
        assert (choice.finish_reason, choice.message.content) == ("length", "a lo")
        cut = (await o.chat([USER], max_tokens=2)).choices[0]
        assert cut.message.content == "a "


async def test_what_the_agent_asks_for_does_not_change_the_sampling() -> None:
    seen: list[SamplingParams] = []

    class Seeing(ScriptedEngine):
        async def generate(self, prompt_ids: Any, sampling: SamplingParams, **options: Any) -> Completion:
            seen.append(sampling)
            return await super().generate(prompt_ids, sampling, **options)

    engine = Seeing(RENDERER, lambda _: "yes", policy_version=7)
    async with opened(None, engine=engine, sampling=SamplingParams(temperature=0.7, seed=3)) as o:
        await o.chat([USER], temperature=0.0, top_p=0.5, stop=["y"])
        await o.chat([USER])
    assert [s.temperature for s in seen] == [0.7, 0.7]
    assert seen[0].seed != seen[1].seed
    assert o.session.trajectory.counters["ignored_parameters"] == 3
    assert [call.policy_version for call in o.session.calls] == [7, 7]
    assert {call.template_hash for call in o.session.calls} == {RENDERER.template_hash}


async def test_a_failing_engine_is_told_and_kept_until_it_answers() -> None:
    class Failing(ScriptedEngine):
        broken = True

        async def generate(self, prompt_ids: Any, sampling: SamplingParams, **options: Any) -> Completion:
            if self.broken:
                raise EngineError("out of memory")
            return await super().generate(prompt_ids, sampling, **options)

    engine = Failing(RENDERER, lambda _: "yes")
    async with opened(None, engine=engine) as o:
        with pytest.raises(openai.InternalServerError, match="out of memory"):
            await o.chat([USER])
        assert isinstance(o.session.failure, EngineError)
        engine.broken = False
        await o.chat([USER])
        assert o.session.failure is None
    assert len(o.session.trajectory.turns) == 1


async def test_an_agent_that_hangs_up_cancels_its_generation() -> None:
    class Slow(ScriptedEngine):
        def __init__(self) -> None:
            super().__init__(RENDERER, lambda _: "yes")
            self.started, self.cancelled = anyio.Event(), anyio.Event()

        async def generate(self, prompt_ids: Any, sampling: SamplingParams, **options: Any) -> Completion:
            self.started.set()
            try:
                await anyio.sleep_forever()
            finally:
                self.cancelled.set()
            raise AssertionError

    engine = Slow()
    async with opened(None, engine=engine) as o:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(o.chat, [USER])
            await engine.started.wait()
            tasks.cancel_scope.cancel()
        with anyio.fail_after(100):
            await engine.cancelled.wait()
        await checkpoint()
    assert o.session.trajectory.segments == []


async def test_text_that_is_no_call_is_passed_on() -> None:
    async with opened(lambda _: "<tool_call>\n{broken") as o:
        choice = (await o.chat([USER], tools=chat_tools())).choices[0]
        assert choice.message.content == "<tool_call>\n{broken"
        assert choice.finish_reason == "stop"
    assert o.session.trajectory.counters["parse_errors"] == 1
    assert o.session.trajectory.turns[0].error is not None


def test_renderers_that_cannot_be_recorded_with() -> None:
    for renderer in (
        Renderer(ByteTokenizer(), formats.get("openai")),
        Renderer(ByteTokenizer(), formats.get("codeact"), history="strip"),
    ):
        with pytest.raises(ConfigError):
            Recorder(ScriptedEngine(RENDERER, []), renderer)
