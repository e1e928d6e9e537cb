"""Admission: ranks, widths that follow the load, shared stages, deadlines of every wait, groups that have enough."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyenv.engines.scripted import ScriptedEngine
from skyenv.errors import ConfigError
from skyenv.types import Limits, StopReason, Trajectory
from skyenv.vector.lanes import Lane, Stages, StageWidths
from skyenv.vector.pipeline import RolloutPipeline
from skyenv.vector.progress import PipelineEvent
from tests.rollout.adventure import RENDERER, WIN, Adventure, Ledger, Plan, Quest, virtual


def pipeline(ledger: Ledger, plan: Any = Plan(), script: Any = WIN, **options: Any) -> RolloutPipeline:  # noqa: B008
    planned = plan if callable(plan) else lambda task_id: plan
    engine = ScriptedEngine(RENDERER, script)
    return RolloutPipeline(engine=engine, make_env=lambda: Adventure(ledger, planned), renderer=RENDERER, **options)


def quests(count: int, prefix: str = "q") -> list[Quest]:
    return [Quest(f"{prefix}{n}") for n in range(count)]


async def drain(pipeline: RolloutPipeline, tasks: Any, group_size: int, **options: Any) -> list[Trajectory]:
    return [trajectory async for trajectory in pipeline.run(tasks, group_size, **options)]


# Lanes


def test_the_lowest_rank_goes_first_and_equals_in_their_order() -> None:
    served: list[str] = []

    async def main() -> None:
        lane = Lane(1)

        async def one(rank: int, name: str) -> None:
            async with lane.slot((rank,)):
                served.append(name)
                await anyio.sleep(1)

        async with anyio.create_task_group() as group:
            for number, (rank, name) in enumerate([(5, "first"), (3, "c"), (1, "a"), (3, "d"), (2, "b")]):
                group.start_soon(one, rank, name)
                await anyio.sleep(0.1 if number == 0 else 0.01)

    virtual(main)
    assert served == ["first", "a", "b", "c", "d"]


def test_a_narrowed_lane_hands_out_nothing_until_it_fits() -> None:
    async def main() -> list[int]:
        lane, seen = Lane(3), list[int]()

        async def one(seconds: float) -> None:
            async with lane.slot():
                seen.append(lane.busy)
                await anyio.sleep(seconds)

        async with anyio.create_task_group() as group:
            for seconds in (1.0, 2.0, 3.0, 1.0):
                group.start_soon(one, seconds)
                await anyio.sleep(0.01)
            await anyio.sleep(0.5)
            lane.width = 1
            await anyio.sleep(2.0)
            assert (lane.busy, lane.waiting) == (1, 1)
        lane.width = 5
        assert (lane.busy, lane.waiting) == (0, 0)
        return seen

    assert virtual(main) == [1, 2, 3, 1]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5), st.booleans(), st.integers(0, 3)), max_size=20), st.data())
def test_slots_are_never_lost_or_doubled(visits: list[tuple[float, float, bool, int]], data: st.DataObject) -> None:
    width = data.draw(st.integers(1, 4))

    async def main() -> None:
        lane, held, peak = Lane(width), 0, 0

        async def one(patience: float, seconds: float, hurry: bool, rank: int) -> None:
            nonlocal held, peak
            with anyio.move_on_after(patience if hurry else 1e6):
                async with lane.slot((rank,)):
                    held += 1
                    peak = max(peak, held)
                    try:
                        await anyio.sleep(seconds)
                    finally:
                        held -= 1

        async with anyio.create_task_group() as group:
            for visit in visits:
                group.start_soon(one, *visit)
        assert peak <= width
        assert (lane.busy, lane.waiting, held) == (0, 0, 0)

    virtual(main)


# Widths that follow the load


def test_init_widens_while_the_run_stage_starves_and_narrows_again() -> None:
    widths = StageWidths(init=1, run=8, eval=8, live=16, most_init=8)
    peaks: list[int] = []
    took = {}

    async def main(widths: StageWidths) -> float:
        started = anyio.current_time()
        note = peaks.append if widths.most_init else lambda _: None
        events = lambda event: note(event.progress.init)  # noqa: E731
        plan = Plan(init=8.0, step=1.0, evaluate=1.0)
        assert len(await drain(pipeline(Ledger(), plan, widths=widths, on_event=events), quests(40), 1)) == 40
        return anyio.current_time() - started

    for name, chosen in (("follow", widths), ("fixed", StageWidths(init=1, run=8, eval=8, live=16))):
        took[name] = virtual(lambda chosen=chosen: main(chosen))
    assert max(peaks) > 2
    assert took["follow"] < took["fixed"] / 3


def test_eval_widens_while_finished_trajectories_wait() -> None:
    async def main(most: int | None) -> tuple[float, int]:
        started, peak = anyio.current_time(), 0

        def note(event: PipelineEvent) -> None:
            nonlocal peak
            peak = max(peak, event.progress.eval)

        widths = StageWidths(init=8, run=8, eval=1, live=16, most_eval=most)
        await drain(pipeline(Ledger(), Plan(evaluate=10.0), widths=widths, on_event=note), quests(30), 1)
        return anyio.current_time() - started, peak

    (fixed, one), (follow, several) = virtual(lambda: main(None)), virtual(lambda: main(6))
    assert one == 1
    assert 1 < several <= 6
    assert follow < fixed / 3


@pytest.mark.parametrize("options", [{"init": 4, "most_init": 3}, {"eval": 2, "most_eval": 1}, {"live": 0}])
def test_widths_that_cannot_work(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="widths"):
        StageWidths(**options)


# Shared stages


def test_evaluation_overtakes_training_and_both_share_the_cap() -> None:
    ledger, order = Ledger(), list[str]()

    async def main() -> None:
        stages = Stages(StageWidths(init=2, run=2, eval=2, live=3))
        plan = Plan(init=1.0, step=1.0, evaluate=1.0)
        training, evaluation = (pipeline(ledger, plan, stages=stages) for _ in range(2))

        async def run(pipeline: RolloutPipeline, prefix: str, priority: int) -> None:
            order.extend([t.task_id[0] for t in await drain(pipeline, quests(8, prefix), 1, priority=priority)])
            order.append(f"{prefix} done")

        async with anyio.create_task_group() as group:
            group.start_soon(run, training, "t", 0)
            await anyio.sleep(2.0)
            group.start_soon(run, evaluation, "e", 1)

    virtual(main)
    assert order.index("e done") < order.index("t done")
    assert ledger.peak <= 3
    assert ledger.live == 0


# Deadlines of every wait


def test_a_wait_for_a_slot_ends_typed() -> None:
    async def main() -> list[Trajectory]:
        limits = Limits(queue_timeout=50.0, wall_clock=1e6, turn_timeout=1e6)
        widths = StageWidths(init=4, run=1, eval=1, live=4)
        plan = lambda task_id: Plan(step=1000.0 if task_id == "q0" else 0.0)  # noqa: E731
        return await drain(pipeline(Ledger(), plan, widths=widths, limits=limits, max_attempts=1), quests(2), 1)

    late = next(t for t in virtual(main) if t.failure is not None)
    assert late.failure is not None
    assert (late.task_id, late.failure.kind, late.failure.stage) == ("q1", "DeadlineExceeded", "run")
    assert "no slot of the run stage within 50 s" in late.failure.message


@pytest.mark.parametrize("enough", [None, 1])
def test_a_wait_for_a_place_among_the_living_ends_typed(enough: int | None) -> None:
    ledger = Ledger()

    async def main() -> tuple[list[Trajectory], float]:
        stages = Stages(StageWidths(live=2))
        await stages.live.acquire()  # others keep one place for ever, q0 the other one
        limits = Limits(admission_timeout=50.0, wall_clock=1e6, turn_timeout=1e6)
        plan = lambda task_id: Plan(step=40.0)  # noqa: E731
        started = anyio.current_time()
        found = await drain(pipeline(ledger, plan, stages=stages, limits=limits), quests(1), 4, enough=enough)
        assert (stages.live.busy, stages.live.waiting) == (1, 0)
        return found, anyio.current_time() - started

    found, seconds = virtual(main)
    assert sorted(t.sample_index for t in found) == [0, 1, 2, 3]
    failures = [t.failure for t in found if t.failure is not None]
    if enough:  # q0 is enough once it is back, and nobody waits any longer then
        assert [f.kind for f in failures] == ["DeadlineExceeded", "DeadlineExceeded", "GroupComplete"]
        assert seconds == 120.0
    else:
        assert [f.kind for f in failures] == ["DeadlineExceeded", "DeadlineExceeded"]
        assert seconds == 240.0
    assert "no place among the 2 living environments within 50 s" in failures[0].message
    assert ledger.live == 0


def test_a_consumer_that_does_not_read_holds_back_admission() -> None:
    ledger = Ledger()

    async def main() -> None:
        async with pipeline(ledger, most_unread=3, widths=StageWidths(live=2)).run(quests(50), 1) as run:
            first = await anext(run)
            await anyio.sleep(1e6)
            assert 3 < ledger.made <= 1 + 3 + 2
            assert ledger.live == 0
            assert {first.task_id, *[t.task_id async for t in run]} == {f"q{n}" for n in range(50)}

    virtual(main)


def test_a_trajectory_has_a_deadline_over_all_attempts() -> None:
    ledger = Ledger()

    async def main() -> list[Trajectory]:
        limits = Limits(trajectory_timeout=250.0, init_timeout=100.0)
        rolled = pipeline(ledger, Plan(init=1e6), limits=limits, max_attempts=9)
        return await drain(rolled, quests(1), 1)

    (trajectory,) = virtual(main)
    assert trajectory.failure is not None
    assert trajectory.failure.kind == "DeadlineExceeded"
    assert "250 s" in trajectory.failure.message
    assert (ledger.live, ledger.made) == (0, 3)


def test_who_stalls_is_named_once_with_its_stage(caplog: pytest.LogCaptureFixture) -> None:
    events: list[PipelineEvent] = []

    async def main() -> None:
        plan = lambda task_id: Plan(step=500.0 if task_id == "q1" else 1.0)  # noqa: E731
        rolled = pipeline(Ledger(), plan, stall_after=100.0, on_event=events.append, limits=Limits(turn_timeout=1e6))
        await drain(rolled, quests(3), 1)

    virtual(main)
    stalled = [event for event in events if event.kind == "stalled"]
    assert [(event.task_id, event.state) for event in stalled] == [("q1", "run")]
    assert "q1 sample 0 has been in run for 100 s" in caplog.text


# Groups that have enough


@pytest.mark.parametrize("width", [2, 32])
def test_a_group_with_enough_usable_siblings_cancels_the_rest(width: int) -> None:
    ledger = Ledger()
    slow = iter(range(100))

    async def main() -> list[Any]:
        plan = lambda task_id: Plan(step=1.0 if next(slow) % 5 else 5000.0)  # noqa: E731
        widths = StageWidths(init=width, run=width, eval=width, live=width)
        rolled = pipeline(ledger, plan, widths=widths, limits=Limits(wall_clock=1e6, turn_timeout=1e6))
        groups = [group async for group in rolled.run_groups(quests(4), 6, enough=4)]
        assert anyio.current_time() < 1e4 or width == 2
        return groups

    for group in virtual(main):
        assert len(group.trajectories) == 6
        rewarded = [t for t in group.trajectories if t.reward is not None]
        cancelled = [t for t in group.trajectories if t.stop_reason is StopReason.CANCELLED]
        assert len(rewarded) >= 4
        assert len(rewarded) + len(cancelled) == 6
        assert all(t.failure is not None and t.failure.kind == "GroupComplete" for t in cancelled)
    assert ledger.live == 0


async def test_cancelled_siblings_are_no_failures() -> None:
    run = pipeline(Ledger()).run(quests(6), 4, enough=1)
    found = [trajectory async for trajectory in run]
    assert len(found) == 24
    assert run.progress.failed == 0


@pytest.mark.parametrize("enough", [0, 5])
def test_enough_is_between_one_and_the_group(enough: int) -> None:
    with pytest.raises(ConfigError, match="enough"):
        pipeline(Ledger()).run(quests(1), 4, enough=enough)
