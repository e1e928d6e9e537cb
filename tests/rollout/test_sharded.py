"""A pipeline over several shards: whole groups in small portions, losses of shards, nothing twice and nothing missing.

The shards are real ones on the test's own loop, behind a link that can be cut or fall silent, in virtual time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyenv.engines.scripted import ScriptedEngine
from skyenv.errors import ConfigError, EngineUnavailable, ShardLost, SkyEnvError
from skyenv.types import Failure, Message, Segment, StopReason, ToolCall, Trajectory, Turn
from skyenv.vector.merged import merged_numbers
from skyenv.vector.metrics import Meter
from skyenv.vector.pipeline import RolloutPipeline, StageWidths
from skyenv.vector.progress import PipelineEvent
from skyenv.vector.shard import Shard
from skyenv.vector.sharded import ShardedPipeline, ShardLink, ShardRules
from skyenv.vector.stopping import FailureThreshold
from skyenv.vector.timeline import Lifeline, TimelineFile, read_timeline
from skyenv.vector.wire import Beat, End, Lived, PipelineSpec, Portion, Result, Word, read_words, write_words
from tests.rollout.adventure import RENDERER, WIN, Adventure, Ledger, Plan, virtual

NEVER = FailureThreshold(share=1.0)


class Link:
    """A way to a shard that can be cut (it died) or frozen (it says nothing more)."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.dead = anyio.Event()
        self.frozen = False
        self.groups: list[int] = []

    async def open(self) -> int:
        return await self._asked(self.shard.open)

    async def submit(self, portion: Portion) -> None:
        self.groups.append(portion.group_id)
        await self._asked(self.shard.submit, portion)

    async def cancel(self, number: int) -> None:
        await self._asked(self.shard.cancel, number)

    async def announce(self, version: int) -> None:
        await self._asked(self.shard.announce, version)

    async def step(self) -> Mapping[str, float]:
        return await self._asked(self.shard.step)

    async def take(self, seconds: float) -> Sequence[Word]:
        return await self._asked(self.shard.take, seconds)

    async def _asked(self, method: Callable[..., Any], *arguments: Any) -> Any:
        if self.dead.is_set():
            raise ShardLost("cut")
        if self.frozen:
            await anyio.sleep_forever()
        answers: list[Any] = []
        async with anyio.create_task_group() as group:

            async def ask() -> None:
                answers.append(await method(*arguments))
                group.cancel_scope.cancel()

            async def watch() -> None:
                await self.dead.wait()
                group.cancel_scope.cancel()

            group.start_soon(ask)
            group.start_soon(watch)
        if not answers:
            raise ShardLost("cut")
        if self.frozen:
            await anyio.sleep_forever()
        return answers[0]


@dataclass
class Fleet:
    """Starts shards, and keeps what a test wants to know of them."""

    plan: Callable[[str, int], Plan] = lambda task_id, shard: Plan(init=1.0, step=1.0)
    widths: StageWidths = field(default_factory=lambda: StageWidths(init=2, run=4, eval=2, live=4))
    script: Any = WIN
    lives: int = 1 << 30
    timeline: bool = False
    ledgers: dict[int, Ledger] = field(default_factory=dict)
    links: dict[int, Link] = field(default_factory=dict)
    started: Counter[int] = field(default_factory=Counter)
    groups: dict[int, list[int]] = field(default_factory=dict)

    @asynccontextmanager
    async def start(self, index: int) -> AsyncIterator[ShardLink]:
        self.started[index] += 1
        if self.started[index] > self.lives:
            raise ShardLost("no machine")
        ledger = self.ledgers.setdefault(index, Ledger())

        @asynccontextmanager
        async def opened() -> AsyncIterator[RolloutPipeline]:
            yield RolloutPipeline(
                engine=ScriptedEngine(RENDERER, self.script),
                make_env=lambda: Adventure(ledger, lambda task_id: self.plan(task_id, index)),
                renderer=RENDERER,
                widths=self.widths,
                meter=Meter(timeline=self.timeline),
            )

        shard = Shard(opened)
        link = self.links[index] = Link(shard)
        self.groups.setdefault(index, link.groups)
        try:
            yield link
        finally:
            await shard.close()

    def pipeline(self, on_event: Any = None, **rules: Any) -> ShardedPipeline:
        return ShardedPipeline(self.start, ShardRules(**{"shards": 2, "pause": 1.0, **rules}), on_event)

    @property
    def live(self) -> int:
        return sum(ledger.live for ledger in self.ledgers.values())


