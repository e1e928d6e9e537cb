"""Advantages by hand, over valid siblings alone; what is sampled again and what is left as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sky_trainer.advantages import AdvantageRules, advantages, uniform
from sky_trainer.batch import Shape, make_batch
from sky_trainer.filters import FilterConfig, Resampling, silent
from skyenv.samples import RowRules
from skyenv.types import Failure, Segment, StopReason, Trajectory, TrajectoryGroup, Turn


def played(
    reward: float | None, steps: Sequence[float] = (), name: str = "task", reason: StopReason = StopReason.FINISH
) -> Trajectory:
    """With two sampled ids a turn, and a step reward for each."""
    segment = Segment()
    turns = []
    for step in steps or (0.0,):
        segment.append_context([5])
        segment.append_sampled([6, 7], [-1.0, -1.0])
        turns.append(Turn("", (), "", "stop", 0, 0.0, 0.0, reward=step))
    failure = Failure("run", "SandboxLost", "gone") if reward is None else None
    return Trajectory(name, segments=[segment], turns=turns, reward=reward, stop_reason=reason, failure=failure)


def group(*rewards: float | None, name: str = "task") -> TrajectoryGroup:
    return TrajectoryGroup(name, 0, [played(reward, name=name) for reward in rewards])


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (AdvantageRules(), [0.5, -0.5, 0.0, 0.0]),
        (AdvantageRules("leave_one_out"), [0.75, -0.75, 0.0, 0.0]),
        (AdvantageRules("none"), [1.0, 0.0, 0.5, 0.0]),
        (AdvantageRules(scale="group"), [1.0, -1.0, 0.0, 0.0]),
    ],
)
def test_by_hand(rules: AdvantageRules, expected: list[float]) -> None:
    """Rewards 1, 0, 1/2 and a failure, which counts nowhere: the mean of three is 1/2, their deviation too."""
    found = advantages([group(1.0, 0.0, 0.5, None)], rules)
    assert [value for values in found for value in values] == pytest.approx(expected, abs=1e-3)


def test_over_the_batch() -> None:
    found = advantages([group(1.0, 0.0), group(1.0, 1.0, None)], AdvantageRules(scale="batch"))
    assert [values[0] for values in found] == pytest.approx([1.0, -1.0, 0.0, 0.0, 0.0], abs=1e-3)


rewards = st.lists(st.one_of(st.none(), st.floats(-1, 1)), min_size=1, max_size=8)


@given(rewards, st.integers(0, 3), st.sampled_from(["mean", "leave_one_out"]), st.sampled_from(["none", "group"]))
def test_failures_change_nothing(values: list[float | None], failures: int, baseline: Any, scale: Any) -> None:
    rules = AdvantageRules(baseline, scale)
    alone = [v for v in values if v is not None]
    with_failures = advantages([group(*values, *[None] * failures)], rules)
    assert [a for a, v in zip(with_failures, values, strict=False) if v is not None] == advantages(
        [group(*alone)], rules
    )
    assert all(a == [0.0] for a, v in zip(with_failures, [*values, *[None] * failures], strict=True) if v is None)
    assert sum(a[0] for a in with_failures) == pytest.approx(0.0, abs=1e-2)


def test_credit_by_turns() -> None:
    """What was rewarded from each turn on, against the sibling's from the same turn on: 2, 1 against 1, 0."""
    first, second = played(1.0, [1.0, 0.0]), played(0.0, [1.0])
    found = advantages([TrajectoryGroup("task", 0, [first, second])], AdvantageRules(credit="turn"))
    assert found == [[0.5, 0.5], [-0.5]]
    assert advantages([TrajectoryGroup("task", 0, [first, second])], AdvantageRules()) == [[0.5], [-0.5]]
    late = played(0.0, [0.0, 1.0])
    found = advantages([TrajectoryGroup("task", 0, [late, played(0.0, [1.0, 0.0])])], AdvantageRules(credit="turn"))
    assert found == [[0.0, 0.5], [0.0, -0.5]]


def test_each_token_has_the_advantage_of_its_turn() -> None:
    groups = [TrajectoryGroup("task", 0, [played(0.0, [0.0, 1.0]), played(0.0, [1.0, 0.0])])]
    rules, shape = AdvantageRules(credit="turn"), Shape(1, 1, 2)
    whole = make_batch(groups, RowRules(0), rules, shape, frozenset())
    assert whole.advantages_RT[0] == [0.0, 0.0, 0.0, 0.5, 0.5]  # the environment's id between has the former's
    split = make_batch(groups, RowRules(0, mode="turn"), rules, shape, frozenset())
    assert (split.advantages_RT, split.parts) == ([[0.0, 0.0], [0.5, 0.5], [0.0, 0.0], [-0.5, -0.5]], 2)


