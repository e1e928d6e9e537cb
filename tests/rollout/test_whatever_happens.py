"""Random faults, hangs, sizes, cancellations and deadlines in virtual time: what holds whatever happens.

Every sample back exactly once or, when the consumer leaves, everything freed; living environments never above the cap,
graders never above theirs; none of them, no snapshot and no slot left at the end; and no wait without a deadline: where
every phase of every environment may hang for ever, and others keep slots of every kind for ever, a run still ends
within what its limits allow.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyenv.engines.scripted import ScriptedEngine
from skyenv.errors import EngineError, EngineUnavailable, RewardError, SandboxLost, SandboxUnavailable
from skyenv.types import Completion, Limits, Message, SamplingParams, StopReason, Trajectory
from skyenv.vector.durations import Durations
from skyenv.vector.lanes import Stages, StageWidths
from skyenv.vector.pipeline import RolloutPipeline
from skyenv.vector.stopping import FailureThreshold
from tests.rollout.adventure import RENDERER, WIN, Plan, Quest, virtual
from tests.rollout.camp import Camp, Camper, Sharing

FOREVER = 1e15
CLOSE = 60.0


class HangingEngine:
    """A scripted engine of which some requests hang, take long or fail."""

    def __init__(self, chosen: random.Random, bad: float) -> None:
        self._engine = ScriptedEngine(RENDERER, WIN)
        self._chosen, self._bad = chosen, bad

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        messages: Sequence[Message] = (),
        session_id: str = "",
    ) -> Completion:
        if self._chosen.random() < self._bad:
            await anyio.sleep(self._chosen.choice([1.0, 50.0, FOREVER]))
            raise self._chosen.choice([EngineError("x"), EngineUnavailable("x")])
        return await self._engine.generate(prompt_ids, sampling, messages=messages, session_id=session_id)


seconds = st.sampled_from([0.0, 1.0, 90.0, FOREVER])
plans = st.builds(
    Plan,
    init=seconds,
    step=seconds,
    evaluate=seconds,
    close=seconds,
    init_error=st.sampled_from([None, None, SandboxLost("x"), SandboxUnavailable("x", 5.0), ValueError("x")]),
    step_error=st.sampled_from([None, None, SandboxLost("x"), EngineError("x"), ValueError("x")]),
    evaluate_error=st.sampled_from([None, None, SandboxLost("x"), RewardError("x"), ValueError("x")]),
    close_error=st.sampled_from([None, None, OSError("x")]),
)
sharings = st.builds(
    Sharing,
    prepare=seconds,
    fork=seconds,
    can_fork=st.booleans(),
    fork_error=st.sampled_from([None, None, SandboxLost("x"), ValueError("x")]),
    free_error=st.sampled_from([None, None, SandboxLost("x"), ValueError("x")]),
    ahead=seconds,
    ahead_error=st.sampled_from([None, None, SandboxUnavailable("x"), ValueError("x")]),
)
bounds = st.none() | st.integers(4, 6)
widths_of_all_kinds = st.builds(
    StageWidths,
    *[st.integers(1, 4)] * 3,
    st.none() | st.integers(1, 6),
    most_init=bounds,
    most_eval=bounds,
    ahead=st.integers(0, 2),
)
limits_of_all_kinds = st.builds(
    Limits,
    wall_clock=st.sampled_from([50.0, 400.0]),
    init_timeout=st.sampled_from([60.0, 200.0]),
    turn_timeout=st.sampled_from([60.0, 200.0]),
    eval_timeout=st.sampled_from([60.0, 200.0]),
    admission_timeout=st.sampled_from([30.0, 1e4]),
    queue_timeout=st.sampled_from([30.0, 1e4]),
    trajectory_timeout=st.sampled_from([100.0, 1e4]),
)


def longest(limits: Limits, items: int, live: int) -> float:
    """Seconds after which a run is over whatever hangs: trajectories one after the other, each with its closing.

    Without a place for anyone, the waits for one, which are one after the other too.
    """
    if not live:
        return limits.admission_timeout * (items + 1)
    attempts_and_closes = limits.trajectory_timeout + 4 * CLOSE
    return attempts_and_closes * (items / live + 2)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_whatever_happens(data: st.DataObject) -> None:
    tasks, group_size = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 4))
    palette, chosen = data.draw(st.lists(plans, min_size=1, max_size=4)), random.Random(data.draw(st.integers()))
    camp, sharing = Camp(), data.draw(sharings)
    widths, limits = data.draw(widths_of_all_kinds), data.draw(limits_of_all_kinds)
    stages = Stages(widths)
    lanes = [*stages.lanes.values(), stages.live, stages.ahead]
    kept = [data.draw(st.sampled_from([0, 0, 1, lane.width])) for lane in lanes]  # by others, for ever
    kept = [min(slots, lane.width) for slots, lane in zip(kept, lanes, strict=True)]
    pipeline = RolloutPipeline(
        engine=HangingEngine(chosen, data.draw(st.sampled_from([0.0, 0.3]))),
        make_env=lambda: Camper(camp, lambda task_id: chosen.choice(palette), sharing),
        renderer=RENDERER,
        limits=limits,
        stages=stages,
        max_attempts=data.draw(st.integers(1, 3)),
        attempts=data.draw(st.sampled_from([{}, {"SandboxUnavailable": 4, "EngineError": 1}])),
        fork_groups=data.draw(st.booleans()),
        longest_first=data.draw(st.sampled_from([None, Durations()])),
        failures=FailureThreshold(share=1.0),
        close_timeout=CLOSE,
    )
    enough = data.draw(st.none() | st.integers(1, group_size))
    leaves_after, cancelled_at = data.draw(st.none() | st.integers(0, 6)), data.draw(st.none() | st.floats(0, 300))
    found: list[Trajectory] = []

    async def consume() -> bool:
        async with pipeline.run([Quest(f"q{n}") for n in range(tasks)], group_size, enough=enough) as run:
            async for trajectory in run:
                found.append(trajectory)
                if len(found) == leaves_after:
                    return False
        return True

    async def main() -> bool:
        for lane, slots in zip(lanes, kept, strict=True):
            for _ in range(slots):
                await lane.acquire()
        with anyio.fail_after(longest(limits, tasks * group_size, widths.most_live - kept[3])):
            with anyio.move_on_after(FOREVER if cancelled_at is None else cancelled_at):
                return await consume()
        return False

    whole = virtual(main)
    keys = sorted((t.group_id, t.sample_index) for t in found)
    wanted = [(group, sample) for group in range(tasks) for sample in range(group_size)]
    assert keys == wanted if whole else set(keys) <= set(wanted) and len(set(keys)) == len(keys)
    not_closed = camp.made - camp.closed  # their closing failed or hung, and was given up at its deadline
    assert not_closed == 0 or any(plan.close_error or plan.close > CLOSE for plan in palette)
    assert camp.live <= not_closed
    assert camp.peak <= widths.most_live + not_closed
    assert (camp.snapshots, camp.most_graders <= widths.ahead + not_closed) == (0, True)
    assert [(lane.busy, lane.waiting) for lane in lanes] == [(slots, 0) for slots in kept]
    for trajectory in found:
        assert trajectory.stop_reason is not None
        assert (trajectory.failure is not None) == trajectory.stop_reason.is_failure
        assert trajectory.reward is None or trajectory.failure is None


@pytest.mark.timeout(900)
def test_ten_thousand_trajectories_with_faults_and_hangs_end_in_bounded_time() -> None:
    """A tenth fails once somewhere, one in a hundred hangs; 256 alive at once."""
    count, live = 10_000, 256
    chosen = random.Random(7)
    camp, seen, hung = Camp(), set[str](), set[str]()
    script = (WIN[-1],)  # one turn, then its grading
    errors: tuple[Callable[[], Mapping[str, Any]], ...] = (  # a new exception each time, or its traceback would grow
        lambda: {"init_error": SandboxUnavailable("full", 5.0)},
        lambda: {"step_error": SandboxLost("it died")},
        lambda: {"evaluate_error": SandboxLost("it died")},
    )
    hangs: tuple[Mapping[str, Any], ...] = ({"init": FOREVER}, {"step": FOREVER}, {"evaluate": FOREVER})

    def plan(task_id: str) -> Plan:
        usual: Mapping[str, Any] = {"init": 10.0, "step": 60.0, "evaluate": 20.0}
        if task_id in seen:
            return Plan(**usual)
        seen.add(task_id)
        if chosen.random() < 0.01:
            hung.add(task_id)
            return Plan(**{**usual, **chosen.choice(hangs)})
        return Plan(**{**usual, **(chosen.choice(errors)() if chosen.random() < 0.1 else {})})

    pipeline = RolloutPipeline(
        engine=ScriptedEngine(RENDERER, script),
        make_env=lambda: Camper(camp, plan, Sharing(prepare=0.0)),
        renderer=RENDERER,
        limits=Limits(init_timeout=100.0, turn_timeout=300.0, eval_timeout=300.0, wall_clock=1e6),
        widths=StageWidths(init=64, run=live, eval=128, live=live),
        attempts={"RewardError": 2},
    )

    async def main() -> tuple[Mapping[tuple[str, int], Trajectory], float]:
        tasks = [Quest(f"q{n}") for n in range(count)]
        return {(t.task_id, t.sample_index): t async for t in pipeline.run(tasks, 1)}, anyio.current_time()

    back, ended = _timed(main)
    assert back.keys() == {(f"q{n}", 0) for n in range(count)}
    assert len(hung) > 50
    assert all(t.reward is not None for t in back.values())  # each trouble strikes once and is got over
    assert {t.stop_reason for t in back.values()} == {StopReason.FINISH}
    assert sum(t.attempts > 1 for t in back.values()) > 900
    assert (camp.live, camp.made, camp.peak) == (0, camp.closed, live)
    work = count * (1.1 * 90.0 + 0.01 * 300.0) / live
    assert ended <= 1.15 * work


def _timed(main: Callable[[], Any]) -> tuple[Mapping[tuple[str, int], Trajectory], float]:
    """What the run came to, and the virtual seconds it took."""

    async def timed() -> Any:
        started = anyio.current_time()
        back, ended = await main()
        return back, ended - started

    found: tuple[Mapping[tuple[str, int], Trajectory], float] = virtual(timed)
    return found