async def drain(run: AsyncIterator[Trajectory], into: list[Trajectory]) -> None:
    """What comes until the run ends or raises."""
    async for trajectory in run:
        into.append(trajectory)  # noqa: PERF401


def tasks(count: int) -> list[str]:
    return [f"q{n}" for n in range(count)]


def places(found: Sequence[Trajectory]) -> list[tuple[str, int, int]]:
    return sorted((t.task_id, t.group_id, t.sample_index) for t in found)


def wanted(count: int, group_size: int) -> list[tuple[str, int, int]]:
    return sorted((f"q{n}", n, sample) for n in range(count) for sample in range(group_size))


def test_every_sample_comes_back_once_and_its_group_stays_together() -> None:
    fleet = Fleet()

    async def main() -> None:
        async with fleet.pipeline() as pipeline:
            run = pipeline.run(tasks(9), 3)
            found = [trajectory async for trajectory in run]
            assert places(found) == wanted(9, 3)
            assert all(t.reward == 1.0 and t.attempts == 1 for t in found)
            assert fleet.live == 0
            assert (run.progress.done, run.progress.total, run.progress.queued, run.progress.live) == (27, 27, 0, 0)
            numbers = run.numbers
            assert numbers["trajectories/done"] == 27
            assert numbers["stage/init/width"] == pytest.approx(4.0)
            assert numbers["stage/init/service_p50"] == pytest.approx(1.0)
            assert numbers["stage/run/service_max"] == pytest.approx(3.0)
            assert 0.3 < numbers["stage/run/utilisation"] <= 1
        assert fleet.groups[0]
        assert sorted(fleet.groups[0] + fleet.groups[1]) == list(range(9))

    virtual(main)


def test_a_fast_shard_takes_more() -> None:
    fleet = Fleet(plan=lambda task_id, shard: Plan(init=1.0, step=1.0 + 9.0 * shard))

    async def main() -> float:
        async with fleet.pipeline() as pipeline:
            begun = anyio.current_time()
            found = [t async for t in pipeline.run(tasks(40), 2)]
            assert places(found) == wanted(40, 2)
            return anyio.current_time() - begun

    seconds = virtual(main)
    assert len(fleet.groups[0]) > 4 * len(fleet.groups[1])
    # 80 samples of 3 steps, 4 at a time: the fast one alone needs 60 s and more, the slow one 600.
    assert seconds < 120


def test_a_lost_shard_s_unfinished_samples_run_again_elsewhere_and_only_they() -> None:
    fleet = Fleet(plan=lambda task_id, shard: Plan(init=1.0, step=1.0 + shard))
    retried: list[str] = []

    def on_event(event: PipelineEvent) -> None:
        if event.kind == "retry":
            retried.append(event.task_id)

    async def main() -> list[Trajectory]:
        async with fleet.pipeline(on_event, silence=20.0) as pipeline, anyio.create_task_group() as group:

            async def cut() -> None:
                await anyio.sleep(6.0)
                fleet.links[1].dead.set()

            group.start_soon(cut)
            return [t async for t in pipeline.run(tasks(8), 4)]

    found = virtual(main)
    assert places(found) == wanted(8, 4)
    assert all(t.reward == 1.0 for t in found)
    assert retried
    assert fleet.started[1] == 2
    again = [t for t in found if "shards_lost" in t.counters]
    assert len(again) == len(retried)


def test_a_silent_shard_is_lost_and_what_it_says_later_is_not_heard() -> None:
    fleet = Fleet()

    async def main() -> list[Trajectory]:
        async with fleet.pipeline(silence=10.0, beat=2.0) as pipeline, anyio.create_task_group() as group:

            async def freeze() -> None:
                await anyio.sleep(2.5)
                fleet.links[0].frozen = True

            group.start_soon(freeze)
            return [t async for t in pipeline.run(tasks(6), 4)]

    found = virtual(main)
    assert places(found) == wanted(6, 4)
    assert fleet.started[0] == 2


