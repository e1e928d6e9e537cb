"""Rewards read the verdict and nothing else."""

from __future__ import annotations

import doctest
import math
from pathlib import Path
from typing import Any

import pytest

import skyenv.rewards
from skyenv.errors import ConfigError, RewardError
from skyenv.rewards import outcome, reward_function, shaped
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
