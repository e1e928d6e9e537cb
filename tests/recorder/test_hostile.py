"""Clients that ask too much, too little, in odd ways, or go away: each is answered, and the recording stays whole."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

import anthropic
import anyio
import httpx
import openai
import pytest

from skyenv.engines.scripted import ScriptedEngine
from skyenv.recorder import Recorder, server
from skyenv.types import Completion, Limits, Message, SamplingParams, StopReason, Trajectory
from tests.recorder.test_recorder import RENDERER, USER, ask, chat_tools, opened, text_of, turn

PATHS = {
    "chat": ("/v1/chat/completions", {"messages": [USER]}),
    "responses": ("/v1/responses", {"input": "what?"}),
    "anthropic": ("/v1/messages", {"messages": [USER], "max_tokens": 100}),
    "counting": ("/v1/messages/count_tokens", {"messages": [USER]}),
}


def headers(o: Any) -> dict[str, str]:
    return {"authorization": f"Bearer {o.session.key}"}


@pytest.mark.parametrize("path", PATHS)
async def test_every_path_is_strict_about_keys_and_bodies(path: str) -> None:
    where, body = PATHS[path]
    async with opened(lambda _: "yes") as o, httpx.AsyncClient(base_url=o.url) as client:
        for wrong in ({}, {"authorization": "Bearer x"}, {"authorization": "Basic x"}, {"x-api-key": "nöne".encode()}):
            assert (await client.post(where, json=body, headers=wrong)).status_code == 401
        for content in (b"", b"{", b"[]", b"null", b'"x"', b"[" * 100_000, b"\xff\xfe"):
            answer = await client.post(where, content=content, headers=headers(o))
            assert (answer.status_code, "error" in answer.json()) == (400, True), content[:10]
        assert (await client.post(where, json=body, headers=headers(o))).status_code == 200
    assert len(o.session.trajectory.turns) == (path != "counting")


@pytest.mark.parametrize("path", PATHS)
async def test_images_are_refused_by_the_name_of_the_part(path: str) -> None:
    where, body = PATHS[path]
    field = "input" if path == "responses" else "messages"
    kind = {"chat": "image_url", "responses": "input_image"}.get(path, "image")
    content = [{"type": kind, "image_url": {"url": "data:,"}, "source": {}}]
    async with opened(lambda _: "yes") as o, httpx.AsyncClient(base_url=o.url) as client:
        asked = {**body, field: [{"role": "user", "content": content}]}
        answer = await client.post(where, json=asked, headers=headers(o))
    assert answer.status_code == 400
    assert f"{field}[0].content: holds a part of type '{kind}'" in answer.json()["error"]["message"]


async def test_a_huge_body_is_refused_while_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_BODY", 1 << 20)
    async with opened(lambda _: "yes") as o:
        with pytest.raises(openai.APIStatusError) as caught:
            await o.chat([ask("x" * (4 << 20))])
        assert caught.value.status_code == 413
        assert (await o.chat([USER])).choices[0].message.content == "yes"
    assert len(o.session.trajectory.turns) == 1


async def test_a_client_that_goes_away_while_it_sends_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async with opened(lambda _: "yes") as o:
        port = int(o.url.rpartition(":")[2])
        async with await anyio.connect_tcp("127.0.0.1", port) as stream:
            lines = ["POST /v1/messages HTTP/1.1", "host: x", f"x-api-key: {o.session.key}", "content-length: 99"]
            await stream.send("\r\n".join([*lines, "", "{"]).encode())
        await o.chat([USER])
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


NAMES = ("\ud800", "\0", "m" * 5000, "🐍")


async def test_any_model_name_is_taken() -> None:
    async with opened(lambda _: "yes") as o, httpx.AsyncClient(base_url=o.url) as client:
        for name in NAMES:
            for where, body in list(PATHS.values())[:3]:
                for stream in (False, True):
                    data = json.dumps({**body, "model": name, "stream": stream})
                    answer = await client.post(where, content=data, headers=headers(o))
                    assert answer.status_code == 200, (name, answer.text)
                    assert "yes" in answer.text
    assert [call.model for call in o.session.calls] == [name for name in NAMES for _ in range(6)]


LINES = "one\u2028two\u2029three\x85four\x0bfive\x1csix\r\nseven"


@pytest.mark.parametrize("path", list(PATHS)[:3])
async def test_a_stream_is_lines_for_every_reader_of_lines(path: str) -> None:
    """Readers that cut at all of Unicode's line ends find whole events."""
    where, body = PATHS[path]
    async with opened(lambda _: LINES) as o, httpx.AsyncClient(base_url=o.url) as client:
        answer = await client.post(where, json={**body, "stream": True}, headers=headers(o))
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert answer.text.splitlines() == answer.text.split("\n")[:-1]
    assert LINES in [_said(event) for event in events]