def test_a_group_that_loses_every_shard_ends_in_typed_failures() -> None:
    fleet = Fleet()

    async def main() -> list[Trajectory]:
        async with fleet.pipeline(max_losses=2, failures=NEVER) as pipeline, anyio.create_task_group() as group:

            async def cut() -> None:
                while True:
                    await anyio.sleep(1.0)
                    for link in fleet.links.values():
                        link.dead.set()

            group.start_soon(cut)
            found = [t async for t in pipeline.run(tasks(3), 2)]
            group.cancel_scope.cancel()
        return found

    found = virtual(main)
    assert places(found) == wanted(3, 2)
    for t in found:
        assert t.failure is not None
        assert (t.failure.kind, t.stop_reason, t.reward) == ("ShardLost", StopReason.SANDBOX_ERROR, None)
        assert t.counters["shards_lost"] == 3


def test_no_shard_left_ends_the_run_with_the_reason() -> None:
    fleet = Fleet(lives=1)

    async def main() -> None:
        async with fleet.pipeline(max_starts=2) as pipeline, anyio.create_task_group() as group:

            async def cut() -> None:
                await anyio.sleep(2.0)
                for link in fleet.links.values():
                    link.dead.set()

            group.start_soon(cut)
            with pytest.raises(ShardLost, match=r"no shard is left.*no machine"):
                async for _ in pipeline.run(tasks(50), 2):
                    pass
            with pytest.raises(ShardLost, match="no shard is left"):
                async for _ in pipeline.run(tasks(1), 2):
                    pass

    virtual(main)
    assert fleet.live == 0


def test_none_can_be_started() -> None:
    async def main() -> None:
        with pytest.raises(ShardLost, match="no machine"):
            async with Fleet(lives=0).pipeline(max_starts=2):
                pass

    virtual(main)


def test_a_wrong_configuration_is_said_at_once() -> None:
    @asynccontextmanager
    async def wrong() -> AsyncIterator[RolloutPipeline]:
        raise ConfigError("tasks: there is no such set")
        yield

    @asynccontextmanager
    async def start(index: int) -> AsyncIterator[ShardLink]:
        shard = Shard(wrong)
        try:
            yield shard
        finally:
            await shard.close()

    async def main() -> None:
        with pytest.raises(ConfigError, match="no such set"):
            async with ShardedPipeline(start):
                pass

    virtual(main)


@dataclass
class Opening(Fleet):
    """A fleet whose shards do `open` first, each time they are started, with their index and which start it is."""

    opening: Callable[[int, int], Awaitable[None]] = field(kw_only=True)

    @asynccontextmanager
    async def start(self, index: int) -> AsyncIterator[ShardLink]:
        async with super().start(index) as link:
            assert isinstance(link, Link)
            whole, number = link.shard._open_pipeline, self.started[index]

            @asynccontextmanager
            async def opened() -> AsyncIterator[RolloutPipeline]:
                await self.opening(index, number)
                async with whole() as pipeline:
                    yield pipeline

            link.shard._open_pipeline = opened
            yield link


@pytest.mark.parametrize("trouble", ["hangs", "is not answered", "has a bug", "dies"])
def test_a_shard_whose_opening_fails_is_started_again_beside_the_others(trouble: str) -> None:
    async def opening(index: int, number: int) -> None:
        if index == 0 or number > 2:
            return
        if trouble == "is not answered":
            raise EngineUnavailable("no server yet")
        if trouble == "has a bug":
            raise ValueError("half a machine")
        if trouble == "dies":
            fleet.links[index].dead.set()
        await anyio.sleep_forever()

    fleet = Opening(opening=opening, plan=lambda task_id, shard: Plan(init=10.0, step=10.0))

    async def main() -> list[Trajectory]:
        async with fleet.pipeline(start_timeout=20.0) as pipeline:
            return [trajectory async for trajectory in pipeline.run(tasks(12), 2)]

    found = virtual(main)
    assert places(found) == wanted(12, 2)
    assert all(t.reward == 1.0 for t in found)
    assert (fleet.started[0], fleet.started[1]) == (1, 3)
    assert fleet.groups[1] or fleet.links[1].groups
    assert fleet.live == 0


