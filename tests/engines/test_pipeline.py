"""The whole pipeline on real servers and real sandboxes while weights change, and while a server is killed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import anyio
import pytest

import skyenv
from skyenv import formats
from skyenv.core import Engine, SandboxProvider
from skyenv.engines.control import PauseMode, control_of
from skyenv.engines.openai import OpenAIEngine
from skyenv.engines.pool import EnginePool
from skyenv.engines.starting import RunningServer, started
from skyenv.formats.contract import Parsed
from skyenv.formats.wrapped import WrappedFormat
from skyenv.renderer import Renderer
from skyenv.trajectory_io import append_trajectories, read_trajectories
from skyenv.types import FinishReason, Limits, SamplingParams, ToolCall, ToolSpec, Trajectory
from skyenv.vector.pipeline import RolloutPipeline
from tests.conftest import RealServer
from tests.engines.models import logprobs_here, renderer_of, save_model
from tests.engines.serve import spec
from tests.engines.test_servers import running

pytestmark = pytest.mark.engine
LIMITS = Limits(max_turns=4, max_context=4000, turn_timeout=120.0)
TASKS = ["clamp-upper-bound"]
GROUP = 2
UPDATES = 8


class Babble(WrappedFormat):
    """Every text is a call: a random model's words name a file that a real command makes and lists."""

    def render_tools(self, specs: Sequence[ToolSpec]) -> str:
        return ""

    def parse(
        self,
        text: str,
        tools: Sequence[ToolSpec],
        *,
        finish_reason: FinishReason = "stop",
        thinking_open: bool = False,
    ) -> Parsed:
        command = f"touch note-{text.encode().hex()[:40]}; ls | wc -l; pwd"
        return Parsed((ToolCall("execute_bash", {"command": command}),), None, text)


def pipeline(engine: Engine, renderer: Renderer, provider: SandboxProvider) -> RolloutPipeline:
    return RolloutPipeline(
        engine=engine,
        renderer=renderer,
        make_env=lambda: skyenv.make("SkyRL/SWE-v0", tasks="builtin", sandbox=provider),
        sampling=SamplingParams(max_tokens=120),
        limits=LIMITS,
        max_attempts=1,
    )


async def collected(engine: Engine, renderer: Renderer) -> list[Trajectory]:
    """All trajectories; none failed, none drifted, each kept exactly by a store."""
    async with skyenv.connect() as provider:
        async with pipeline(engine, renderer, provider).run(TASKS, GROUP) as run:
            found = [trajectory async for trajectory in run]
    assert sorted(trajectory.sample_index for trajectory in found) == list(range(GROUP))
    assert [trajectory.failure for trajectory in found if trajectory.failure] == []
    for trajectory in found:
        assert renderer.drift(trajectory) == 0
        assert trajectory.verdict["status"] != "resolved"
    return found


def babbling(path: Path) -> Renderer:
    return Renderer(renderer_of(path).tokenizer, Babble(formats.get("hermes")))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("other") / "model", seed=1)


@pytest.fixture(params=[("vllm", "abort"), ("sglang", "recompute")], ids="-".join)
def case(request: pytest.FixtureRequest) -> tuple[RealServer, PauseMode]:
    flavour, mode = request.param
    return request.getfixturevalue(flavour), mode


async def test_weights_change_under_trajectories(
    case: tuple[RealServer, PauseMode], other: Path, tmp_path: Path
) -> None:
    """Every id of every turn has the logprob that its version's checkpoint gives it."""
    server, mode = case
    found: list[Trajectory] = []
    async with server.engine() as engine, control_of(engine) as control:

        async def roll_out() -> None:
            found.extend(await collected(engine, babbling(server.model)))
            group.cancel_scope.cancel()  # what updates are left have nobody to meet

        async with anyio.create_task_group() as group:
            group.start_soon(roll_out)
            for version in range(1, UPDATES + 1):
                while not await running(server):
                    await anyio.sleep(0.02)
                await control.pause(mode)
                await control.load_from_disk(str(checkpoint(server, other, version)), version)
                await control.resume()
    versions = {version for trajectory in found for version, _ids in by_version(trajectory)}
    assert len(versions) > 1
    changed = 0
    for trajectory in found:
        ids, (segment,) = 0, trajectory.segments
        sampled = [place for place, mask in enumerate(segment.loss_mask) if mask]
        for version, count in by_version(trajectory):
            for part in contiguous(sampled[ids : ids + count]):
                expected = logprobs_here(
                    checkpoint(server, other, version),
                    segment.token_ids[: part[0]],
                    segment.token_ids[part[0] : part[-1] + 1],
                )
                assert segment.logprobs[part[0] : part[-1] + 1] == pytest.approx(expected, abs=2e-4)
            ids += count
        assert ids == len(sampled)
        changed += sum(bool(turn.versions) for turn in trajectory.turns)
    assert changed, "no turn was under way when weights changed"
    append_trajectories(tmp_path / "kept.jsonl", found)
    assert list(read_trajectories(tmp_path / "kept.jsonl")) == found


def checkpoint(server: RealServer, other: Path, version: int) -> Path:
    return other if version % 2 else server.model


def by_version(trajectory: Trajectory) -> list[tuple[int, int]]:
    """Versions and how many ids they sampled, in order; a turn of one version tells its size by what is left."""
    (segment,) = trajectory.segments
    sizes = [len(part) for part in contiguous([place for place, mask in enumerate(segment.loss_mask) if mask])]
    assert len(sizes) == len(trajectory.turns)
    return [
        (version, count)
        for turn, size in zip(trajectory.turns, sizes, strict=True)
        for count, version in turn.versions or ((size, turn.policy_version),)
    ]


def contiguous(places: list[int]) -> list[list[int]]:
    """Runs of neighbours."""
    runs: list[list[int]] = []
    for place in places:
        if runs and runs[-1][-1] == place - 1:
            runs[-1].append(place)
        else:
            runs.append([place])
    return runs


@pytest.fixture
def doomed(vllm: RealServer, tmp_path: Path) -> Iterator[RunningServer]:
    """A second vLLM of the same weights, to be killed."""
    with started(spec("vllm", vllm.model), tmp_path / "second.log") as server:
        yield server


async def test_trajectories_go_on_at_another_server_when_theirs_is_killed(
    vllm: RealServer, doomed: RunningServer
) -> None:
    first = OpenAIEngine(doomed.url, flavour="vllm", retry_for=0.0)
    async with EnginePool([first, vllm.engine(retry_for=0.0)]) as pool:

        async def kill_when_busy() -> None:
            while pool.stats[0].answered < 1 or not pool.stats[0].requests:
                await anyio.sleep(0.001)
            doomed.kill()

        async with anyio.create_task_group() as group:
            group.start_soon(kill_when_busy)
            found = await collected(pool, babbling(vllm.model))
        killed, survivor = pool.stats
    assert (killed.up, survivor.up) == (False, True)
    assert killed.answered >= 1
    assert killed.lost >= 1
    assert survivor.answered >= 1
    for trajectory in found:
        (segment,) = trajectory.segments
        sampled = [place for place, mask in enumerate(segment.loss_mask) if mask]
        for part in contiguous(sampled):
            ids = segment.token_ids
            expected = logprobs_here(vllm.model, ids[: part[0]], ids[part[0] : part[-1] + 1])
            assert segment.logprobs[part[0] : part[-1] + 1] == pytest.approx(expected, abs=2e-4)