def _said(event: dict[str, Any]) -> Any:
    delta = event.get("delta") or (event.get("choices") or [{}])[0].get("delta")
    return delta.get("text") or delta.get("content") if isinstance(delta, dict) else delta


async def test_usage_is_streamed_to_those_who_ask() -> None:
    """Many agents read `choices[0]` of every chunk."""
    async with opened(lambda _: "yes") as o:
        chunks = [chunk async for chunk in await o.chat([USER], stream=True)]
        assert all(chunk.choices for chunk in chunks)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = [chunk async for chunk in await o.chat([USER], **options)]
        assert [bool(chunk.choices) for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
        assert chunks[-1].usage.completion_tokens == len("yes") + 1


async def test_system_messages_in_the_middle() -> None:
    """Clients remind in that role; chat templates hardly know it there."""
    history: list[Any] = [USER, {"role": "system", "content": "Be careful."}]
    async with opened(turn(["one", "two"])) as o:
        first = await o.anthropic.messages.create(model="m", max_tokens=9, system="Be brief.", messages=history)
        history.append({"role": "assistant", "content": [block.model_dump() for block in first.content]})
        history += [ask("and?"), {"role": "system", "content": [{"type": "text", "text": "Be quick."}]}]
        await o.anthropic.messages.create(model="m", max_tokens=9, system="Be brief.", messages=history)
        (segment,) = o.session.trajectory.segments
        messages = [ask(text) for text in ("what is there?", "Be careful.")]
        await o.chat([{"role": "system", "content": "Be brief."}, *messages])
    assert "<|im_start|>user\nBe careful.<|im_end|>" in text_of(segment)
    assert "<|im_start|>user\nBe quick.<|im_end|>" in text_of(segment)
    assert [message.role for message in o.session.trajectory.prompt] == ["system", "user", "user"]


async def test_a_websocket_is_declined_in_the_way_that_clients_fall_back_from() -> None:
    async with opened(lambda _: "yes") as o, httpx.AsyncClient(base_url=o.url) as client:
        upgrade = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
        answer = await client.get("/v1/responses", headers={**headers(o), **upgrade, "sec-websocket-key": "eA=="})
    assert answer.status_code == 426


async def test_halves_of_characters() -> None:
    """JSON may hold them, UTF-8 may not: in calls they are the policy's mistake, from a client they are replaced."""
    said = '<tool_call>\n{"name": "ls", "arguments": {"path": "\\ud800"}}\n</tool_call>'
    async with opened(turn([said, "done"])) as o, httpx.AsyncClient(base_url=o.url) as client:
        for stream in (True, False):
            body = {"messages": [USER], "tools": chat_tools(), "stream": stream}
            answer = await client.post("/v1/chat/completions", json=body, headers=headers(o))
            assert answer.status_code == 200
        message = answer.json()["choices"][0]["message"]
        assert message["content"] == said
        body = json.dumps({"messages": [USER, message, ask("\ud800?")], "tools": chat_tools()})
        answer = await client.post("/v1/chat/completions", content=body, headers=headers(o))
        assert answer.json()["choices"][0]["message"]["content"] == "done", answer.text
    assert o.session.trajectory.counters["conversations"] == 2


async def test_characters_that_a_limit_cuts_in_two() -> None:
    """The client hears a replacement character, the ids stay what was sampled, and the conversation goes on behind."""
    async with opened(lambda messages: "é🐍é" if len(messages) == 1 else "done") as o:
        stream = await o.chat([USER], stream=True, max_tokens=4)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == "é\ufffd"
        await o.chat([USER, {"role": "assistant", "content": text}, ask("go on")])
        (segment,) = o.session.trajectory.segments
    sampled = [i for i, mask in zip(segment.token_ids, segment.loss_mask, strict=True) if mask]
    assert sampled[:4] == RENDERER.encode("é🐍é")[:4]


class Waiting(ScriptedEngine):
    """Answers when it is told to; counts the generations that were given up."""

    def __init__(self) -> None:
        super().__init__(RENDERER, lambda _: "yes")
        self.started, self.go, self.given_up = anyio.Event(), anyio.Event(), 0
        self.gave_up = anyio.Event()

    async def generate(self, prompt_ids: Any, sampling: SamplingParams, **options: Any) -> Completion:
        self.started.set()
        try:
            await self.go.wait()
        except BaseException:
            self.given_up += 1
            self.gave_up.set()
            raise
        return await super().generate(prompt_ids, sampling, **options)


@pytest.mark.parametrize("kind", ["chat", "responses", "anthropic"])
async def test_a_stream_that_is_hung_up_on_ends_its_generation_alone(kind: str) -> None:
    """Another call of the same session, under way meanwhile, is answered."""
    engine = Waiting()
    async with opened(None, engine=engine) as o:

        async def call() -> None:
            match kind:
                case "chat":
                    await o.chat([USER], stream=True)
                case "responses":
                    await o.openai.responses.create(model="m", input="what?", stream=True)
                case _:
                    await o.anthropic.messages.create(model="m", max_tokens=9, messages=[USER], stream=True)

        answers: list[Any] = []

        async def other() -> None:
            answers.append(await o.chat([ask("something else")]))

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                doomed = anyio.CancelScope()

                async def hang_up() -> None:
                    with doomed:
                        await call()

                tasks.start_soon(hang_up)
                await engine.started.wait()
                doomed.cancel()
                await engine.gave_up.wait()
                tasks.start_soon(other)
                engine.go.set()
    assert (engine.given_up, answers[0].choices[0].message.content) == (1, "yes")
    assert len(o.session.trajectory.turns) == len(o.session.trajectory.segments) == 1
    assert o.session.failure is None


async def test_an_answer_that_was_not_read_to_its_end_is_recorded_and_can_be_asked_for_again() -> None:
    async with opened(lambda _: "x" * 100_000, limits=Limits(max_context=1 << 20, max_tokens_per_turn=1 << 18),
                      sampling=SamplingParams(max_tokens=1 << 18)) as o:  # fmt: skip
        stream = await o.chat([USER], stream=True)
        async for _ in stream:
            break
        await stream.close()
        await o.chat([USER])
    assert [sum(segment.loss_mask) for segment in o.session.trajectory.segments] == [100_001] * 2


async def test_a_full_context_that_is_made_room_in_is_no_end() -> None:
    """An agent that compacts its history when it is told goes on; its old conversation stays as it was."""
    limits = Limits(max_context=1200, max_tokens_per_turn=50)
    async with opened(lambda messages: f"answer {len(messages)}", limits=limits) as o:
        first = (await o.chat([USER])).choices[0].message.model_dump(exclude_none=True)
        before = list(o.session.trajectory.segments[0].token_ids)
        with pytest.raises(openai.BadRequestError, match="maximum context"):
            await o.chat([USER, first, ask("x" * 1300)])
        assert o.session.stop_reason is StopReason.CONTEXT
        await o.chat([ask("Summary: it was long."), {"role": "assistant", "content": "I see."}, ask("go on")])
        assert o.session.stop_reason is None
        segments = o.session.trajectory.segments
    assert segments[0].token_ids == before
    assert [sum(segment.loss_mask) > 0 for segment in segments] == [True, True]
    counters = o.session.trajectory.counters
    assert (counters["conversations"], counters["rewritten"]) == (2, 1)


async def test_what_needs_a_store_is_refused() -> None:
    items: list[Any] = [{"type": "item_reference", "id": "msg_1"}, {"role": "user", "content": "and?"}]
    async with opened(lambda _: "yes") as o:
        with pytest.raises(openai.BadRequestError, match=r"input\[0\].*nothing is stored here"):
            await o.openai.responses.create(model="m", input=items)
        with pytest.raises(anthropic.BadRequestError, match="last one is an answer"):
            await o.anthropic.messages.create(
                model="m",
                max_tokens=9,
                messages=[USER, {"role": "assistant", "content": "{"}],  # type: ignore[list-item]
            )


async def test_models_by_name() -> None:
    async with opened(lambda _: "yes") as o:
        assert (await o.openai.models.retrieve("policy")).id == "policy"
        assert [model.id async for model in o.anthropic.models.list()] == ["policy"]
        with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-9'; the model here is 'policy'"):
            await o.openai.models.retrieve("gpt-9")
        with pytest.raises(anthropic.NotFoundError):
            await o.anthropic.models.retrieve("gpt-9")
        o.openai.api_key = "another"
        with pytest.raises(openai.AuthenticationError):
            await o.openai.models.retrieve("policy")


async def test_an_unknown_path_says_what_there_is() -> None:
    async with opened(lambda _: "yes") as o:
        with pytest.raises(openai.NotFoundError, match="/v1/chat/completions"):
            await o.openai.embeddings.create(model="m", input="x")
    assert o.session.trajectory.turns == []


async def test_sub_agents_interleaved_with_their_caller() -> None:
    """Conversations under several system prompts, call by call in turn: each is one segment."""
    names = ("planner", "coder", "tester")

    def answer(messages: Sequence[Message]) -> str:
        return f"{messages[0].content} {len(messages)}"

    async with opened(answer) as o:
        histories: dict[str, list[Any]] = {name: [] for name in names}
        for number in range(3):
            for name in names:
                history = histories[name]
                history.append(ask(f"step {number}"))
                options: dict[str, Any] = {"model": "m", "max_tokens": 90, "system": [{"type": "text", "text": name}]}
                options["system"][0]["cache_control"] = {"type": "ephemeral"}
                said = await o.anthropic.messages.create(messages=history, **options)
                history.append({"role": "assistant", "content": [block.model_dump() for block in said.content]})
    trajectory = o.session.trajectory
    assert len(trajectory.segments) == len(names)
    assert (trajectory.counters["conversations"], trajectory.counters.get("forks", 0)) == (3, 0)
    assert [sum(segment.loss_mask) for segment in trajectory.segments] == [
        sum(len(f"{name} {count}") + 1 for count in (2, 4, 6)) for name in names
    ]
    assert RENDERER.drift(trajectory) == 0


async def test_a_session_that_is_over_answers_nobody_and_changes_nothing() -> None:
    engine = Waiting()
    recorder = Recorder(engine, RENDERER)
    trajectory = Trajectory("late")
    async with recorder.serve() as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        with recorder.session(trajectory) as session:
            answers: list[int] = []

            async def late() -> None:
                body = {"messages": [USER]}
                asked = {"authorization": f"Bearer {session.key}"}
                answers.append((await client.post("/v1/chat/completions", json=body, headers=asked)).status_code)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(late)
                await engine.started.wait()
                tasks.start_soon(_close_and_go, recorder, session, engine)
    assert answers == [401]
    assert (trajectory.turns, trajectory.segments) == ([], [])


async def _close_and_go(recorder: Recorder, session: Any, engine: Waiting) -> None:
    session.close()
    engine.go.set()