@pytest.mark.parametrize("way", ["break", "cancel", "close"])
def test_leaving_a_run_frees_everything_on_every_shard(way: str) -> None:
    fleet = Fleet(plan=lambda task_id, shard: Plan(init=1.0, step=1.0, close=2.0))

    async def main() -> None:
        async with fleet.pipeline() as pipeline:
            with anyio.CancelScope() as scope:
                async with pipeline.run(tasks(20), 2) as run:
                    async for _ in run:
                        if way == "break":
                            break
                        if way == "cancel":
                            scope.cancel()
                        else:
                            await run.aclose()
            assert fleet.live == 0
            assert all(link.shard._scopes == {} for link in fleet.links.values())
            again = [t async for t in pipeline.run(tasks(2), 2, first_group=5)]
            assert sorted((t.group_id, t.sample_index) for t in again) == [(5, 0), (5, 1), (6, 0), (6, 1)]
        assert fleet.live == 0

    virtual(main)


def test_leaving_the_pipeline_ends_its_runs() -> None:
    fleet = Fleet()

    async def main() -> None:
        async with fleet.pipeline() as pipeline:
            run = pipeline.run(tasks(20), 2)
            await anext(run)
        assert fleet.live == 0
        with pytest.raises(SkyEnvError, match="was closed"):
            await drain(run, [])

    virtual(main)


def test_too_many_failures_over_all_shards_end_the_run() -> None:
    fleet = Fleet(plan=lambda task_id, shard: Plan(init_error=SkyEnvError("bad image")))

    async def main() -> None:
        async with fleet.pipeline(failures=FailureThreshold(0.5, 8)) as pipeline:
            found: list[Trajectory] = []
            with pytest.raises(SkyEnvError, match=r"8 of 8 trajectories failed, 8 of them in init.*bad image"):
                await drain(pipeline.run(tasks(50), 2), found)
            assert len(found) == 8

    virtual(main)


def test_enough_siblings_count_over_shards() -> None:
    fleet = Fleet(plan=lambda task_id, shard: Plan(step=1.0), widths=StageWidths(init=1, run=1, eval=1, live=1))

    async def main() -> list[Trajectory]:
        async with fleet.pipeline(shards=1) as pipeline, anyio.create_task_group() as group:

            async def cut() -> None:
                await anyio.sleep(5.0)  # the first of two is done, the second under way
                fleet.links[0].dead.set()

            group.start_soon(cut)
            return [t async for t in pipeline.run(tasks(1), 4, enough=2)]

    found = virtual(main)
    assert places(found) == wanted(1, 4)
    assert sum(t.reward is not None for t in found) == 2
    assert sum(t.stop_reason is StopReason.CANCELLED for t in found) == 2


def test_every_shard_stamps_the_announced_version_also_one_that_comes_later() -> None:
    fleet = Fleet()

    async def main() -> None:
        async with fleet.pipeline() as pipeline:
            await pipeline.announce(7)
            await anyio.sleep(0.1)
            found = [t async for t in pipeline.run(tasks(4), 2)]
            assert {turn.policy_version for t in found for turn in t.turns} == {7}
            fleet.links[0].dead.set()
            await anyio.sleep(10.0)
            assert fleet.started[0] == 2
            found = [t async for t in pipeline.run(tasks(6), 2)]
            assert {turn.policy_version for t in found for turn in t.turns} == {7}

    virtual(main)


def test_an_urgent_run_overtakes() -> None:
    fleet = Fleet(widths=StageWidths(init=1, run=1, eval=1, live=1))
    order: list[str] = []

    async def main() -> None:
        async with fleet.pipeline(shards=1) as pipeline, anyio.create_task_group() as group:

            async def one(name: str, count: int, priority: int) -> None:
                async for _ in pipeline.run(tasks(count), 1, priority=priority):
                    order.append(name)  # noqa: PERF401  as they come

            group.start_soon(one, "training", 5, 0)
            await anyio.sleep(1.0)
            group.start_soon(one, "evaluation", 2, 1)

    virtual(main)
    assert order[:3] == ["training", "evaluation", "evaluation"]


def test_tasks_are_taken_as_there_is_room_and_as_results_are_read() -> None:
    fleet = Fleet()
    taken: list[int] = []

    def stream() -> Any:
        for number in range(100):
            taken.append(number)
            yield f"q{number}"

    async def main() -> None:
        async with fleet.pipeline(most_unread=6) as pipeline:
            run = pipeline.run(stream(), 2)
            await anext(run)
            await anyio.sleep(1000.0)
            # 4 alive on each of two shards, and at most 6 results that were not read.
            assert len(taken) <= (8 + 6) // 2 + 1
            rest = [t async for t in run]
            assert len(rest) == 199

    virtual(main)


