"""A real vLLM and a real SGLang as engines: exact ids and logprobs, parameters, aborts, sessions, cached prefixes."""

from __future__ import annotations

import re
from dataclasses import replace

import anyio
import httpx
import pytest

from skyenv.engines.openai import OpenAIEngine
from skyenv.engines.pool import EnginePool
from skyenv.errors import EngineError
from skyenv.testing.engine import check_engine
from skyenv.types import Completion, Message, SamplingParams
from tests.conftest import RealServer
from tests.engines.models import logprobs_here, renderer_of

pytestmark = pytest.mark.engine
SAMPLING = SamplingParams(max_tokens=48)
PROMPT = tuple(range(20, 60))


@pytest.fixture(params=["vllm", "sglang"])
def server(request: pytest.FixtureRequest) -> RealServer:
    found: RealServer = request.getfixturevalue(f"{request.param}_server")
    return found


async def ask(server: RealServer, sampling: SamplingParams, prompt: tuple[int, ...] = PROMPT) -> Completion:
    async with server.engine() as engine:
        return await engine.generate(prompt, sampling)


async def running(server: RealServer) -> int:
    """Requests under way, by the server's own count."""
    async with httpx.AsyncClient(base_url=server.url, timeout=100) as client:
        if server.flavour == "sglang":
            return sum(row["num_running_reqs"] + row["num_waiting_reqs"] for row in await _loads(client))
        text = (await client.get("/metrics")).text
    return sum(int(float(value)) for value in re.findall(r"^vllm:num_requests_running\S* (\S+)$", text, re.MULTILINE))


async def sampled(server: RealServer) -> int:
    """Ids that vLLM has sampled since its start; 0 of SGLang, which does not tell."""
    async with httpx.AsyncClient(base_url=server.url, timeout=100) as client:
        text = (await client.get("/metrics")).text
    return sum(
        int(float(value)) for value in re.findall(r"^vllm:generation_tokens_total\S* (\S+)$", text, re.MULTILINE)
    )


async def _loads(client: httpx.AsyncClient) -> list[dict[str, int]]:
    answer = (await client.get("/v1/loads")).json()
    loads: list[dict[str, int]] = answer["loads"]
    return loads


async def test_it_conforms(server: RealServer) -> None:
    renderer = renderer_of(server.model)
    async with OpenAIEngine(server.url) as engine:
        assert engine.flavour == server.flavour
        assert engine.model in ("tiny", str(server.model))  # SGLang goes by the checkpoint that it took last
        assert len(await check_engine(engine, renderer, vocab_size=len(renderer.tokenizer.get_vocab()))) == 6


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_logprobs_are_those_of_the_checkpoint(server: RealServer, temperature: float) -> None:
    """Temperature included: what a trainer computes for the same ids, up to rounding."""
    answer = await ask(server, replace(SAMPLING, temperature=temperature))
    expected = logprobs_here(server.model, PROMPT, answer.token_ids, temperature)
    assert answer.logprobs == pytest.approx(expected, abs=1e-4)


async def test_parameters_reach_the_sampler(server: RealServer) -> None:
    greedy = await ask(server, replace(SAMPLING, temperature=0.0))
    for narrow in (replace(SAMPLING, top_k=1), replace(SAMPLING, top_p=1e-6)):
        assert (await ask(server, narrow)).token_ids == greedy.token_ids
    stop = greedy.token_ids[len(greedy.token_ids) // 2]
    cut = await ask(server, replace(SAMPLING, temperature=0.0, stop_token_ids=(stop,)))
    assert cut.token_ids == greedy.token_ids[: greedy.token_ids.index(stop) + 1]
    assert cut.finish_reason == "stop"
    free = {(await ask(server, SAMPLING)).token_ids for _ in range(2)}
    assert len(free) == 2


async def test_a_seed_repeats_an_answer(vllm_server: RealServer) -> None:
    """SGLang heeds seeds only when it is started for deterministic inference, which has no build for processors."""
    seeded = [await ask(vllm_server, replace(SAMPLING, seed=seed)) for seed in (7, 7, 8)]
    assert seeded[0].token_ids == seeded[1].token_ids != seeded[2].token_ids


async def test_cancelled_requests_end_on_the_server(server: RealServer) -> None:
    async with server.engine() as engine:

        async def keep_asking(number: int) -> None:
            while True:  # a random model may stop at any id
                await engine.generate((*PROMPT, number), replace(SAMPLING, max_tokens=3000))

        async with anyio.create_task_group() as group:
            for number in range(16):
                group.start_soon(keep_asking, number)
            with anyio.fail_after(100):
                while not await running(server):
                    await anyio.sleep(0.05)
            group.cancel_scope.cancel()
        with anyio.fail_after(100):
            while await running(server):
                await engine.generate(PROMPT, replace(SAMPLING, max_tokens=1))  # an idle vLLM does not count anew


async def test_a_conversation_finds_its_prefix_again(server: RealServer) -> None:
    """The pool measures what the server reports: a second turn of a session hits, a stranger does not."""
    prompt = tuple(20 + (7 * position + position // 64) % 200 for position in range(600))
    async with EnginePool([server.engine()]) as pool:
        first = await pool.generate(prompt, SAMPLING, session_id="one")
        again = await pool.generate((*prompt, *first.token_ids, 21, 22), SAMPLING, session_id="one")
        stranger = await pool.generate(tuple(reversed(prompt)), SAMPLING, session_id="two")
        assert again.cached_tokens is not None
        assert again.cached_tokens >= 512
        assert (stranger.cached_tokens or 0) < 32
        rate = pool.stats[0].cache_hit_rate
        assert rate is not None
        assert 0.25 < rate < 0.75


async def test_any_server_can_be_evaluated_by_text(server: RealServer) -> None:
    """As for a server that takes no ids: the chat endpoint, messages in, text out."""
    async with OpenAIEngine(f"{server.url}/v1", "tiny", flavour="chat") as engine:
        question = (Message("system", "Play."), Message("user", "look around the house"))
        answer = await engine.generate((), replace(SAMPLING, max_tokens=12), messages=question)
    assert answer.text
    assert (answer.token_ids, answer.finish_reason) in {((), "length"), ((), "stop")}


async def test_what_the_server_refuses_is_said(server: RealServer) -> None:
    with pytest.raises(EngineError, match=r"400"):
        await ask(server, replace(SAMPLING, temperature=-1.0))