def test_batches_fill_what_ranks_and_micro_batches_need() -> None:
    groups = [TrajectoryGroup("task", 0, [played(1.0, [0.0] * 3), played(0.0, [0.0])])]
    batch = make_batch(groups, RowRules(0, mode="turn"), AdvantageRules(), Shape(2, 1, 1), frozenset())
    assert (len(batch.rows), batch.parts) == (4, 2)
    weighted = make_batch(groups, RowRules(0, mode="turn"), AdvantageRules(), Shape(1, 1, 2, True), frozenset())
    assert (len(weighted.rows), weighted.parts) == (4, 4)
    assert weighted.weights_R == pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 2])
    three = make_batch(groups, RowRules(0, mode="turn"), AdvantageRules(), Shape(3, 1, 1), frozenset())
    assert [row.trajectory for row in three.rows] == [0, 0, 0, 1, -1, -1]
    assert not any(any(row.loss_mask) for row in three.rows[4:])


def test_what_has_no_loss() -> None:
    cut = played(0.0, reason=StopReason.CONTEXT)
    groups = [TrajectoryGroup("a", 0, [played(1.0), cut]), group(1.0, 1.0), group(None, 0.5)]
    assert silent(groups, FilterConfig(), "trajectory") == frozenset()
    assert silent(groups, FilterConfig(overlong=True), "trajectory") == {1}
    assert silent(groups, FilterConfig(uniform="mask"), "trajectory") == {2, 3, 4, 5}


@dataclass(frozen=True)
class Named:
    task_id: str


@dataclass
class Script:
    """Rewards by task, one list a collection; the last is repeated."""

    rewards: dict[str, list[list[float | None]]]
    asked: list[tuple[list[str], int]] = field(default_factory=list)

    def __call__(self, tasks: Sequence[Any], size: int) -> list[TrajectoryGroup]:
        self.asked.append(([task.task_id for task in tasks], size))
        found = []
        for task in tasks:
            turns = self.rewards[task.task_id]
            values = turns.pop(0) if len(turns) > 1 else turns[0]
            found.append(group(*values[:size], name=task.task_id))
        return found


TASKS = [Named(name) for name in "abcd"]


def test_groups_that_teach_nothing_are_replaced_within_bounds() -> None:
    script = Script({"a": [[1.0, 1.0]], "b": [[1.0, 0.0]], "c": [[0.0, 0.0], [1.0, 0.0]], "d": [[0.0, 0.0]]})
    filters = FilterConfig(uniform="replace", rounds=50)
    sampled = Resampling(script, script, TASKS, filters, seed=1)
    found = sampled(TASKS[:2], 2)
    assert [g.task_id for g in found] == ["c", "b"]
    assert sampled.counts["replaced"] == 1
    hopeless = Script({name: [[0.0, 0.0]] for name in "abcd"})
    found = Resampling(hopeless, hopeless, TASKS, FilterConfig(uniform="replace", rounds=3), seed=1)(TASKS[:2], 2)
    assert [g.task_id for g in found] == ["a", "b"]
    assert len(hopeless.asked) == 4
    assert all(uniform(g) for g in found)


def test_what_infrastructure_spoiled_is_sampled_again() -> None:
    script = Script({"a": [[1.0, None, None], [None, 0.5], [0.25]], "b": [[1.0, 0.0, 0.5]]})
    sampled = Resampling(script, script, TASKS, FilterConfig(refill=True, rounds=5), seed=1)
    found = sampled(TASKS[:2], 3)
    assert script.asked == [(["a", "b"], 3), (["a"], 2), (["a"], 1)]
    assert sorted(found[0].rewards_G, key=str) == [0.25, 0.5, 1.0]
    assert sampled.counts["refilled"] == 2


def test_nothing_is_sampled_again_unless_asked_for() -> None:
    script = Script({"a": [[1.0, None]], "b": [[1.0, 1.0]]})
    Resampling(script, script, TASKS, FilterConfig(), seed=1)(TASKS[:2], 2)
    assert len(script.asked) == 1
