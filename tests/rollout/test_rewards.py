"""Rewards read the verdict and nothing else."""

from __future__ import annotations

import doctest
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skyenv.rewards
from skyenv.errors import ConfigError, RewardError
from skyenv.rewards import MILESTONES, Milestones, fraction, outcome, reward_function, reward_terms, shaped
from skyenv.types import Trajectory


def graded(**verdict: Any) -> Trajectory:
    return Trajectory("task", verdict=verdict)


def test_outcome() -> None:
    assert outcome(graded(reward=1)) == 1.0
    assert outcome(graded(reward=0.0, valid_for_training=True)) == 0.0
    assert outcome(graded(reward=1.0, valid_for_training=False)) is None
    assert outcome(graded()) is None
    for nonsense in ("1", True, math.nan, math.inf):
        with pytest.raises(RewardError, match="finite number"):
            outcome(graded(reward=nonsense))


def test_shaped() -> None:
    partial = {"tests": {"a": "passed", "b": "failed", "k": "passed"}, "fail_to_pass": ["a", "b"]}
    assert shaped(graded(reward=0.0, **partial)) == 0.25
    assert shaped(graded(reward=1.0, **partial)) == 1.0
    assert shaped(graded(reward=0.0, pass_to_pass=["k"], **partial)) == 0.25
    assert shaped(graded(reward=0.0, pass_to_pass=["missing"], **partial)) == 0.0
    assert shaped(graded(reward=0.0)) == 0.0
    assert shaped(graded(reward=0.0, valid_for_training=False, **partial)) is None


def test_fraction() -> None:
    part = {"tests": {"a": "passed", "b": "failed", "k": "passed"}, "fail_to_pass": ["a", "b"], "pass_to_pass": ["k"]}
    assert fraction(graded(reward=0.0, **part)) == 0.5
    assert fraction(graded(reward=0.0, **{**part, "pass_to_pass": ["a", "lost"]})) == 0.0
    assert fraction(graded(reward=1.0, resolved=True, **part)) == 1.0
    skipped = {**part, "tests": {**part["tests"], "k": "skipped"}}
    assert fraction(graded(reward=0.0, **skipped)) == 0.0
    assert fraction(graded(reward=0.0, accepted={"k": "skipped"}, **skipped)) == 0.5
    assert fraction(graded(reward=0.0, valid_for_training=False, **part)) is None


def worked(resolved: bool, reached: Mapping[str, bool], fixed: int = 0, of: int = 4) -> Trajectory:
    tests = {f"t{n}": "passed" if n < fixed or resolved else "failed" for n in range(of)}
    return graded(
        reward=float(resolved), resolved=resolved, milestones=dict(reached), tests=tests, fail_to_pass=list(tests)
    )


REACHED = st.fixed_dictionaries({name: st.booleans() for name in ("viewed", "reproduced", "edited", "imports")})


def test_milestones_are_named_terms_in_an_order() -> None:
    reach = {"viewed": True, "reproduced": True, "edited": True, "imports": True}
    terms = reward_terms(Milestones(), worked(False, reach, fixed=2))
    assert terms == {
        "outcome": 0.0, "viewed": 0.05, "reproduced": 0.05, "edited": 0.1, "imports": 0.1, "fixed": 0.15,
    }  # fmt: skip
    skipped = reward_terms(Milestones(), worked(False, {**reach, "reproduced": False}, fixed=2))
    assert sum(skipped.values()) == skipped["viewed"] == 0.05
    assert reward_terms(Milestones(), worked(True, {}))["outcome"] == sum(
        reward_terms(Milestones(), worked(True, {})).values()
    )
    assert reward_terms(Milestones(), graded(reward=1.0, valid_for_training=False)) == {}
    assert reward_terms(fraction, worked(False, {}, fixed=1)) == {"outcome": 0.0, "shaping": 0.25}
    assert reward_terms(outcome, worked(True, {})) == {"outcome": 1.0}


@given(
    st.lists(st.tuples(st.booleans(), REACHED, st.integers(0, 3)), min_size=1),
    st.lists(st.floats(0, 0.19), min_size=5, max_size=5),
)
def test_the_optimum_does_not_move(work: list[tuple[bool, dict[str, bool], int]], weights: list[float]) -> None:
    """Whatever else is tried, the best work under the shaped reward is the best under the outcome."""
    reward = Milestones(dict(zip(MILESTONES, weights, strict=True)))
    trajectories = [worked(*each) for each in work]
    values = [reward(trajectory) or 0.0 for trajectory in trajectories]
    outcomes = [outcome(trajectory) or 0.0 for trajectory in trajectories]
    best = [n for n, value in enumerate(values) if value == max(values)]
    assert max(outcomes) == 0.0 or {n for n, value in enumerate(outcomes) if value == 1.0} == set(best)
    assert all(0.0 <= value < 1.0 for value, plain in zip(values, outcomes, strict=True) if plain == 0.0)


@given(REACHED, REACHED, st.integers(0, 3))
def test_more_reached_is_never_worth_less(before: dict[str, bool], after: dict[str, bool], fixed: int) -> None:
    both = {name: before[name] or after[name] for name in before}
    reward = Milestones()
    first, second, joint = (reward(worked(False, reach, fixed)) or 0.0 for reach in (before, after, both))
    assert joint >= max(first, second)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"seen": 0.1}, "unknown milestone 'seen'"),
        ({"viewed": -1}, "milestones.viewed"),
        ({"viewed": 0.6, "fixed": 0.5}, "sum to 1"),
    ],
)
def test_wrong_weights(weights: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        reward_function(weights)


def test_weights_as_configuration() -> None:
    reward = reward_function({"viewed": 0.2})
    assert reward(worked(False, {"viewed": True, "reproduced": True})) == 0.2


def test_reward_by_name_and_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reward_function("outcome") is outcome
    assert reward_function(shaped) is shaped
    (tmp_path / "my_rewards.py").write_text("value = 3\ndef length(trajectory):\n    return len(trajectory.turns)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert reward_function("my_rewards:length")(graded()) == 0
    for wrong, message in (
        ("outcom", "unknown name"),
        ("no.such.module:f", "cannot import"),
        ("my_rewards:nothing", "no function"),
        ("my_rewards:value", "no function"),
    ):
        with pytest.raises(ConfigError, match=message):
            reward_function(wrong)


def test_examples() -> None:
    assert doctest.testmod(skyenv.rewards).failed == 0
