"""Several servers as one engine: who gets what, and that a trajectory survives the death of its server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import anyio
import pytest

from skyenv.engines.openai import OpenAIEngine
from skyenv.engines.pool import EnginePool
from skyenv.errors import ConfigError, EngineError, EngineUnavailable
from skyenv.testing.engine import check_engine
from skyenv.types import Limits, SamplingParams
from skyenv.vector.pipeline import RolloutPipeline
from tests.rollout.adventure import RENDERER, Adventure, Quest
from tests.rollout.servers import Server, serving

SAMPLING = SamplingParams(max_tokens=8, stop_token_ids=(3,))


@pytest.fixture(scope="module")
def started() -> Iterator[list[Server]]:
    with ExitStack() as stack:
        yield [stack.enter_context(serving(Server(owner="vllm"))) for _ in range(3)]


@pytest.fixture
def servers(started: list[Server]) -> list[Server]:
    for server in started:
        server.forget()
    return started


def urls(servers: list[Server]) -> list[str]:
    return [server.url for server in servers]


def asked(servers: list[Server]) -> list[int]:
    return [len(server.bodies) for server in servers]


async def ask(pool: EnginePool, session: str = "", prompt: tuple[int, ...] = (1, 2, 3)) -> Any:
    return await pool.generate(prompt, SAMPLING, session_id=session)


async def test_a_pool_conforms_as_any_engine_does(servers: list[Server]) -> None:
    for server in servers:
        server.delay = 0.02
    async with EnginePool.at(urls(servers)) as pool:
        assert len(await check_engine(pool, RENDERER, vocab_size=256)) == 6


async def test_a_session_stays_and_others_spread(servers: list[Server]) -> None:
    async with EnginePool.at(urls(servers)) as pool:
        for _turn in range(6):
            await ask(pool, "one")
        assert sorted(asked(servers)) == [0, 0, 6]
        for server in servers:
            server.delay = 0.1
        async with anyio.create_task_group() as group:
            for number in range(9):
                group.start_soon(ask, pool, f"s{number}")
        assert max(asked(servers)) - min(asked(servers)) <= 7
        assert min(asked(servers)) >= 3


async def test_a_session_moves_when_its_server_is_much_fuller(servers: list[Server]) -> None:
    async with EnginePool.at(urls(servers)[:2], slack=0.5) as pool:
        await ask(pool, "one")
        home = next(server for server in servers if server.bodies)
        other = next(server for server in servers[:2] if server is not home)
        home.delay = other.delay = 600.0
        async with anyio.create_task_group() as group:
            with anyio.fail_after(100):
                for number in range(4):
                    group.start_soon(ask, pool, "one", (number,) * 500)
                    while sum(row.requests for row in pool.stats) <= number:
                        await anyio.sleep(0.01)
                assert pool.stats[servers.index(home)].requests >= 1
                while not other.bodies:
                    await anyio.sleep(0.01)
            group.cancel_scope.cancel()
        assert [(row.requests, row.tokens) for row in pool.stats] == [(0, 0), (0, 0)]


async def test_a_dead_server_is_left_at_once_and_taken_back_when_it_is_well(servers: list[Server]) -> None:
    async with EnginePool.at(urls(servers)[:2]) as pool:
        await ask(pool, "one")
        home = next(server for server in servers if server.bodies)
        home.ill = True
        answer = await ask(pool, "one")
        assert answer.token_ids
        stats = pool.stats[servers.index(home)]
        assert (stats.up, stats.lost) == (False, 1)
        home.ill = False
        with anyio.fail_after(100):
            while not pool.stats[servers.index(home)].up:
                await anyio.sleep(0.1)
                await ask(pool)


async def test_a_refusal_of_the_request_itself_takes_no_server_out(servers: list[Server]) -> None:
    async with EnginePool.at(urls(servers)) as pool:
        with pytest.raises(EngineError, match="bad request") as caught:
            await pool.generate(("not an id",), SAMPLING)  # type: ignore[arg-type]
        assert not isinstance(caught.value, EngineUnavailable)
        assert all(row.up for row in pool.stats)


async def test_when_none_answers_it_says_so_within_its_patience(servers: list[Server]) -> None:
    async with EnginePool.at(urls(servers), patience=0.5) as pool:
        for server in servers:
            server.ill = True
        with anyio.fail_after(100), pytest.raises(EngineUnavailable):
            await ask(pool)
    with pytest.raises(EngineUnavailable, match="answers"):
        async with EnginePool.at(["http://127.0.0.1:9"]):
            pass


async def test_a_server_that_is_down_at_the_start_does_not_hold_up_the_others(servers: list[Server]) -> None:
    async with EnginePool.at(["http://127.0.0.1:9", servers[0].url]) as pool:
        assert (await ask(pool)).token_ids
        assert [row.up for row in pool.stats] == [False, True]


async def test_cache_hits_are_counted(servers: list[Server]) -> None:
    servers[0].cached = 2
    async with EnginePool.at(urls(servers)[:1]) as pool:
        assert pool.stats[0].cache_hit_rate is None
        answer = await ask(pool)
        assert answer.cached_tokens == 2
        assert pool.stats[0].cache_hit_rate == pytest.approx(2 / 3)


async def test_the_policy_version_is_everybodys(servers: list[Server]) -> None:
    async with EnginePool.at(urls(servers)) as pool:
        pool.policy_version = 7
        assert {(await ask(pool, f"s{n}")).policy_version for n in range(6)} == {7}


async def test_trajectories_go_on_when_a_server_dies_under_them(servers: list[Server]) -> None:
    """Real trajectories, one of two servers killed in the middle: every sample comes back, none fails."""
    for server in servers[:2]:
        server.delay = 0.03
    with serving(Server(owner="vllm", delay=0.03, ill_after=4)) as doomed:
        async with EnginePool.at([doomed.url, servers[0].url]) as pool:
            pipeline = RolloutPipeline(
                engine=pool,
                make_env=Adventure,
                renderer=RENDERER,
                sampling=SamplingParams(max_tokens=8),
                limits=Limits(max_turns=3),
                max_attempts=1,
            )
            async with pipeline.run([Quest(f"q{n}") for n in range(4)], 3) as run:
                found = [trajectory async for trajectory in run]
            assert len(found) == 12
            assert [trajectory.failure for trajectory in found if trajectory.failure] == []
            assert pool.stats[0].answered >= 1
            assert pool.stats[0].lost >= 1


@pytest.mark.parametrize("options", [{"slack": -1.0}, {"patience": 0.0}])
def test_settings_that_cannot_work(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        EnginePool([OpenAIEngine("http://x")], **options)
    with pytest.raises(ConfigError, match="at least one"):
        EnginePool([])