def test_a_broken_stream_of_tasks_ends_the_run() -> None:
    def stream() -> Any:
        yield "q0"
        raise OSError("disk")

    async def main() -> None:
        async with Fleet().pipeline() as pipeline:
            with pytest.raises(SkyEnvError, match=r"tasks: OSError: disk"):
                async for _ in pipeline.run(stream(), 2):
                    pass

    virtual(main)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_whatever_is_cut_or_frozen_nothing_is_missing_or_twice(data: Any) -> None:
    shards = data.draw(st.integers(1, 4), "shards")
    count, group_size = data.draw(st.integers(0, 12), "tasks"), data.draw(st.integers(1, 5), "group size")
    live = data.draw(st.integers(1, 6), "live")
    step = data.draw(st.lists(st.floats(0, 8), min_size=5, max_size=5), "seconds a step")
    faults = data.draw(
        st.lists(st.tuples(st.floats(0, 60), st.integers(0, shards - 1), st.booleans()), max_size=8), "faults"
    )
    enough = data.draw(st.none() | st.integers(1, group_size), "enough")
    stop_after = data.draw(st.none() | st.integers(0, count * group_size), "stop after")
    fleet = Fleet(
        plan=lambda task_id, shard: Plan(init=1.0, step=step[(int(task_id[1:]) + shard) % 5], close=0.5),
        widths=StageWidths(init=2, run=live, eval=1, live=live),
    )

    async def main() -> None:
        async with fleet.pipeline(shards=shards, silence=15.0, beat=4.0, max_losses=2, failures=NEVER) as pipeline:
            async with anyio.create_task_group() as group:

                async def fault(at: float, index: int, cut: bool) -> None:
                    await anyio.sleep(at)
                    if index in fleet.links and cut:
                        fleet.links[index].dead.set()
                    elif index in fleet.links:
                        fleet.links[index].frozen = True

                for each in faults:
                    group.start_soon(fault, *each)
                found: list[Trajectory] = []
                with anyio.fail_after(10_000):
                    async with pipeline.run(tasks(count), group_size, enough=enough) as run:
                        async for trajectory in run:
                            found.append(trajectory)
                            if stop_after is not None and len(found) > stop_after:
                                break
                assert len(set(places(found))) == len(found)
                if stop_after is None or len(found) <= stop_after:
                    assert places(found) == wanted(count, group_size)
                    assert run.progress.done == count * group_size
                    assert (run.progress.live, run.progress.queued) == (0, 0)
                for t in found:
                    assert (t.reward is None) == (t.failure is not None)
                    assert t.failure is None or t.failure.kind in ("ShardLost", "GroupComplete")
                if not faults and enough is None:
                    assert all(t.reward == 1.0 for t in found)
                group.cancel_scope.cancel()
        assert fleet.live == 0
        assert all(ledger.peak <= live for ledger in fleet.ledgers.values())

    virtual(main)


TEXT = st.text(max_size=20)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_what_was_written_is_read(data: Any) -> None:
    text = data.draw(TEXT)
    trajectory = Trajectory(
        text,
        data.draw(st.integers(0, 9)),
        prompt=(Message("user", text),),
        segments=[Segment([1, 2], [0, 1], [0.0, -0.1])],
        turns=[Turn(text, (ToolCall("go", {"to": text}),), text, "stop", 3, 0.1, 0.2)],
        reward=data.draw(st.none() | st.floats(0, 1)),
        failure=data.draw(st.none() | st.just(Failure("run", "ShardLost", text))),
        stop_reason=StopReason.FINISH,
        verdict={"patch": text},
    )
    words: list[Word] = [
        Result(7, trajectory),
        End(7, data.draw(st.none() | TEXT), data.draw(st.booleans())),
        Beat({"stage/init/width": data.draw(st.floats(0, 9))}, {3: (0, 1, 2, 3, 4, 5, 6)}),
        Lived(1.5, (Lifeline(text, 1, 2, text, trajectory.reward, (("init", 0.0, 1.25),), ((2.0, 3.5),)),)),
    ]
    assert read_words(write_words(words)) == words
    portion = Portion(1, text, 2, (0, 3), data.draw(st.none() | st.integers(1, 3)), -1)
    assert Portion.from_bytes(portion.to_bytes()) == portion
    spec = PipelineSpec("a.b:c", {"x": [1, {"y": text}]})
    assert PipelineSpec.from_bytes(spec.to_bytes()) == spec


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shards": 0}, "at least 1"),
        ({"beat": 60.0}, "below silence"),
    ],
)
def test_rules_that_cannot_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ShardRules(**options)


