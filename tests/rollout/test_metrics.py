"""Numbers of a pipeline's runs: what they add up to, what a step of them is, and the timeline."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyenv.engines.scripted import ScriptedEngine
from skyenv.errors import ConfigError, SandboxLost
from skyenv.types import StopReason, Trajectory
from skyenv.vector.lanes import StageWidths
from skyenv.vector.metrics import KEPT, Level, Meter, Series, one_of, passes
from skyenv.vector.pipeline import RolloutPipeline
from skyenv.vector.stopping import FailureThreshold
from skyenv.vector.timeline import TimelineFile, read_timeline
from tests.rollout.adventure import LOSE, RENDERER, WIN, Adventure, Ledger, Plan, Quest, virtual


def pipeline(plan: Any = Plan(), script: Any = WIN, latency: float = 0.0, **options: Any) -> RolloutPipeline:  # noqa: B008
    planned = plan if callable(plan) else lambda task_id: plan
    engine = ScriptedEngine(RENDERER, script, latency=latency)
    make_env = lambda: Adventure(Ledger(), planned)  # noqa: E731
    return RolloutPipeline(engine=engine, make_env=make_env, renderer=RENDERER, **options)


def quests(count: int) -> list[Quest]:
    return [Quest(f"q{n}") for n in range(count)]


async def drain(pipeline: RolloutPipeline, tasks: Any, group_size: int = 1, **options: Any) -> list[Trajectory]:
    return [trajectory async for trajectory in pipeline.run(tasks, group_size, **options)]


def near(value: float) -> Any:
    return pytest.approx(value, abs=1e-9)


def test_the_numbers_of_a_schedule_that_can_be_done_by_hand() -> None:
    """Four trajectories, one slot a stage: init 2 s, three turns of 1 s each, evaluation 1 s."""

    async def main() -> dict[str, float]:
        widths = StageWidths(init=1, run=1, eval=1, live=3)
        run = pipeline(Plan(init=2.0, evaluate=1.0), latency=1.0, widths=widths).run(quests(4), 1)
        assert len([t async for t in run]) == 4
        return run.numbers

    numbers = virtual(main)
    # init from 0, 2, 4, 6; run from 2, 5, 8, 11; eval from 5, 8, 11, 14; the last one ends at 15
    assert numbers["trajectories/done"] == 4
    assert numbers["trajectories/per_hour"] == near(4 * 3600 / 15)
    assert [numbers[f"stage/{stage}/service_max"] for stage in ("init", "run", "eval")] == [2, 3, 1]
    assert [numbers[f"stage/{stage}/utilisation"] for stage in ("init", "run", "eval")] == near(
        [8 / 15, 12 / 15, 4 / 15]
    )
    assert [numbers[f"stage/{stage}/width"] for stage in ("init", "run", "eval")] == near([1, 1, 1])
    # the third's init ends at 6, the fourth gets a living slot at 6; runs wait 0, 1, 2, 3 s, inits 0, 2, 4, 0 s
    assert numbers["stage/run/wait_max"] == 3
    assert numbers["stage/init/wait_max"] == 4
    assert numbers["stage/init/queue_max"] == 2
    assert numbers["stage/run/queue_mean"] == near((0 + 1 + 2 + 3) / 15)
    assert numbers["engine/requests_mean"] == near(12 / 15)
    assert numbers["engine/idle"] == near(3 / 15)
    assert numbers["engine/latency_p50"] == 1
    assert numbers["sandboxes/live_max"] == 3
    assert (numbers["sandboxes/live"], numbers["stage/run/busy"], numbers["engine/requests"]) == (0, 0, 0)


def test_slots_of_the_engines_make_idle_a_share_of_them() -> None:
    async def main() -> dict[str, float]:
        meter = Meter(engine_slots=4)
        await drain(pipeline(latency=1.0, meter=meter), quests(2))
        return meter.numbers()

    numbers = virtual(main)
    assert numbers["engine/idle"] == near(0.5)
    assert numbers["engine/requests_max"] == 2


def test_tokens_are_those_of_the_trajectories() -> None:
    async def main() -> tuple[dict[str, float], list[Trajectory]]:
        meter = Meter()
        found = await drain(pipeline(latency=2.0, meter=meter), quests(3))
        return meter.numbers(), found

    numbers, found = virtual(main)
    seconds = 3 * 2.0
    assert numbers["engine/sampled_tokens_per_second"] == near(sum(t.sampled_tokens for t in found) / seconds)
    prompts = [
        i
        for t in found
        for s in t.segments
        for i in range(len(s.loss_mask))
        if s.loss_mask[i] > (i and s.loss_mask[i - 1])
    ]
    assert numbers["engine/prompt_tokens_per_second"] == near(sum(prompts) / seconds)
    assert "engine/cached" not in numbers


def test_failures_retries_and_cancelled_ones_by_kind() -> None:
    def planned(task_id: str) -> Plan:
        return Plan(init=1.0, init_error=SandboxLost("gone")) if task_id == "q0" else Plan(step=1.0)

    async def main() -> dict[str, float]:
        meter = Meter()
        rolled = pipeline(planned, meter=meter, failures=FailureThreshold(1.0), widths=StageWidths(run=1))
        await drain(rolled, quests(2), 4, enough=1)
        return meter.numbers()

    numbers = virtual(main)
    assert numbers["trajectories/done"] == 8
    assert numbers["trajectories/failed"] == numbers["failures/SandboxLost"] == 4
    assert numbers["trajectories/retried"] == numbers["retries/SandboxLost"] == 4
    assert numbers["trajectories/cancelled"] == 3


def test_groups_tell_their_spread_and_pass_rates() -> None:
    turn = iter([WIN, LOSE, LOSE, LOSE, WIN, WIN, LOSE, LOSE])
    chosen: dict[str, Any] = {}

    class Choosing(ScriptedEngine):
        def _text(self, messages: Any, session_id: str) -> str:
            script = chosen.setdefault(session_id, next(turn) if session_id not in chosen else None)
            return str(script[sum(message.role == "assistant" for message in messages)])

    async def main() -> dict[str, float]:
        meter, stages = Meter(), StageWidths(init=1, run=1, eval=1)
        make_env = lambda: Adventure(Ledger(), lambda task_id: Plan(step=1.0))  # noqa: E731
        rolled = RolloutPipeline(
            engine=Choosing(RENDERER, []), make_env=make_env, renderer=RENDERER, meter=meter, widths=stages
        )
        await drain(rolled, quests(2), 4)
        return meter.numbers()

    numbers = virtual(main)
    assert numbers["pass@1"] == near(3 / 8)
    assert numbers["pass@2"] == near(fmean([1 - 3 / 6, 1 - 1 / 6]))
    assert numbers["pass@4"] == 1.0
    # one after the other they come back at 3, 5, 7, 9 and 12, 15, 17, 19; the second group has its first slot at 5
    assert numbers["group/seconds_max"] == 19 - 5
    assert (numbers["group/spread_p50"], numbers["group/spread_max"]) == (7, 7)


def test_a_step_counts_anew_and_pauses_between_runs_count_for_nothing() -> None:
    async def main() -> tuple[dict[str, float], ...]:
        meter = Meter()
        rolled = pipeline(latency=1.0, meter=meter)
        await drain(rolled, quests(2))
        first = meter.step()
        await anyio.sleep(1000)
        await drain(rolled, quests(1))
        await anyio.sleep(1000)
        return first, meter.step(), meter.numbers(), meter.step()

    first, second, whole, nothing = virtual(main)
    assert (first["trajectories/done"], second["trajectories/done"], whole["trajectories/done"]) == (2, 1, 3)
    assert (first["engine/requests_max"], second["engine/requests_max"], whole["engine/requests_max"]) == (2, 1, 2)
    assert first["engine/idle"] == second["engine/idle"] == whole["engine/idle"] == near(0)
    assert first["trajectories/per_hour"] == near(2 * second["trajectories/per_hour"])
    assert nothing == {}


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.floats(0, 5), st.floats(0, 3), st.floats(0, 4)), min_size=1, max_size=8),
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 6),
)  # fmt: skip
def test_slot_seconds_are_the_trajectories_own(times: list[Any], init: int, run: int, eval: int, live: int) -> None:
    plans = {f"q{n}": Plan(init=i, step=s, evaluate=e) for n, (i, s, e) in enumerate(times)}

    async def main() -> tuple[dict[str, float], list[Trajectory], float]:
        meter = Meter()
        widths = StageWidths(init, run, eval, live=live, most_init=init + 1, most_eval=eval + 1)
        rolled = pipeline(plans.__getitem__, meter=meter, widths=widths)
        started = anyio.current_time()
        found = await drain(rolled, quests(len(times)))
        return meter.numbers(), found, anyio.current_time() - started

    numbers, found, seconds = virtual(main)
    for stage in ("init", "run", "eval"):
        spent = sum(t.seconds[stage] for t in found)
        waited = sum(t.seconds[f"{stage}_wait"] for t in found)
        if seconds:
            used = numbers[f"stage/{stage}/utilisation"] * numbers[f"stage/{stage}/width"] * seconds
            assert used == pytest.approx(spent, rel=1e-6, abs=1e-6)
            assert numbers[f"stage/{stage}/queue_mean"] * seconds == pytest.approx(waited, rel=1e-6, abs=1e-6)
            assert numbers[f"stage/{stage}/service_max"] == pytest.approx(max(t.seconds[stage] for t in found))
    if seconds:
        assert 1 <= numbers["sandboxes/live_max"] <= live


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)).filter(lambda pair: pair[1] <= pair[0]), max_size=5))
def test_pass_rates_rise_with_k_and_begin_with_the_mean(pairs: list[tuple[int, int]]) -> None:
    found = passes(Counter(pairs))
    if not pairs:
        assert found == {}
        return
    assert found["pass@1"] == pytest.approx(fmean(c / n for n, c in pairs))
    for samples, solved in pairs:
        chances = [one_of(samples, solved, k) for k in range(1, samples + 1)]
        assert chances == sorted(chances)
        assert chances[-1] == (solved > 0)


def test_what_a_meter_keeps_does_not_grow() -> None:
    series, level = Series(), Level()
    for number in range(KEPT + 1):
        series.add(1e9 if number == 0 else float(number % 100))
        level.add(float(number), 1.0 if number % 2 else -1.0)
    tracemalloc.start()
    for number in range(50_000):
        series.add(number % 100 + 0.5)
        level.add(KEPT + number, 1.0 if number % 2 else -1.0)
    grown = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert grown < 200_000
    assert (series.count, series.spread(True)["max"]) == (KEPT + 50_001, 99.5)


def test_a_timeline_shows_every_moment_of_every_trajectory(tmp_path: Path) -> None:
    async def main() -> tuple[Meter, list[Trajectory]]:
        meter = Meter(timeline=True)
        rolled = pipeline(Plan(init=1.0, step=0.5, evaluate=2.0), latency=0.25, meter=meter, widths=StageWidths(live=2))
        return meter, await drain(rolled, quests(3), 2)

    meter, found = virtual(main)
    path = tmp_path / "run" / "timeline.jsonl"
    TimelineFile(path).append(meter.take_lifelines(), meter.origin)
    assert meter.take_lifelines() == []
    lines = read_timeline(path)
    assert [(line.task_id, line.sample_index, line.reward) for line in lines] == [
        (t.task_id, t.sample_index, t.reward) for t in found
    ]
    for line, trajectory in zip(lines, found, strict=True):
        for (_one, _start, end), (_two, start, _end) in zip(line.spans, line.spans[1:], strict=False):
            assert start == end
        seconds = Counter[str]()
        for state, start, end in line.spans:
            seconds[state] += end - start
        assert seconds == pytest.approx(trajectory.seconds, abs=1e-3)
        assert len(line.generations) == len(trajectory.turns)
        assert all(end - start == pytest.approx(0.25) for start, end in line.generations)
    assert min(line.start for line in lines) == 0


def test_a_second_process_continues_a_timeline_on_the_same_clock(tmp_path: Path) -> None:
    async def main() -> Meter:
        meter = Meter(timeline=True)
        await drain(pipeline(Plan(init=1.0), meter=meter), quests(1))
        return meter

    path = tmp_path / "timeline.jsonl"
    for origin in (1000.0, 1060.0):
        TimelineFile(path).append(virtual(main).take_lifelines(), origin)
        with path.open("a") as file:
            file.write('{"task": "cut sho')
    first, second = read_timeline(path)
    assert second.start - first.start == pytest.approx(60.0)
    assert json.loads(path.read_text().splitlines()[0])["timeline"] == 1


@pytest.mark.parametrize("text", [None, "", "nonsense\n", '{"timeline": 1, "unix": 0}\n'])
def test_no_timeline_is_a_clear_error(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"timeline: .*timeline\.jsonl"):
        read_timeline(path)


def test_a_run_that_is_stopped_leaves_nothing_counted_as_live() -> None:
    async def main() -> dict[str, float]:
        meter = Meter()
        async with pipeline(Plan(step=10.0), latency=1.0, meter=meter).run(quests(5), 2) as run:
            with anyio.move_on_after(3.0):
                async for trajectory in run:
                    assert trajectory.stop_reason is StopReason.FINISH
        return meter.numbers()

    numbers = virtual(main)
    assert numbers["sandboxes/live_max"] > 0
    assert [numbers[name] for name in ("sandboxes/live", "engine/requests", "stage/run/busy", "stage/run/queue")] == [
        0
    ] * 4
