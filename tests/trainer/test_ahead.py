"""A curriculum's plan, and batches that are played ahead of the trainer: bounded, whole, in order, each task once."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sky_trainer.ahead import Ahead
from sky_trainer.config import RolloutConfig, from_mapping, limited
from sky_trainer.curriculum import Plan, Stage, make_plan
from sky_trainer.rollouts import grouped, staleness
from skyenv.engines.scripted import ScriptedEngine
from skyenv.errors import ConfigError, SkyEnvError
from skyenv.types import Completion, Trajectory
from skyenv.vector.lanes import Stages, StageWidths
from skyenv.vector.pipeline import RolloutPipeline
from skyenv.vector.stopping import FailureThreshold
from tests.rollout import adventure
from tests.rollout.adventure import RENDERER, WIN, Adventure, Ledger, Quest
from tests.rollout.camp import Camp, Camper, Sharing

GROUP = 2


def stage(number: int, names: Sequence[str], batches: int, shuffle: bool = True) -> Stage:
    return Stage(number, batches, tuple(Quest(name) for name in names), RolloutConfig(), shuffle)  # type: ignore[arg-type]


def names(plan: Plan) -> list[list[str]]:
    return [[task.task_id for task in plan.batch(number).tasks] for number in range(plan.length)]


# The plan


@given(
    st.lists(st.tuples(st.integers(1, 7), st.integers(1, 6)), min_size=1, max_size=3),
    st.integers(1, 5),
    st.integers(0, 3),
)
def test_a_stage_takes_each_task_once_before_any_twice(shapes: list[tuple[int, int]], groups: int, seed: int) -> None:
    stages = [stage(n, [f"{n}.{t}" for t in range(count)], batches) for n, (count, batches) in enumerate(shapes)]
    length = sum(batches for _, batches in shapes)
    plan = Plan(stages, groups, seed, length)
    done = 0
    for one in stages:
        taken = [name for batch in names(plan)[done : done + one.batches] for name in batch]
        assert len(taken) == one.batches * groups
        rounds = [taken[start : start + len(one.tasks)] for start in range(0, len(taken), len(one.tasks))]
        for around in rounds:
            assert set(Counter(around).values()) == {1}
        assert all(set(around) == {task.task_id for task in one.tasks} for around in rounds[:-1])
        done += one.batches
    assert names(Plan(stages, groups, seed, length)) == names(plan)
    shorter = Plan(stages, groups, seed, max(1, length - 1))
    assert names(shorter) == names(plan)[: shorter.length]
    assert [plan.tasks[place].task_id for place in plan.order()] == [name for batch in names(plan) for name in batch]


def test_groups_are_counted_over_the_whole_run() -> None:
    plan = Plan([stage(0, "ab", 2), stage(1, "cd", 1)], 2, 0, 3)
    assert [[number for number, _ in plan.batch(n).groups()] for n in range(3)] == [[0, 1], [2, 3], [4, 5]]
    assert plan.batch(2).stage.number == 1


def test_without_shuffling_tasks_come_as_they_stand() -> None:
    assert names(Plan([stage(0, "abc", 3, shuffle=False)], 2, 0, 3)) == [["a", "b"], ["c", "a"], ["b", "c"]]


STAGES = [
    {"steps": 3, "tasks": {"level": 1, "limit": 4}, "limits": {"max_turns": 5}},
    {"steps": 2, "tasks": {"level": 2, "limit": 3}, "limits": {"wall_clock": 60}},
]


def test_stages_have_their_own_tasks_steps_and_limits() -> None:
    config = from_mapping({"stages": STAGES, "rollout": {"groups_per_step": 2}})
    assert config.steps == 5
    plan = make_plan(config, 2, 1)
    assert [plan.batch(n).stage.number for n in range(plan.length)] == [0, 0, 0, 1, 1]
    assert {task.level for task in plan.batch(0).tasks} == {1}
    assert {task.level for task in plan.batch(4).tasks} == {2}
    first, second = plan.stages
    assert (first.rollout.max_turns, second.rollout.max_turns) == (5, config.rollout.max_turns)
    assert (first.rollout.wall_clock, second.rollout.wall_clock) == (config.rollout.wall_clock, 60.0)
    assert limited(config.rollout, config.evaluation.limits) == config.rollout
    fewer = from_mapping({"stages": STAGES, "steps": 4, "rollout": {"groups_per_step": 2}})
    assert names(make_plan(fewer, 2, 1)) == names(plan)[:4]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"stages": [{"tasks": {"level": 1}}]}, "stages[0].steps is 0; it must be at least 1"),
        ({"stages": [{"stepz": 1}]}, "unknown key 'stages[0].stepz'; did you mean 'stages[0].steps'?"),
        ({"stages": [{"steps": 1, "limits": {"max_turn": 1}}]}, "did you mean 'stages[0].limits.max_turns'?"),
        ({"stages": {"steps": 1}}, "stages is {'steps': 1}; write a list of sections"),
        ({"stages": [3]}, "write a list of sections"),
        ({"stages": STAGES, "steps": 6}, "steps is 6, but the stages have 5 in all"),
        ({"stages": STAGES, "tasks": {"level": 1}}, "tasks: every stage names its own"),
        ({"stages": [{"steps": 1, "limits": {"max_context": 9}}]}, "stages[0].limits: with these, rollout.max_context"),
        ({"staleness": -1}, "staleness is -1; it must be at least 0"),
        ({"evaluation": {"every": -1}}, "evaluation.every is -1"),
        ({"evaluation": {"samples": 0}}, "evaluation.samples is 0"),
        ({"evaluation": {"temperature": -1}}, "evaluation.temperature is -1"),
        ({"evaluation": {"limits": {"wall_clock": 0}}}, "evaluation.limits: with these, rollout.wall_clock is 0"),
    ],
)
def test_mistakes_name_field_and_fix(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping(data)
    assert message in str(caught.value)


def test_the_page_on_long_runs_writes_what_is_taken() -> None:
    page = Path(__file__).parents[2] / "docs" / "long-runs.md"
    blocks = re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    assert [sorted(yaml.safe_load(block)) for block in blocks] == [["save_every", "stages"], ["evaluation"]]
    assert from_mapping(yaml.safe_load(blocks[0])).steps == 300
    assert from_mapping(yaml.safe_load(blocks[1])).evaluation.samples == 4


def test_a_stage_ends_with_a_batch() -> None:
    config = from_mapping({"stages": STAGES, "rollout": {"groups_per_step": 2}})
    with pytest.raises(ConfigError, match="a batch of rollouts serves 2 steps"):
        make_plan(config, 2, 2)


# Ahead of the trainer


def group_of(session_id: str) -> int:
    return int(session_id.partition("#")[2].partition(".")[0])


class Counting:
    """A real pipeline's engine that knows which groups it began, and writes a version on what it samples."""

    def __init__(self) -> None:
        self.version = 0
        self.begun: set[int] = set()
        self._engine = ScriptedEngine(RENDERER, WIN)

    async def generate(self, prompt_ids: Any, sampling: Any, *, messages: Any = (), session_id: str = "") -> Completion:
        self.begun.add(group_of(session_id))
        version = self.version
        answer = await self._engine.generate(prompt_ids, sampling, messages=messages, session_id=session_id)
        await anyio.sleep(1.0)
        return Completion(answer.text, answer.token_ids, answer.logprobs, answer.finish_reason, policy_version=version)


