"""The pipeline over Ray: a real cluster of two nodes on this machine, real sandboxes, and a node that is killed."""

from __future__ import annotations

from collections.abc import Iterator

import anyio
import psutil
import pytest

from skyenv.errors import ConfigError
from skyenv.types import StopReason, Trajectory
from skyenv.vector.ray import ray_pipeline
from skyenv.vector.sharded import ShardRules
from skyenv.vector.wire import PipelineSpec
from tests.rollout.ray_nodes import LOOPBACK, RayNode, ray_nodes

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1200)]

TASK = "clamp-upper-bound"


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[RayNode]]:
    import ray

    with ray_nodes() as (address, nodes):
        ray.init(address=address, _node_ip_address=LOOPBACK, log_to_driver=False, logging_level="ERROR")
        try:
            yield nodes
        finally:
            ray.shutdown()


def spec(command: str, live: int = 2) -> PipelineSpec:
    return PipelineSpec("tests.rollout.shards:gold", {"tasks": [TASK], "command": command, "live": live})


def sleepers(mark: str) -> list[int]:
    """Processes of the machine, in sandboxes too, whose command line holds the mark."""
    every = psutil.process_iter(["cmdline"])
    return [process.pid for process in every if any(mark in word for word in process.info["cmdline"] or ())]


async def none_left(mark: str) -> None:
    with anyio.fail_after(100):
        while sleepers(mark):
            await anyio.sleep(0.1)


async def test_a_node_dies_in_the_middle_of_a_run(nodes: list[RayNode]) -> None:
    found: list[Trajectory] = []
    async with ray_pipeline(spec("sleep 1.0731"), ShardRules(shards=2, start_timeout=400.0)) as pipeline:
        with anyio.fail_after(400):
            while len(pipeline.shards) < 2:
                await anyio.sleep(0.05)
        run = pipeline.run([TASK] * 6, 2)
        async with run:
            async for trajectory in run:
                found.append(trajectory)
                if len(found) == 1:
                    await anyio.to_thread.run_sync(nodes[1].kill)
        numbers, lines = run.numbers, pipeline.take_lifelines()
    assert sorted((t.group_id, t.sample_index) for t in found) == [(g, s) for g in range(6) for s in range(2)]
    assert [(t.reward, t.stop_reason) for t in found] == [(1.0, StopReason.FINISH)] * 12
    assert any("shards_lost" in t.counters for t in found)
    assert (run.progress.done, run.progress.failed) == (12, 0)
    assert run.progress.retried >= 1
    assert numbers["trajectories/done"] == 12
    assert sorted((line.group_id, line.sample_index) for line in lines) == [(g, s) for g in range(6) for s in range(2)]
    assert all(line.generations and 0 <= line.start < line.end for line in lines)
    assert numbers["stage/run/service_p50"] > 1.0
    await none_left("1.0731")


async def test_leaving_a_run_frees_the_sandboxes_of_other_processes(nodes: list[RayNode]) -> None:
    async with ray_pipeline(spec("sleep 600.0732"), ShardRules(shards=1, beat=0.2)) as pipeline:
        async with pipeline.run([TASK] * 4, 2) as run:
            with anyio.move_on_after(400) as scope:
                async with anyio.create_task_group() as group:

                    async def until_both_run() -> None:
                        while run.progress.run < 2 or len(sleepers("600.0732")) < 2:
                            await anyio.sleep(0.05)
                        group.cancel_scope.cancel()

                    group.start_soon(until_both_run)
                    await anext(run)
            assert not scope.cancelled_caught
        assert sleepers("600.0732") == []
        assert run.progress.live == 0


async def test_what_a_shard_says_of_its_configuration_reaches_the_caller(nodes: list[RayNode]) -> None:
    with pytest.raises(ConfigError, match="there is no set of mine"):
        async with ray_pipeline(PipelineSpec("tests.rollout.shards:wrong", {"set": "of mine"})):
            pass
