"""The pipeline: everything asked for comes back exactly once, on time, and leaves nothing behind."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import aclosing
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from skyenv.engines.scripted import ScriptedEngine
from skyenv.errors import ConfigError, EngineError, EnvError, RewardError, SandboxLost, SandboxUnavailable, SkyEnvError
from skyenv.types import Limits, SamplingParams, StopReason, Trajectory
from skyenv.vector.pipeline import RolloutPipeline, StageWidths, TrajectoryRun
from skyenv.vector.progress import PipelineEvent
from skyenv.vector.stopping import FailureThreshold
from tests.rollout.adventure import LOSE, RENDERER, WIN, Adventure, Ledger, Plan, Quest, go, say, virtual

Planned = Callable[[str], Plan]
NEVER = FailureThreshold(share=1.0)


def pipeline(ledger: Ledger, plan: Planned | Plan = Plan(), script: Any = WIN, **options: Any) -> RolloutPipeline:  # noqa: B008
    planned = plan if callable(plan) else lambda task_id: plan
    options.setdefault("engine", ScriptedEngine(RENDERER, script))
    return RolloutPipeline(make_env=lambda: Adventure(ledger, planned), renderer=RENDERER, **options)


def quests(count: int) -> list[Quest]:
    return [Quest(f"q{n}") for n in range(count)]


def keys(trajectories: list[Trajectory]) -> list[tuple[str, int, int]]:
    return sorted((t.task_id, t.group_id, t.sample_index) for t in trajectories)


def wanted(tasks: int, group_size: int) -> list[tuple[str, int, int]]:
    return sorted((f"q{group}", group, sample) for group in range(tasks) for sample in range(group_size))


async def read(run: TrajectoryRun, found: list[Trajectory]) -> None:
    """Put what comes into `found`, so that it is there also when the run raises."""
    async for trajectory in run:
        found.append(trajectory)  # noqa: PERF401


async def drain(pipeline: RolloutPipeline, tasks: Any, group_size: int) -> list[Trajectory]:
    return [trajectory async for trajectory in pipeline.run(tasks, group_size=group_size)]


both_loops = pytest.mark.parametrize("backend", ["asyncio", "trio"])


@both_loops
def test_every_sample_comes_back_with_a_reward(backend: str) -> None:
    ledger = Ledger()
    found = anyio.run(drain, pipeline(ledger), quests(3), 4, backend=backend)
    assert keys(found) == wanted(3, 4)
    assert {t.reward for t in found} == {1.0}
    assert all(t.trainable and t.stop_reason is StopReason.FINISH and t.attempts == 1 for t in found)
    assert (ledger.live, ledger.made, ledger.closed) == (0, 12, 12)


async def test_task_ids_are_tasks_too_and_no_task_is_no_work() -> None:
    assert [t.task_id for t in await drain(pipeline(Ledger()), ["cave"], 2)] == ["cave", "cave"]
    assert await drain(pipeline(Ledger()), [], 8) == []


async def test_groups() -> None:
    groups = await pipeline(Ledger(), script={"q0": WIN, "q1": LOSE}).collect(quests(2), group_size=3)
    assert [(g.task_id, g.rewards_G) for g in groups] == [("q0", [1.0] * 3), ("q1", [0.0] * 3)]
    assert [t.sample_index for t in groups[0].trajectories] == [0, 1, 2]


def test_siblings_are_admitted_together_and_init_does_not_run_ahead() -> None:
    started: list[tuple[str, int]] = []
    states = []

    def note(event: PipelineEvent) -> None:
        states.append(event.progress)
        if event.state == "init":
            started.append((event.task_id, event.sample_index))

    async def main() -> None:
        widths = StageWidths(init=4, run=2, eval=1, live=5)
        await drain(pipeline(Ledger(), Plan(step=10.0), widths=widths, on_event=note), quests(4), 3)

    virtual(main)
    assert started == [(f"q{n}", sample) for n in range(4) for sample in range(3)]
    assert max(state.live for state in states) == 5
    assert max(state.run for state in states) == 2
    assert max(state.eval for state in states) == 1
    assert max(state.init for state in states) <= 4


@pytest.mark.parametrize("tasks", [1, 3, 40])
def test_throughput_is_the_slowest_stage(tasks: int) -> None:
    """Virtual time of the whole run against the bound that no schedule can beat."""
    plan = Plan(init=4.0, step=1.0, evaluate=6.0)  # three turns: run takes 3
    widths = StageWidths(init=4, run=3, eval=8)
    ledger = Ledger()

    async def main() -> float:
        started = anyio.current_time()
        assert len(await drain(pipeline(ledger, plan, widths=widths), quests(tasks), 2)) == tasks * 2
        return anyio.current_time() - started

    took = virtual(main)
    count = tasks * 2
    bound = max(count * 4.0 / 4, count * 3.0 / 3, count * 6.0 / 8)
    lock_step = -(-count // 3) * (4.0 + 3.0 + 6.0)
    assert took <= bound + 4.0 + 3.0 + 6.0
    assert took < lock_step or tasks == 1
    assert ledger.live == 0


@pytest.mark.parametrize("count", [1, 2, 5])
def test_fewer_items_than_width(count: int) -> None:
    async def main() -> list[Trajectory]:
        with anyio.fail_after(1000):
            return await drain(pipeline(Ledger(), widths=StageWidths(init=64, run=64, eval=64)), quests(count), 1)

    assert keys(virtual(main)) == wanted(count, 1)


def test_a_late_failure_of_init_holds_up_nobody() -> None:
    """The slowest init fails after all others have finished: the reference pipeline waits forever here."""
    late = {"q5": Plan(init=599.0, init_error=SandboxUnavailable("no slot", retry_after=2.0))}
    ledger = Ledger()

    async def main() -> tuple[list[Trajectory], float]:
        with anyio.fail_after(5000):
            widths = StageWidths(init=6, run=6, eval=6)
            found = await drain(pipeline(ledger, lambda t: late.get(t, Plan()), widths=widths), quests(6), 1)
        return found, anyio.current_time()

    found, _ = virtual(main)
    assert keys(found) == wanted(6, 1)
    failed = found[-1]
    assert (failed.task_id, failed.stop_reason, failed.attempts) == ("q5", StopReason.SANDBOX_ERROR, 2)
    assert failed.failure is not None
    assert (failed.failure.stage, failed.failure.kind) == ("init", "SandboxUnavailable")
    assert failed.seconds["init"] == 2 * 599.0
    assert ledger.live == 0


STAGES = [
    (Plan(init_error=SandboxLost("x")), "init", StopReason.SANDBOX_ERROR, 2),
    (Plan(init_error=ValueError("x")), "init", StopReason.TOOL_BUG, 1),
    (Plan(init_error=ConfigError("bad row")), "init", StopReason.TOOL_BUG, 1),
    (Plan(init=1e9), "init", StopReason.SANDBOX_ERROR, 2),
    (Plan(step_error=SandboxLost("x")), "run", StopReason.SANDBOX_ERROR, 2),
    (Plan(step_error=EnvError("x")), "run", StopReason.TOOL_BUG, 1),
    (Plan(step=1e9), "run", StopReason.SANDBOX_ERROR, 2),
    (Plan(evaluate_error=SandboxLost("x")), "eval", StopReason.SANDBOX_ERROR, 2),
    (Plan(evaluate_error=RewardError("x")), "eval", StopReason.EVAL_ERROR, 1),
    (Plan(evaluate_error=KeyError("x")), "eval", StopReason.EVAL_ERROR, 1),
    (Plan(evaluate=1e9), "eval", StopReason.EVAL_ERROR, 1),
]


@pytest.mark.parametrize(("plan", "stage", "reason", "attempts"), STAGES)
def test_a_failure_is_typed_and_touches_no_sibling(plan: Plan, stage: str, reason: StopReason, attempts: int) -> None:
    ledger = Ledger()
    limits = Limits(wall_clock=1e12)

    async def main() -> list[Trajectory]:
        return await drain(pipeline(ledger, lambda t: plan if t == "q1" else Plan(), limits=limits), quests(3), 2)

    found = virtual(main)
    assert keys(found) == wanted(3, 2)
    for trajectory in found:
        if trajectory.task_id != "q1":
            assert (trajectory.reward, trajectory.failure) == (1.0, None)
            continue
        assert trajectory.failure is not None
        assert (trajectory.failure.stage, trajectory.stop_reason) == (stage, reason)
        assert (trajectory.attempts, trajectory.reward, trajectory.trainable) == (attempts, None, False)
    assert (ledger.live, ledger.made) == (0, 4 + 2 * attempts)


class Flaky:
    """Fails the first time a task is planned, as infrastructure does."""

    def __init__(self, plan: Plan) -> None:
        self._first = plan
        self._seen: Counter[str] = Counter()

    def __call__(self, task_id: str) -> Plan:
        self._seen[task_id] += 1
        return self._first if self._seen[task_id] == 1 else Plan()


@pytest.mark.parametrize("plan", [Plan(init_error=SandboxLost("x")), Plan(evaluate_error=SandboxLost("x"))])
async def test_a_second_attempt_starts_clean(plan: Plan) -> None:
    ledger = Ledger()
    (trajectory,) = await drain(pipeline(ledger, Flaky(plan)), quests(1), 1)
    assert (trajectory.reward, trajectory.attempts, trajectory.failure) == (1.0, 2, None)
    assert len(trajectory.turns) == 3
    assert len(trajectory.segments) == 1
    assert ledger.made == 2


async def test_a_failing_engine_is_tried_again() -> None:
    engine = ScriptedEngine(RENDERER, {"q0": WIN})
    found = await drain(pipeline(Ledger(), engine=engine), quests(2), 1)
    by_task = {t.task_id: t for t in found}
    assert by_task["q0"].reward == 1.0
    assert by_task["q1"].stop_reason is StopReason.ENGINE_ERROR
    assert by_task["q1"].attempts == 2
    assert by_task["q1"].failure is not None
    assert "no script for task 'q1'" in by_task["q1"].failure.message


def test_the_wall_clock_ends_a_valid_sample() -> None:
    async def main() -> list[Trajectory]:
        slow = [say(go(3)), say(go(4)), say(go(5))]
        return await drain(pipeline(Ledger(), Plan(step=20.0), slow, limits=Limits(wall_clock=50.0)), quests(1), 1)

    (trajectory,) = virtual(main)
    assert (trajectory.stop_reason, trajectory.reward, trajectory.failure) == (StopReason.WALL_CLOCK, 0.0, None)
    assert trajectory.trainable
    assert trajectory.seconds["run"] == 50.0


@pytest.mark.parametrize(
    ("policy", "reward"),
    [({}, 0.0), ({"max_turns": "mask"}, None), ({"max_turns": "zero"}, 0.0), ({"max_turns": 0.25}, -0.25)],
)
async def test_stop_policy(policy: dict[str, Any], reward: float | None) -> None:
    stops = {StopReason(reason): action for reason, action in policy.items()}
    (trajectory,) = await drain(
        pipeline(Ledger(), script=[say(go(1))], limits=Limits(max_turns=1), stop_policy=stops), quests(1), 1
    )
    assert trajectory.stop_reason is StopReason.MAX_TURNS
    assert trajectory.reward == reward
    assert trajectory.verdict["reward"] == 0.0


async def test_a_verdict_that_is_not_valid_leaves_no_reward_and_no_failure() -> None:
    (trajectory,) = await drain(pipeline(Ledger(), Plan(valid=False)), quests(1), 1)
    assert (trajectory.reward, trajectory.failure, trajectory.trainable) == (None, None, False)


async def test_a_reward_function_of_the_user() -> None:
    def turns(trajectory: Trajectory) -> float:
        return len(trajectory.turns) / 10

    (trajectory,) = await drain(pipeline(Ledger(), reward=turns), quests(1), 1)
    assert trajectory.reward == 0.3

    def broken(trajectory: Trajectory) -> float:
        raise KeyError("tests")

    (trajectory,) = await drain(pipeline(Ledger(), reward=broken), quests(1), 1)
    assert trajectory.stop_reason is StopReason.EVAL_ERROR


async def test_siblings_start_from_the_same_seed() -> None:
    ledger = Ledger()
    await drain(pipeline(ledger, sampling=SamplingParams(seed=3)), quests(2), 2)
    assert len(ledger.seeds) == 4
    assert len(set(ledger.seeds)) == 2


# Ending early


async def settle(until: Callable[[], bool]) -> None:
    """Let the loop run until the condition holds."""
    with anyio.fail_after(100):
        while not until():
            await checkpoint()


def slow(ledger: Ledger) -> RolloutPipeline:
    """q0 is done at once, everything else is on its way for long."""
    return pipeline(ledger, lambda t: Plan() if t == "q0" else Plan(step=1e6, close=0.01))


@both_loops
def test_break_frees_every_environment(backend: str) -> None:
    async def main() -> None:
        ledger = Ledger()
        async for _ in slow(ledger).run(quests(8), group_size=2):
            assert ledger.live > 0
            break
        await settle(lambda: ledger.live == 0)
        assert ledger.closed == ledger.made

    anyio.run(main, backend=backend)


@both_loops
@pytest.mark.parametrize("close", ["async with", "aclosing", "aclose"])
def test_leaving_the_block_frees_every_environment_before_the_next_statement(backend: str, close: str) -> None:
    async def main() -> None:
        ledger = Ledger()
        run = slow(ledger).run(quests(8), group_size=2)
        if close == "aclose":
            assert (await anext(run)).task_id == "q0"
            assert run.progress.live >= ledger.live > 0
            await run.aclose()
            await run.aclose()
        else:
            async with run if close == "async with" else aclosing(run):
                async for _ in run:
                    break
        assert ledger.live == 0
        assert ledger.made == ledger.closed
        assert run.progress.live == 0

    anyio.run(main, backend=backend)


@both_loops
def test_an_error_of_the_consumer_frees_every_environment(backend: str) -> None:
    async def main() -> None:
        ledger = Ledger()

        async def consume() -> None:
            async with slow(ledger).run(quests(8), group_size=2) as run:
                async for _ in run:
                    raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await consume()
        assert ledger.live == 0

    anyio.run(main, backend=backend)


@both_loops
def test_cancelling_the_consumer_frees_every_environment(backend: str) -> None:
    async def main() -> None:
        ledger = Ledger()
        seen = 0
        with anyio.CancelScope() as scope:
            async for _ in slow(ledger).run(quests(8), group_size=2):
                seen += 1
                if seen == 2:  # all others are on their way for long
                    scope.cancel()
        assert scope.cancelled_caught
        assert seen == 2
        assert ledger.live == 0
        assert ledger.made == ledger.closed > 0

    anyio.run(main, backend=backend)


@both_loops
@pytest.mark.parametrize("phase", ["init", "step", "evaluate"])
def test_cancellation_in_any_stage(backend: str, phase: str) -> None:
    async def main() -> None:
        ledger = Ledger()
        plan = Plan(**{phase: 1e6}, close=0.01)
        run = pipeline(ledger, plan).run(quests(4), group_size=2)
        reached = {
            "init": lambda: run.progress.init,
            "step": lambda: run.progress.run,
            "evaluate": lambda: run.progress.eval,
        }
        async with anyio.create_task_group() as group:
            group.start_soon(read, run, [])
            await settle(lambda: reached[phase]() == 8)
            group.cancel_scope.cancel()
        assert ledger.live == 0
        assert ledger.made == ledger.closed == 8

    anyio.run(main, backend=backend)


async def test_closing_from_another_task_ends_the_iteration() -> None:
    ledger = Ledger()
    async with slow(ledger).run(quests(4), group_size=1) as run, anyio.create_task_group() as group:
        async for _ in run:
            group.start_soon(run.aclose)
    assert ledger.live == 0


def test_a_close_that_hangs_is_left_at_its_deadline() -> None:
    async def main() -> tuple[list[Trajectory], float]:
        started = anyio.current_time()
        found = await drain(pipeline(Ledger(), Plan(close=1e9), close_timeout=30.0), quests(2), 1)
        return found, anyio.current_time() - started

    found, took = virtual(main)
    assert [t.reward for t in found] == [1.0, 1.0]
    assert [t.counters["close_errors"] for t in found] == [1, 1]
    assert took == 30.0


async def test_a_close_that_raises_costs_no_trajectory() -> None:
    (trajectory,) = await drain(pipeline(Ledger(), Plan(close_error=OSError("busy"))), quests(1), 1)
    assert trajectory.reward == 1.0
    assert trajectory.counters["close_errors"] == 1


def test_leaving_the_loop_with_a_run_half_read_frees_its_environments() -> None:
    """`asyncio.run` cancels what is left; the run's own task cleans up before the loop closes."""
    ledger = Ledger()
    kept: list[Any] = []

    async def main() -> None:
        run = slow(ledger).run(quests(4), group_size=1)
        kept.append(run)
        await anext(run)

    anyio.run(main)
    assert ledger.live == 0
    assert ledger.made == ledger.closed > 0