def pipeline(engine: Any, ledger: Ledger, live: int = 64) -> RolloutPipeline:
    return RolloutPipeline(
        engine=engine,
        make_env=lambda: Adventure(ledger, lambda task_id: adventure.Plan(init=1.0, evaluate=0.5)),
        renderer=RENDERER,
        stages=Stages(StageWidths(live, live, live, live=live)),
    )


def play(staleness: int, steps: int, train_seconds: float = 4.0) -> tuple[list[list[Trajectory]], Counting, float]:
    """A run in virtual time whose optimizer steps take so long; the engine has new weights after each."""
    engine, ledger, plan = Counting(), Ledger(), Plan([stage(0, "abcd", steps)], 2, 0, steps)
    batches: list[list[Trajectory]] = []

    async def main() -> float:
        async with Ahead(plan, [pipeline(engine, ledger)], GROUP, staleness=staleness).opened() as ahead:
            started = anyio.current_time()
            for number in range(steps):
                engine.version = number
                played = await ahead.take(number)
                batches.append(played.found)
                assert len(engine.begun) <= (staleness + number + 1) * plan.groups
                before = len(engine.begun)
                await anyio.sleep(train_seconds)
                assert staleness > 0 or len(engine.begun) == before
            return float(anyio.current_time() - started)

    seconds: float = adventure.virtual(main)
    assert ledger.live == 0
    return batches, engine, seconds


@pytest.mark.parametrize("allowed", [0, 1, 2, 5])
def test_batches_are_the_plans_and_never_staler_than_allowed(allowed: int) -> None:
    batches, _, _ = play(allowed, 6)
    plan = Plan([stage(0, "abcd", 6)], 2, 0, 6)
    for number, batch in enumerate(batches):
        groups = grouped(batch, 2, GROUP, plan.batch(number).groups()[0][0])
        assert [group.task_id for group in groups] == [task.task_id for task in plan.batch(number).tasks]
        assert staleness(batch, number)["staleness/max"] <= allowed
    assert allowed == 0 or max(staleness(batch, n)["staleness/max"] for n, batch in enumerate(batches)) == allowed


