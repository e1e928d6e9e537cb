"""Engines: the conformance suite on both, and what the HTTP one does with servers that fail, stall or lie."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import httpx
import pytest
from starlette.responses import JSONResponse, Response

from skyenv.engines.openai import OpenAIEngine
from skyenv.engines.scripted import ScriptedEngine
from skyenv.errors import ConfigError, EngineError, EngineUnavailable, ResetNeeded
from skyenv.testing.engine import check_engine
from skyenv.types import Completion, Message, SamplingParams
from tests.rollout.adventure import LOSE, RENDERER, WIN
from tests.rollout.servers import Server, serving

SAMPLING = SamplingParams(max_tokens=8, stop_token_ids=(3,))
PROMPT = (1, 2, 3)
FLAVOURS = ("vllm", "sglang")


@pytest.fixture(params=FLAVOURS, scope="module")
def shared_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with serving(Server(owner=request.param)) as running:
        yield running


@pytest.fixture
def server(shared_server: Server) -> Server:
    shared_server.forget()
    return shared_server


async def ask(engine: OpenAIEngine, sampling: SamplingParams = SAMPLING, **options: Any) -> Completion:
    return await engine.generate(PROMPT, sampling, **options)


async def test_scripted_engine_conforms() -> None:
    engine = ScriptedEngine(RENDERER, lambda messages: f"counting: {messages[-1].content} one two three", latency=0.02)
    assert len(await check_engine(engine, RENDERER)) == 6


async def test_http_engine_conforms(server: Server) -> None:
    server.delay = 0.02
    async with OpenAIEngine(server.url) as engine:
        assert (engine.flavour, engine.model) == (server.owner, "toy")
        assert len(await check_engine(engine, RENDERER, vocab_size=256)) == 6


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (Completion("a", (), ()), "ids_and_logprobs: no token ids"),
        (Completion("a", (), ()), "stop_ids_end_the_answer: EngineError: the engine raised: IndexError"),
        (Completion("a", (1,), (0.5,)), "ids_and_logprobs: not log"),
        (Completion("a", (999,), (-0.5,)), "ids_and_logprobs: ids outside"),
        (Completion("ab", (1, 2), (-0.5, -0.5)), "max_tokens_bounds"),
        (Completion("ab", (1,), (-0.5,), "stop"), "max_tokens_bounds: finish reason 'stop'"),
    ],
)
async def test_the_suite_catches_an_engine_that_lies(broken: Completion, rule: str) -> None:
    class Liar(ScriptedEngine):
        async def generate(self, *args: Any, **options: Any) -> Completion:
            return broken

    with pytest.raises(ExceptionGroup) as caught:
        await check_engine(Liar(RENDERER, []), RENDERER, vocab_size=256)
    assert any(rule in str(error) for error in caught.value.exceptions)


async def test_the_suite_catches_an_engine_that_mixes_up_its_callers() -> None:
    class Mixed(ScriptedEngine):
        last: Any = ()

        async def generate(self, prompt_ids: Any, sampling: Any, **options: Any) -> Completion:
            self.last = options["messages"]
            await anyio.sleep(0.001)
            return await super().generate(prompt_ids, sampling, messages=self.last)

    engine = Mixed(RENDERER, lambda messages: messages[-1].content)
    with pytest.raises(ExceptionGroup, match="1 of 6 rules") as caught:
        await check_engine(engine, RENDERER)
    assert "concurrent_calls_do_not_mix" in str(caught.value.exceptions[0])


async def test_scripts_by_task_and_their_ends() -> None:
    engine = ScriptedEngine(RENDERER, {"a": WIN, "b": LOSE, "c": lambda messages: str(len(messages))})
    said = Message("assistant", "x")

    async def text(task_id: str, *messages: Message) -> str:
        completion = await engine.generate((), SamplingParams(), messages=messages, session_id=f"{task_id}#0.0.1")
        return completion.text

    assert (await text("a", said)).startswith(WIN[1])
    assert (await text("b", said)).startswith(LOSE[1])
    assert (await text("c", said, said)).startswith("2")
    with pytest.raises(EngineError, match="2 texts, and turn 3"):
        await text("b", said, said)
    with pytest.raises(EngineError, match="no script for task 'd'"):
        await text("d")
    with pytest.raises(ConfigError, match="list of texts"):
        ScriptedEngine(RENDERER, "one text")


# What goes over the wire


async def test_sampling_is_passed_unchanged_and_neutral_values_are_explicit(server: Server) -> None:
    sampling = SamplingParams(temperature=0.7, top_p=0.9, top_k=0, max_tokens=8, stop_token_ids=(3, 4), seed=11)
    async with OpenAIEngine(server.url + "/v1/") as engine:
        engine.policy_version = 4
        completion = await ask(engine, sampling, session_id="täsk#1")
    (body,), (headers,) = server.bodies, server.headers
    params = body if server.owner == "vllm" else body["sampling_params"]
    assert (params["temperature"], params["top_p"], params["stop_token_ids"]) == (0.7, 0.9, [3, 4])
    assert (params["repetition_penalty"], params["min_p"]) == (1.0, 0.0)
    assert params["skip_special_tokens"] is False
    if server.owner == "vllm":
        assert (body["prompt"], body["max_tokens"], body["top_k"], body["seed"]) == ([1, 2, 3], 8, 0, 11)
    else:
        assert (body["input_ids"], params["max_new_tokens"]) == ([1, 2, 3], 8)
        assert (params["top_k"], params["sampling_seed"]) == (-1, 11)
    assert headers["x-session-id"] == "t?sk#1"
    ids, logprobs, reason = server.sample([1, 2, 3], 8, [3, 4])
    assert (completion.token_ids, completion.logprobs) == (tuple(ids), tuple(logprobs))
    assert (completion.finish_reason, completion.policy_version) == (reason, 4)
    assert completion.seconds > 0


async def test_the_version_is_that_of_the_start_of_the_request() -> None:
    with serving(Server(delay=600.0)) as server:
        async with OpenAIEngine(server.url) as engine, anyio.create_task_group() as group:
            versions = []

            async def one() -> None:
                versions.append((await ask(engine)).policy_version)

            engine.policy_version = 1
            group.start_soon(one)
            await until(lambda: server.running == 1)
            engine.policy_version, server.delay = 2, 0.0
        assert versions == [1]


async def test_sglang_reports_its_own_version() -> None:
    with serving(Server(owner="sglang", weight_version="17")) as server:
        async with OpenAIEngine(server.url) as engine:
            assert (await ask(engine)).policy_version == 17


async def test_any_other_server_is_asked_for_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sekrit")
    with serving(Server(owner="someone")) as server:
        async with OpenAIEngine(server.url) as engine:
            messages = (Message("system", "s"), Message("assistant", "a"), Message("tool", "result", "bash"))
            completion = await ask(engine, messages=messages)
        assert completion.text == "3 messages, the last from user"
        assert completion.token_ids == ()
        (body,), (headers,) = server.bodies, server.headers
        assert body["messages"][2] == {"role": "user", "content": "result"}
        assert headers["authorization"] == "Bearer sekrit"
        assert "top_k" not in body


# Servers that fail


def no_json() -> Response:
    return Response("<html>oops</html>", 200)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda: Response("Traceback:\n  boom", 500), "answered 500: Traceback: boom"),
        (lambda: Response("", 502), r"answered 502: \(empty\)"),
        (lambda: JSONResponse({"error": "too long"}, 400), "answered 400.*too long"),
        (lambda: Response("who?", 401), "set OPENAI_API_KEY"),
        (no_json, "answered no JSON: <html>oops"),
        (lambda: Response("[" * 100_000, 200), "no JSON"),
        (lambda: JSONResponse([]), "answer has no"),
        (lambda: JSONResponse({"choices": [], "meta_info": None}), "answer has no"),
        (lambda: JSONResponse(None), "answer has no"),
    ],
)
async def test_a_bad_answer_is_one_clear_error(server: Server, fault: Callable[[], Response], message: str) -> None:
    async with OpenAIEngine(server.url) as engine:
        server.faults = [fault()]
        with pytest.raises(EngineError, match=message) as caught:
            await ask(engine)
        assert "\n" not in str(caught.value)
        assert len(server.bodies) == 1, "nothing of this kind is repeated"
        assert (await ask(engine)).token_ids


def drop_logprob(answer: Any) -> Any:
    if "choices" in answer:
        answer["choices"][0]["logprobs"]["token_logprobs"].pop()
    else:
        answer["meta_info"]["output_token_logprobs"].pop()
    return answer


def null_logprob(answer: Any) -> Any:
    if "choices" in answer:
        answer["choices"][0]["logprobs"]["token_logprobs"][0] = None
    else:
        answer["meta_info"]["output_token_logprobs"][0][0] = None
    return answer


def text_ids(answer: Any) -> Any:
    if "choices" in answer:
        answer["choices"][0]["token_ids"] = "abc"
    else:
        answer["meta_info"]["output_token_logprobs"][0][1] = True
    return answer


def filtered(answer: Any) -> Any:
    if "choices" in answer:
        answer["choices"][0]["finish_reason"] = "content_filter"
    else:
        answer["meta_info"]["finish_reason"] = {"type": "content_filter"}
    return answer


def no_ids(answer: Any) -> Any:
    if "choices" in answer:
        del answer["choices"][0]["token_ids"]
    else:
        del answer["meta_info"]["output_token_logprobs"]
    return answer


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (drop_logprob, "8 token ids and 7 logprobs|counts 8 completion tokens and has 7"),
        (null_logprob, "not a list of finite numbers"),
        (text_ids, "not a list of token ids"),
        (filtered, "finish reason is 'content_filter'"),
        (no_ids, "answer has no (token_ids|output_token_logprobs)"),
    ],
)
async def test_an_answer_that_lies(server: Server, spoil: Callable[[Any], Any], message: str) -> None:
    async with OpenAIEngine(server.url) as engine:
        server.spoil = spoil
        with pytest.raises(EngineError, match=message):
            await ask(engine)


async def test_a_busy_server_is_asked_again_after_the_time_it_names(server: Server) -> None:
    async with OpenAIEngine(server.url) as engine:
        server.faults = [Response("full", 429, {"retry-after": "0"}), Response("starting", 503), Response("x", 503)]
        assert (await ask(engine)).token_ids
        assert len(server.bodies) == 4


async def test_retries_end_at_the_deadline(server: Server) -> None:
    async with OpenAIEngine(server.url, retry_for=0.5) as engine:
        server.faults = [Response("full", 503, {"retry-after": "3600"})]
        started = time.monotonic()
        with pytest.raises(EngineError, match="answered 503: full"):
            await ask(engine)
        server.faults = [Response("full", 429) for _ in range(1000)]
        with pytest.raises(EngineError, match="answered 429: full"):
            await ask(engine)
        assert time.monotonic() - started < 60  # neither an hour nor a thousand tries


async def test_a_server_that_is_not_there() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        engine = OpenAIEngine(url, "toy", flavour="vllm", retry_for=0.3)
        async with engine:
            with pytest.raises(EngineError, match="cannot be reached"):
                await ask(engine)
        with pytest.raises(EngineError, match="cannot be reached"):
            async with OpenAIEngine(url, retry_for=0.1):
                pass


async def test_a_server_that_stalls(server: Server) -> None:
    server.delay = 600.0
    async with OpenAIEngine(server.url, timeout=1.5) as engine:
        with pytest.raises(EngineError, match=r"did not answer within 1\.5 s"):
            await ask(engine)
        await until(lambda: server.hung_up == 1 and server.running == 0)


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(100):
        while not condition():
            await anyio.sleep(0.005)


async def test_cancelling_aborts_the_request(server: Server) -> None:
    server.delay = 600.0
    async with OpenAIEngine(server.url) as engine:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(ask, engine)
                await until(lambda: server.running == 1)
                scope.cancel()
        await until(lambda: server.hung_up == 1 and server.running == 0)
        if server.owner == "sglang":
            assert server.aborted == [server.bodies[0]["rid"]]


async def test_more_at_once_than_a_pool_usually_holds(server: Server) -> None:
    server.delay = 0.05
    found: list[Completion] = []
    async with OpenAIEngine(server.url) as engine:

        async def one() -> None:
            found.append(await ask(engine))

        async with anyio.create_task_group() as group:
            for _ in range(120):
                group.start_soon(one)
    assert len({completion.token_ids for completion in found}) == 1
    assert len(found) == 120


# Settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "localhost:8000"}, r"engine\.url"),
        ({"url": "http://x", "flavour": "vlm"}, r"engine\.flavour: 'vlm' is not auto, vllm, sglang, chat"),
    ],
)
def test_settings_that_cannot_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OpenAIEngine(**options)


async def test_it_is_used_inside_its_block_only() -> None:
    with pytest.raises(ResetNeeded):
        await ask(OpenAIEngine("http://127.0.0.1:1"))
    with pytest.raises(ResetNeeded):
        await ask(OpenAIEngine("http://127.0.0.1:1", "toy", flavour="vllm"))


async def test_a_server_without_a_model_list_must_be_described() -> None:
    with serving(Server(owner="none")) as server:
        with pytest.raises(EngineError, match="answered 404"):
            async with OpenAIEngine(server.url):
                pass
        async with OpenAIEngine(server.url, "toy", flavour="chat") as engine:
            assert (await ask(engine, messages=(Message("user", "hi"),))).text == "1 messages, the last from user"


async def test_a_transport_may_replace_the_network() -> None:
    server = Server(owner="sglang")
    transport = httpx.ASGITransport(server.app())
    async with OpenAIEngine("http://inside", transport=transport) as engine:
        assert (await ask(engine)).token_ids == tuple(server.sample([1, 2, 3], 8, [3])[0])


# Weights that change under a generation


def broken_off(after: int, times: int, version: str = "") -> Callable[[Any], Any]:
    """An abort after so many ids, so many times; SGLang tells the version that sampled them."""
    left = times

    def spoil(answer: Any) -> Any:
        nonlocal left
        if left == 0:
            return answer
        left -= 1
        if "choices" in answer:
            choice = answer["choices"][0]
            choice.update(token_ids=choice["token_ids"][:after], finish_reason="abort", text=choice["text"][:after])
            choice["logprobs"]["token_logprobs"] = choice["logprobs"]["token_logprobs"][:after]
        else:
            meta = answer["meta_info"]
            meta.update(finish_reason={"type": "abort", "message": "paused"}, completion_tokens=after)
            meta.update(output_token_logprobs=meta["output_token_logprobs"][:after])
            answer["text"] = answer["text"][:after]
            if version:
                meta["weight_version"] = version
        return answer

    return spoil


async def test_what_was_broken_off_goes_on_from_there(server: Server) -> None:
    async with OpenAIEngine(server.url) as engine:
        whole = await ask(engine)
        server.bodies.clear()
        server.spoil = broken_off(after=2, times=2)
        joined = await ask(engine)
    assert joined.token_ids == whole.token_ids[:2] + joined.token_ids[2:]
    assert (len(joined.token_ids), joined.finish_reason) == (8, "length")
    prompts = [body.get("prompt") or body["input_ids"] for body in server.bodies]
    budgets = [body.get("max_tokens") or body["sampling_params"]["max_new_tokens"] for body in server.bodies]
    assert prompts == [[*PROMPT, *joined.token_ids[:done]] for done in (0, 2, 4)]
    assert budgets == [8, 6, 4]
    assert (joined.policy_version, joined.versions) == (0, ())
    assert len({body.get("request_id") or body["rid"] for body in server.bodies}) == 3


async def test_requests_wait_while_weights_change_and_know_their_version(server: Server) -> None:
    async with OpenAIEngine(server.url) as engine:
        engine.policy_version = 4
        server.weight_version = "5"
        spoil = broken_off(after=3, times=1, version="4")

        def updated(answer: Any) -> Any:
            engine.policy_version = 5
            return spoil(answer)

        server.spoil = updated
        engine.hold()
        engine.hold()
        done: list[Completion] = []

        async def one() -> None:
            done.append(await ask(engine))

        async with anyio.create_task_group() as group:
            group.start_soon(one)
            await anyio.wait_all_tasks_blocked()
            assert server.bodies == []
            engine.release()
            engine.release()
    (answer,) = done
    assert (answer.policy_version, answer.versions) == (4, ((3, 4), (5, 5)))


async def test_a_request_that_a_pause_overtook_is_sent_again(server: Server) -> None:
    async with OpenAIEngine(server.url) as engine:
        server.delay = 60.0
        done: list[Completion] = []

        async def one() -> None:
            done.append(await ask(engine))

        async with anyio.create_task_group() as group:
            group.start_soon(one)
            with anyio.fail_after(100):
                while not server.bodies:
                    await anyio.sleep(0.01)
            engine.hold()
            await engine.take_back(0.01)
            server.delay, engine.policy_version = 0.0, 3
            engine.release()
    (answer,) = done
    assert (len(answer.token_ids), answer.policy_version, len(server.bodies)) == (8, 3, 2)


async def test_sglang_tells_versions_by_token() -> None:
    def spans(answer: Any) -> Any:
        rows = [("6", 0, 3), ("7", 3, 3), ("8", 3, 8)]
        answer["meta_info"]["weight_versions"] = [{"version": v, "start": a, "end": b} for v, a, b in rows]
        return answer

    with serving(Server(owner="sglang")) as server:
        async with OpenAIEngine(server.url) as engine:
            server.spoil = spans
            answer = await ask(engine)
    assert (answer.policy_version, answer.versions) == (6, ((3, 6), (5, 8)))


async def test_a_server_that_aborts_everything_is_out(server: Server) -> None:
    async with OpenAIEngine(server.url) as engine:
        server.spoil = broken_off(after=0, times=9)
        with pytest.raises(EngineUnavailable, match="3 times without an id"):
            await ask(engine)


async def test_an_adapter_samples_when_one_is_named(server: Server) -> None:
    async with OpenAIEngine(server.url) as engine:
        engine.adapter = "tuned-3"
        await ask(engine)
    (body,) = server.bodies
    assert (body.get("model"), body.get("lora_path")) in {("tuned-3", None), (None, "tuned-3")}


def test_the_versions_of_a_completion_add_up() -> None:
    with pytest.raises(ValueError, match="versions of 2 token ids"):
        Completion("ab", (1, 2), (-0.5, -0.5), versions=((1, 3),))