# When too much fails


async def test_a_run_that_mostly_fails_stops_and_names_the_reason_after_yielding_what_finished() -> None:
    ledger = Ledger()
    plan = Plan(init_error=SandboxLost("the node is gone"))
    found: list[Trajectory] = []
    rolled = pipeline(
        ledger,
        lambda t: Plan() if t == "q0" else plan,
        failures=FailureThreshold(share=0.9, minimum=5),
        widths=StageWidths(init=1, run=1, eval=1, live=1),
    )
    with pytest.raises(SkyEnvError, match=r"10 of 11 .*10 of them in init: SandboxLost: the node is gone"):
        await read(rolled.run(quests(50), group_size=1), found)
    assert keys(found) == wanted(11, 1)
    assert ledger.live == 0


async def test_a_broken_stream_of_tasks_ends_the_run_with_its_error() -> None:
    def stream() -> Iterator[Quest]:
        yield Quest("q0")
        raise OSError("disk")

    with pytest.raises(SkyEnvError, match=r"pipeline: .*OSError\('disk'\)"):
        await drain(pipeline(Ledger()), stream(), 1)


async def test_an_error_of_the_callback_ends_the_run_and_frees_everything() -> None:
    ledger = Ledger()

    def broken(event: PipelineEvent) -> None:
        if event.state == "run":
            raise ValueError("display")

    with pytest.raises(SkyEnvError, match="display"):
        await drain(pipeline(ledger, on_event=broken), quests(2), 2)
    assert ledger.live == 0


