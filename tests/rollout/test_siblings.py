"""What siblings share and what is opened in advance: init once a group, graders ahead, the next batch prefetched."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import anyio
import pytest

from skyenv.engines.scripted import ScriptedEngine
from skyenv.errors import ConfigError, EngineError, SandboxLost, SandboxUnavailable, SourceUnavailable
from skyenv.types import Limits, StopReason, Trajectory
from skyenv.vector.durations import Durations
from skyenv.vector.lanes import Stages, StageWidths
from skyenv.vector.pipeline import RolloutPipeline
from skyenv.vector.sharing import SharedInit
from tests.rollout.adventure import RENDERER, WIN, Plan, Quest, virtual
from tests.rollout.camp import Camp, Camper, Sharing


def pipeline(
    camp: Camp,
    plan: Callable[[str], Plan] = lambda task_id: Plan(),
    sharing: Sharing = Sharing(),  # noqa: B008
    **options: Any,
) -> RolloutPipeline:
    engine = ScriptedEngine(RENDERER, WIN)
    return RolloutPipeline(engine=engine, make_env=lambda: Camper(camp, plan, sharing), renderer=RENDERER, **options)


def quests(count: int) -> list[Quest]:
    return [Quest(f"q{n}") for n in range(count)]


def play(rolled: RolloutPipeline, tasks: int, group_size: int) -> tuple[list[Trajectory], float]:
    """All trajectories and the virtual seconds until the last of them."""

    async def main() -> tuple[list[Trajectory], float]:
        started = anyio.current_time()
        with anyio.fail_after(1e6):
            found = [t async for t in rolled.run(quests(tasks), group_size)]
        return found, anyio.current_time() - started

    found, took = virtual(main)
    keys = sorted((t.task_id, t.sample_index) for t in found)
    assert keys == sorted((f"q{n}", sample) for n in range(tasks) for sample in range(group_size))
    return found, took


class Sequence:
    """Plans in the order in which environments begin; the last one for all others."""

    def __init__(self, *plans: Plan) -> None:
        self._plans = list(plans)

    def __call__(self, task_id: str) -> Plan:
        return self._plans.pop(0) if len(self._plans) > 1 else self._plans[0]


# One prepares for all


def test_a_group_pays_for_one_preparation() -> None:
    camp = Camp()
    found, took = play(pipeline(camp), 2, 8)
    assert {t.reward for t in found} == {1.0}
    assert (camp.prepared, camp.forked, camp.offered, camp.snapshots, camp.live) == (2, 14, 2, 0, 0)
    assert took == pytest.approx(102.0, abs=1.0)  # the leaders prepare side by side, then all others fork


@pytest.mark.parametrize("options", [{"fork_groups": False}, {}])
def test_alone_nothing_is_offered(options: dict[str, bool]) -> None:
    camp = Camp()
    group_size = 8 if options else 1
    play(pipeline(camp, **options), 1, group_size)
    assert (camp.prepared, camp.forked, camp.offered) == (group_size, 0, 0)


def test_where_nothing_can_be_forked_siblings_prepare_side_by_side() -> None:
    camp = Camp()
    _, took = play(pipeline(camp, sharing=Sharing(can_fork=False)), 1, 8)
    assert (camp.prepared, camp.offered) == (8, 0)
    assert took == pytest.approx(200.0, abs=1.0)


def test_a_failed_preparation_is_handed_on_and_tried_again_alone() -> None:
    camp = Camp()
    plan = Sequence(Plan(init=50.0, init_error=SandboxLost("x")), Plan())
    found, _ = play(pipeline(camp, plan), 1, 4)
    assert sorted(t.attempts for t in found) == [1, 1, 1, 2]
    assert all(t.reward == 1.0 for t in found)
    assert (camp.prepared, camp.forked, camp.offered, camp.snapshots) == (2, 2, 1, 0)


def test_who_hangs_while_preparing_holds_up_nobody_for_longer_than_half_an_init() -> None:
    camp = Camp()
    limits = Limits(init_timeout=600.0)
    found, took = play(pipeline(camp, Sequence(Plan(init=1e9), Plan()), limits=limits), 1, 4)
    assert all(t.reward == 1.0 for t in found)
    others = sorted(t.seconds["init_wait"] for t in found)[1:]
    assert others == [300.0] * 3
    assert took == pytest.approx(600.0 + 100.0, abs=1.0)
    assert camp.snapshots == 0


def test_a_snapshot_that_cannot_be_started_from_is_tried_once() -> None:
    camp = Camp()
    found, _ = play(pipeline(camp, sharing=Sharing(fork_error=SandboxLost("gone"))), 1, 8)
    assert all((t.reward, t.attempts) == (1.0, 1) for t in found)
    assert (camp.forked, camp.prepared, camp.snapshots) == (0, 8, 0)


def test_a_sibling_whose_fork_fails_starts_alone_the_next_time() -> None:
    camp = Camp()
    found, _ = play(pipeline(camp, sharing=Sharing(fork_error=EngineError("odd"))), 1, 3)
    assert all(t.reward == 1.0 for t in found)
    assert sorted(t.attempts for t in found) == [1, 2, 2]
    assert camp.prepared == 3


def test_freeing_that_fails_costs_no_trajectory(caplog: pytest.LogCaptureFixture) -> None:
    camp = Camp()
    found, _ = play(pipeline(camp, sharing=Sharing(free_error=OSError("busy"))), 2, 3)
    assert len(found) == 6
    assert caplog.text.count("not freed") == 2


@pytest.mark.parametrize("live", [1, 2, 3])
@pytest.mark.parametrize("init", [1, 2])
def test_narrow_lanes_do_not_lock(live: int, init: int) -> None:
    camp = Camp()
    play(pipeline(camp, widths=StageWidths(init=init, run=1, eval=1, live=live)), 3, 4)
    assert camp.peak <= live
    assert (camp.prepared, camp.forked, camp.snapshots) == (3, 9, 0)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_leaving_early_frees_what_is_shared(backend: str) -> None:
    async def main() -> None:
        camp = Camp()
        plan = lambda task_id: Plan(step=0.0 if task_id == "q0" else 1e6)  # noqa: E731
        rolled = pipeline(camp, plan, Sharing(prepare=0.01, fork=0.0))
        async with aclosing(rolled.run(quests(3), 3)) as run:
            async for _ in run:
                while camp.snapshots < 2:
                    await anyio.sleep(0.01)
                break
        assert (camp.snapshots, camp.live) == (0, 0)

    anyio.run(main, backend=backend)


async def test_an_offer_is_made_once() -> None:
    async def free() -> None: ...

    shared = SharedInit()
    async with shared.beginning(1.0) as first, shared.beginning(0.0) as second:
        assert (first.wanted, second.wanted, second.snapshot) == (True, False, None)
        first.offer("s", free)
        assert (first.wanted, second.snapshot) == (False, "s")
        with pytest.raises(ValueError, match="wanted"):
            second.offer("other", free)


# Graders ahead


def test_graders_are_opened_while_agents_work_for_the_oldest_first() -> None:
    camp = Camp()
    widths = StageWidths(init=8, run=8, eval=8, ahead=2)
    found, _ = play(pipeline(camp, lambda _: Plan(step=10.0, evaluate=3.0), widths=widths, fork_groups=False), 1, 6)
    assert all(t.reward == 1.0 for t in found)
    assert (camp.opened_ahead, camp.most_graders, camp.graders) == (2, 2, 0)


@pytest.mark.parametrize("sharing", [Sharing(ahead=1e9), Sharing(ahead_error=SandboxUnavailable("full"))])
def test_a_grader_that_is_not_ready_costs_nothing(sharing: Sharing) -> None:
    camp = Camp()
    widths = StageWidths(ahead=4)
    found, took = play(pipeline(camp, lambda _: Plan(step=10.0), sharing, widths=widths, fork_groups=False), 1, 4)
    assert all((t.reward, t.attempts) == (1.0, 1) for t in found)
    assert (took, camp.opened_ahead) == (130.0, 0)


def test_failures_beside_a_grader_are_the_same_failures() -> None:
    camp = Camp()
    plan = Plan(step=10.0, step_error=SandboxLost("it died"))
    found, _ = play(pipeline(camp, lambda _: plan, widths=StageWidths(ahead=4)), 1, 2)
    assert {(t.stop_reason, t.failure and t.failure.stage) for t in found} == {(StopReason.SANDBOX_ERROR, "run")}
    assert camp.graders == 0


def test_slots_of_graders_come_back() -> None:
    stages = Stages(StageWidths(ahead=3))
    camp = Camp()
    rolled = pipeline(camp, Sequence(Plan(step=7.0, evaluate_error=SandboxLost("x")), Plan(step=7.0)), stages=stages)
    play(rolled, 4, 4)
    assert (stages.ahead.busy, stages.ahead.waiting, stages.live.busy) == (0, 0, 0)


def test_ahead_cannot_be_negative() -> None:
    with pytest.raises(ConfigError, match=r"widths\.ahead"):
        StageWidths(ahead=-1)


# Prefetch


async def test_prefetch_asks_for_what_may_be_alive() -> None:
    camp = Camp()
    rolled = pipeline(camp, widths=StageWidths(init=1, run=4, eval=1, live=6))
    await rolled.prefetch(quests(8), 4)
    assert camp.prefetched == [(("q0", "q1", "q2", "q3", "q4", "q5"), 1)]
    alone = pipeline(camp, widths=StageWidths(init=1, run=4, eval=1, live=6), fork_groups=False)
    await alone.prefetch(quests(8), 4)
    assert camp.prefetched[1] == (("q0",), 4)
    assert camp.made == camp.closed == 2


@pytest.mark.parametrize("plan", [Plan(init=1e9), Plan(init_error=SandboxUnavailable("full"))])
def test_a_prefetch_that_fails_or_hangs_is_told_and_over(plan: Plan, caplog: pytest.LogCaptureFixture) -> None:
    camp = Camp()
    virtual(lambda: pipeline(camp, lambda _: plan).prefetch(quests(2)))
    assert "prefetch of 2 tasks" in caplog.text
    assert camp.made == camp.closed == 1


# Order and attempts


def test_the_longest_groups_go_first_once_that_is_known() -> None:
    durations = Durations()
    seconds = {"q0": 10.0, "q1": 1000.0, "q2": 100.0}
    widths = StageWidths(init=1, run=1, eval=1, live=1)
    limits = Limits(wall_clock=1e9, turn_timeout=1e9)
    rolled = pipeline(
        Camp(),
        lambda task_id: Plan(step=seconds.get(task_id, 500.0)),
        Sharing(prepare=0.0, fork=0.0),
        longest_first=durations,
        widths=widths,
        limits=limits,
    )
    order = lambda count: [t.task_id for t in play(rolled, count, 2)[0]][::2]  # noqa: E731
    assert order(3) == ["q0", "q1", "q2"]
    assert order(3) == ["q1", "q2", "q0"]
    assert durations.expected("q2") == 300.0
    assert durations.expected("never seen") == pytest.approx((30.0 + 3000.0 + 300.0) / 3)
    assert order(4) == ["q1", "q3", "q2", "q0"]  # what is unknown counts as the mean


def test_durations_follow_and_failures_say_nothing() -> None:
    def took(seconds: float, **options: Any) -> Trajectory:
        trajectory = Trajectory("a", 0, 0, **options)
        trajectory.seconds.update({"run": seconds, "eval_wait": 1e9})
        return trajectory

    durations = Durations([took(10.0), took(20.0)], weight=0.5)
    assert durations.expected("a") == 15.0
    (failed,) = play(pipeline(Camp(), lambda _: Plan(init_error=SandboxLost("x"))), 1, 1)[0]
    durations.note(failed)
    assert durations.expected("q0") == 15.0
    assert Durations().expected("a") == 0.0


@pytest.mark.parametrize(
    ("error", "times"),
    [
        (SandboxUnavailable("full"), 5),
        (SandboxLost("gone"), 3),
        (SourceUnavailable("index away"), 3),
        (EngineError("down"), 1),
    ],
)
def test_attempts_by_class_of_failure(error: Exception, times: int) -> None:
    attempts = {"SandboxUnavailable": 5, "EngineError": 1}
    rolled = pipeline(Camp(), lambda _: Plan(init_error=error), max_attempts=3, attempts=attempts)
    (trajectory,) = play(rolled, 1, 1)[0]
    assert trajectory.attempts == times
    assert trajectory.failure is not None
    assert trajectory.failure.kind == type(error).__name__
    assert trajectory.stop_reason in (StopReason.SANDBOX_ERROR, StopReason.ENGINE_ERROR)


@pytest.mark.parametrize(
    ("attempts", "message"), [({"SandboxLots": 2}, "did you mean 'SandboxLost'"), ({"EngineError": 0}, "at least 1")]
)
def test_attempts_that_cannot_be(attempts: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pipeline(Camp(), attempts=attempts)