@pytest.mark.parametrize("cut", [False, True])
def test_the_timeline_of_a_sharded_run_is_whole(cut: bool, tmp_path: Path) -> None:
    """Every trajectory that came back is on it once, whichever shard it came from, and however many were lost."""
    fleet = Fleet(plan=lambda task_id, shard: Plan(init=1.0, step=1.0 + shard), timeline=True)

    async def main() -> tuple[ShardedPipeline, list[Trajectory]]:
        async with fleet.pipeline() as pipeline, anyio.create_task_group() as group:

            async def kill() -> None:
                await anyio.sleep(9.0)
                fleet.links[1].dead.set()

            if cut:
                group.start_soon(kill)
            return pipeline, [trajectory async for trajectory in pipeline.run(tasks(8), 4)]

    pipeline, found = virtual(main)
    path = tmp_path / "timeline.jsonl"
    TimelineFile(path).append(pipeline.take_lifelines(), pipeline.origin)
    assert pipeline.take_lifelines() == []
    lines = {(line.task_id, line.sample_index): line for line in read_timeline(path)}
    assert len(lines) == len(found) == 32
    for trajectory in found:
        line = lines[trajectory.task_id, trajectory.sample_index]
        seconds = Counter[str]()
        for state, start, end in line.spans:
            seconds[state] += end - start
        assert seconds == pytest.approx(trajectory.seconds, abs=1e-3)
        assert len(line.generations) == len(trajectory.turns)


def test_numbers_since_the_last_time_are_those_of_the_shards_that_answer() -> None:
    fleet = Fleet()

    async def main() -> None:
        async with fleet.pipeline() as pipeline:
            for count in (9, 4):
                async with pipeline.run(tasks(count), 3) as run:
                    assert len([trajectory async for trajectory in run]) == 3 * count
                numbers = await pipeline.step()
                assert (numbers["trajectories/done"], numbers["shards/up"]) == (3 * count, 2)
                assert numbers["stage/run/service_p50"] == pytest.approx(3.0)
            while pipeline.numbers()["trajectories/done"] < 39:  # the last signs of life
                await anyio.sleep(1)
            before = len(fleet.groups[1])
            async with pipeline.run(tasks(4), 3) as run:
                assert len([trajectory async for trajectory in run]) == 12
            fleet.links[0].frozen = True  # the other one's remain
            assert (await pipeline.step())["trajectories/done"] == 3 * (len(fleet.groups[1]) - before)

    virtual(main)


def test_numbers_of_several_meters_are_those_of_one() -> None:
    one = {"trajectories/done": 3.0, "stage/run/width": 2.0, "stage/run/utilisation": 1.0, "engine/latency_max": 5.0}
    two = {"trajectories/done": 1.0, "stage/run/width": 6.0, "stage/run/utilisation": 0.0, "engine/latency_max": 7.0}
    one |= {"engine/latency_p50": 4.0, "engine/sampled_tokens_per_second": 10.0, "sandboxes/live_max": 2.0}
    two |= {"engine/latency_p50": 8.0, "engine/sampled_tokens_per_second": 30.0, "sandboxes/live_max": 6.0}
    assert merged_numbers([one, {}, two]) == {
        "trajectories/done": 4.0,
        "stage/run/width": 8.0,
        "stage/run/utilisation": 0.25,
        "engine/latency_max": 7.0,
        "engine/latency_p50": 5.0,
        "engine/sampled_tokens_per_second": 40.0,
        "sandboxes/live_max": 8.0,
    }


def test_options_that_are_no_data() -> None:
    with pytest.raises(ConfigError, match="JSON values"):
        PipelineSpec("a:b", {"x": object()}).to_bytes()