def test_trajectories_go_on_across_an_update() -> None:
    batches, _, _ = play(1, 5, train_seconds=1.5)
    mixed = [staleness(batch, number)["staleness/mixed"] for number, batch in enumerate(batches)]
    assert mixed[0] == 0.0
    assert max(mixed) == 1.0
    versions = [[turn.policy_version for turn in trajectory.turns] for batch in batches for trajectory in batch]
    assert all(one == sorted(one) for one in versions)


def test_what_is_hidden_behind_training_is_saved() -> None:
    """Rollouts take 4.5 s, training 4 s: 8.5 s a step one after the other, 4 s when a batch is always there."""
    assert play(0, 6)[2] == pytest.approx(6 * 8.5, abs=0.1)
    assert play(1, 6)[2] < 0.6 * 6 * 8.5
    assert play(2, 6)[2] == pytest.approx(4.5 + 6 * 4.0, abs=0.1)


@pytest.mark.parametrize(("allowed", "fetched"), [(0, [1, 2]), (2, [])])
def test_the_next_batch_is_fetched_while_the_trainer_steps_and_nothing_runs(allowed: int, fetched: list[int]) -> None:
    camp, plan = Camp(), Plan([stage(0, "abcd", 3)], 2, 0, 3)
    fetching = lambda task_id: adventure.Plan(init=3.0 if task_id == "prefetch" else 0.0)  # noqa: E731
    sharing = Sharing(prepare=1.0)
    rolled = dataclasses.replace(pipeline(Counting(), camp), make_env=lambda: Camper(camp, fetching, sharing))

    async def main() -> None:
        async with Ahead(plan, [rolled], GROUP, staleness=allowed).opened() as ahead:
            for number, seconds in enumerate((4.0, 4.0, 1.0)):  # long enough for a fetch, and after the last for none
                await ahead.take(number)
                await anyio.sleep(seconds)

    adventure.virtual(main)
    assert camp.prefetched == [(tuple(task.task_id for task in plan.batch(n).tasks), 1) for n in fetched]
    assert camp.made == camp.closed


def test_a_fetch_ends_when_its_batch_starts() -> None:
    camp, plan = Camp(), Plan([stage(0, "abcd", 3)], 2, 0, 3)
    fetching = lambda task_id: adventure.Plan(init=3.0 if task_id == "prefetch" else 0.0)  # noqa: E731
    rolled = dataclasses.replace(pipeline(Counting(), camp), make_env=lambda: Camper(camp, fetching, Sharing()))

    async def main() -> None:
        async with Ahead(plan, [rolled], GROUP).opened() as ahead:
            for number in range(3):
                await ahead.take(number)
                await anyio.sleep(1.0)

    adventure.virtual(main)
    assert camp.prefetched == []
    assert camp.made == camp.closed


def test_what_a_killed_run_had_finished_is_not_played_again() -> None:
    plan = Plan([stage(0, "abcd", 3)], 2, 0, 3)
    (first, _, last), _, _ = play(0, 3)
    stored = {0: first, 2: last[:-1]}  # of the last batch one sample is missing, so one group is
    engine = Counting()

    async def main() -> list[Any]:
        ahead = Ahead(plan, [pipeline(engine, Ledger())], GROUP, stored=stored)
        async with ahead.opened():
            return [await ahead.take(number) for number in range(3)]

    played = adventure.virtual(main)
    assert [batch.replayed for batch in played] == [4, 0, 2]
    missing = last[-1].group_id
    assert engine.begun == {2, 3, missing}
    for number, batch in enumerate(played):
        grouped(batch.found, 2, GROUP, plan.batch(number).groups()[0][0])


def test_the_error_of_a_batch_is_raised_when_it_is_asked_for_and_nothing_is_left() -> None:
    ledger = Ledger()

    class Broken(Counting):
        async def generate(self, *arguments: Any, session_id: str = "", **options: Any) -> Completion:
            if group_of(session_id) > 1:
                raise ValueError("broken")
            return await super().generate(*arguments, session_id=session_id, **options)

    async def main() -> None:
        plan = Plan([stage(0, "abcd", 4)], 2, 0, 4)
        strict = dataclasses.replace(pipeline(Broken(), ledger), failures=FailureThreshold(0.0, 1))
        async with Ahead(plan, [strict], GROUP, staleness=1).opened() as ahead:
            assert len((await ahead.take(0)).found) == 4
            with pytest.raises(SkyEnvError, match="1 of 1 trajectories failed"):
                await ahead.take(1)

    adventure.virtual(main)
    assert ledger.live == 0