# Progress


def test_progress_and_seconds() -> None:
    events: list[PipelineEvent] = []

    async def main() -> list[Trajectory]:
        plan = Plan(init=5.0, step=2.0, evaluate=3.0, close=1.0)
        widths = StageWidths(init=1, run=1, eval=1, live=2)
        return await drain(pipeline(Ledger(), plan, widths=widths, on_event=events.append), quests(1), 2)

    first, second = virtual(main)
    assert first.seconds == {
        "init_wait": 0.0, "init": 5.0, "run_wait": 0.0, "run": 6.0, "eval_wait": 0.0, "eval": 3.0, "close": 1.0,
    }  # fmt: skip
    assert second.seconds["init_wait"] == 5.0
    assert second.seconds["run_wait"] == 1.0
    assert [event.kind for event in events].count("done") == 2
    last = events[-1].progress
    assert (last.total, last.queued, last.done, last.failed, last.live) == (2, 0, 2, 0, 0)
    assert (last.reward_mean, last.oldest) == (1.0, None)
    in_run = next(event.progress for event in events if event.state == "run")
    assert in_run.oldest is not None
    assert (in_run.oldest.sample_index, in_run.oldest.state, in_run.oldest.seconds) == (0, "run", 5.0)
    assert (in_run.run, in_run.live) == (1, 2)


async def test_progress_of_a_stream_without_length() -> None:
    run = pipeline(Ledger()).run(iter(quests(3)), group_size=2)
    before = run.progress
    assert (before.total, before.queued, before.live, before.seconds) == (None, None, 0, 0.0)
    assert len([t async for t in run]) == 6
    assert run.progress.done == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_attempts": 0}, "max_attempts"),
        ({"reward": "outcom"}, "reward"),
        ({"stop_policy": {"tired": "mask"}}, "stop_policy.*tired"),
        ({"stop_policy": {StopReason.STUCK: "drop"}}, "stop_policy.stuck"),
        ({"stop_policy": {StopReason.STUCK: -1.0}}, "stop_policy.stuck"),
        ({"stop_policy": {StopReason.TOOL_BUG: "keep"}}, "always masked"),
        ({"limits": Limits(max_context=10)}, "max_context"),
    ],
)
def test_settings_that_cannot_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pipeline(Ledger(), **options)
    with pytest.raises(ConfigError, match="widths"):
        StageWidths(run=0)
    with pytest.raises(ConfigError, match="group_size"):
        pipeline(Ledger()).run([], group_size=0)


# Whatever happens

plans = st.builds(
    Plan,
    init=st.sampled_from([0.0, 1.0, 700.0]),
    step=st.sampled_from([0.0, 1.0, 1000.0, 5000.0]),
    evaluate=st.sampled_from([0.0, 1.0, 5000.0]),
    close=st.sampled_from([0.0, 1.0, 100.0]),
    init_error=st.sampled_from([None, None, SandboxLost("x"), SandboxUnavailable("x", 5.0), ValueError("x")]),
    step_error=st.sampled_from([None, None, SandboxLost("x"), EngineError("x"), ValueError("x")]),
    evaluate_error=st.sampled_from([None, None, SandboxLost("x"), RewardError("x"), ValueError("x")]),
    close_error=st.sampled_from([None, None, None, OSError("x")]),
    valid=st.booleans(),
)
bounds = st.none() | st.integers(4, 6)
widths = st.builds(
    StageWidths, *[st.integers(1, 4)] * 3, st.none() | st.integers(1, 6), most_init=bounds, most_eval=bounds
)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_exactly_once_whatever_fails_or_hangs(data: st.DataObject) -> None:
    tasks, group_size = data.draw(st.integers(0, 6)), data.draw(st.integers(1, 4))
    palette, chosen = data.draw(st.lists(plans, min_size=1, max_size=5)), random.Random(data.draw(st.integers()))
    ledger, widths_ = Ledger(), data.draw(widths)
    attempts, enough = data.draw(st.integers(1, 3)), data.draw(st.none() | st.integers(1, group_size))
    limits = Limits(queue_timeout=data.draw(st.sampled_from([100.0, 1e5])))

    async def main() -> list[Trajectory]:
        rolled = pipeline(
            ledger,
            lambda task_id: chosen.choice(palette),
            widths=widths_,
            max_attempts=attempts,
            failures=NEVER,
            limits=limits,
        )
        with anyio.fail_after(1e7):
            return [trajectory async for trajectory in rolled.run(quests(tasks), group_size, enough=enough)]

    found = virtual(main)
    assert keys(found) == wanted(tasks, group_size)
    assert ledger.peak <= widths_.most_live + _not_closed(found)
    assert ledger.live == _not_closed(found)
    for trajectory in found:
        assert trajectory.stop_reason is not None
        assert (trajectory.failure is not None) == trajectory.stop_reason.is_failure
        assert trajectory.reward is None or trajectory.failure is None
        assert trajectory.attempts <= attempts
        for segment in trajectory.segments:
            segment.check()


def _not_closed(found: list[Trajectory]) -> int:
    return sum(t.counters.get("close_errors", 0) for t in found)
