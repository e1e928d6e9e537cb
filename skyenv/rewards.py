"""Rewards: from a graded trajectory to one number, or to None, which leaves the sample out of training.

A reward is any function of that shape; a configuration names one of `REWARDS`, gives weights to `milestones`, or a
dotted path `package.module:name`. All read the verdict that the environment's evaluation left in the trajectory, none
runs anything. What a reward is made of is told by `reward_terms`, by name, for the logs.

>>> from skyenv.types import Trajectory
>>> graded = {"reward": 0.0, "resolved": False, "tests": {"a": "passed", "b": "failed"}, "fail_to_pass": ["a", "b"]}
>>> outcome(Trajectory("task", verdict=graded)), shaped(Trajectory("task", verdict=graded))
(0.0, 0.25)
"""

from __future__ import annotations

import importlib
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from skyenv.core import Reward
from skyenv.errors import ConfigError, RewardError
from skyenv.types import Trajectory

PARTIAL_CREDIT = 0.5


def outcome(trajectory: Trajectory) -> float | None:
    """The verdict's own reward: what the environment says the work is worth. RewardError when it is no number."""
    if not _valid(trajectory.verdict):
        return None
    return checked(trajectory.verdict.get("reward"), "the verdict's reward")


def checked(reward: Any, what: str) -> float | None:
    """A reward that can train, or none. RewardError naming `what` for anything but a finite number."""
    if reward is None:
        return None
    if isinstance(reward, bool) or not isinstance(reward, numbers.Real) or not math.isfinite(reward):
        raise RewardError(f"{what} is {reward!r}, not a finite number")
    return float(reward)


def fraction(trajectory: Trajectory) -> float | None:
    """The share of fail-to-pass tests that pass now; nothing when a test that passed before was broken.

    Resolved work is worth 1. Needs `tests` and `fail_to_pass` in the verdict; without them it is the outcome alone.
    """
    value = outcome(trajectory)
    if value is None or trajectory.verdict.get("resolved"):
        return value
    return max(value, _fixed(trajectory.verdict))


def _fixed(verdict: Mapping[str, Any]) -> float:
    tests, wanted = verdict.get("tests"), verdict.get("fail_to_pass")
    if not isinstance(tests, Mapping) or not wanted:
        return 0.0
    accepted = verdict.get("accepted", {})
    good = {test for test, outcome in tests.items() if outcome in ("passed", accepted.get(test))}
    if not good.issuperset(verdict.get("pass_to_pass", ())):
        return 0.0
    return len(good.intersection(wanted)) / len(wanted)


@dataclass(frozen=True, slots=True)
class Milestones:
    """The outcome, and for unresolved work what it achieved on the way: a potential of the state that it ended in.

    Each milestone is worth its weight once, however often it is reached, and only if those before it were reached too
    (`fixed` counts by the share of tests fixed). Being a potential, nothing is earned by going back and forth, and the
    sum over turns of what changes is the reward of the whole. The weights sum to less than 1, so resolved work is
    always worth more than any other: whatever maximises this reward on a task that can be resolved, resolves it.
    """

    weights: Mapping[str, float] = field(default_factory=lambda: MILESTONES)

    def __post_init__(self) -> None:
        for name, weight in self.weights.items():
            if name not in MILESTONES:
                known = ", ".join(MILESTONES)
                raise ConfigError(f"reward: milestones: unknown milestone {name!r}; the known ones are {known}")
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < 1:
                raise ConfigError(f"reward: milestones.{name}: {weight!r} is not a number from 0 to less than 1")
        if sum(self.weights.values()) >= 1:
            raise ConfigError("reward: milestones: the weights sum to 1 or more, so that work need not be resolved")

    def __call__(self, trajectory: Trajectory) -> float | None:
        """The sum of the terms; None when the verdict is not valid for training."""
        terms = self.terms(trajectory)
        return None if terms is None else sum(terms.values())

    def terms(self, trajectory: Trajectory) -> dict[str, float] | None:
        """What each milestone adds, `outcome` first; a resolved task has no other term."""
        value = outcome(trajectory)
        if value is None:
            return None
        terms = {"outcome": value, **dict.fromkeys(self.weights, 0.0)}
        if trajectory.verdict.get("resolved") or value > 0:
            return terms
        reached = trajectory.verdict.get("milestones", {})
        for name in MILESTONES:
            share = _fixed(trajectory.verdict) if name == "fixed" else float(bool(reached.get(name)))
            if name in terms:
                terms[name] = self.weights[name] * share
            if not share:
                break
        return terms


MILESTONES: Mapping[str, float] = MappingProxyType(
    {"viewed": 0.05, "reproduced": 0.05, "edited": 0.1, "imports": 0.1, "fixed": 0.3}
)
"""Milestones in the order in which work reaches them, with their usual weights: a file of the reference was looked at,
a failure was seen before anything was edited, a file of the reference was changed, the code still loads, tests pass."""


def shaped(trajectory: Trajectory) -> float | None:
    """Outcome, and for unresolved work half of the share of fail-to-pass tests that pass now.

    Nothing for partial work that broke a test which passed before. Needs `tests` and `fail_to_pass` in the verdict;
    without them it is the outcome alone.
    """
    value = outcome(trajectory)
    if value is None or value > 0:
        return value
    return max(value, PARTIAL_CREDIT * _fixed(trajectory.verdict))


REWARDS: Mapping[str, Reward] = MappingProxyType(
    {"outcome": outcome, "fraction": fraction, "shaped": shaped, "milestones": Milestones()}
)


def reward_terms(reward: Reward, trajectory: Trajectory) -> dict[str, float]:
    """What a reward is made of, by name: the terms of `Milestones`, else the whole as `outcome` and what was added."""
    if isinstance(reward, Milestones):
        return reward.terms(trajectory) or {}
    whole, plain = reward(trajectory), outcome(trajectory)
    if whole is None:
        return {}
    base = plain if plain is not None else 0.0
    return {"outcome": base} if whole == base else {"outcome": base, "shaping": whole - base}


def reward_function(reward: str | Reward | Mapping[str, Any]) -> Reward:
    """The function that a configuration means: itself, a name of `REWARDS`, or `package.module:name`.

    A mapping gives weights to milestones, `{"viewed": 0.1, "fixed": 0.5}`; those that it does not name count nothing.
    Raises ConfigError naming what is wrong. Importing a path runs that module: configurations are trusted input.
    """
    if isinstance(reward, Mapping):
        return Milestones(dict(reward))
    if not isinstance(reward, str):
        return reward
    if reward in REWARDS:
        return REWARDS[reward]
    module_name, colon, name = reward.partition(":")
    if not colon:
        raise ConfigError(f"reward: unknown name {reward!r}; choose {', '.join(REWARDS)} or package.module:function")
    try:
        found: Any = vars(importlib.import_module(module_name)).get(name)
    except ImportError as error:
        raise ConfigError(f"reward: cannot import {module_name!r}: {error}") from error
    if not callable(found):
        raise ConfigError(f"reward: {module_name!r} has no function {name!r}")
    function: Reward = found
    return function


def _valid(verdict: Mapping[str, Any]) -> bool:
    return bool(verdict.get("valid_for_training", True))
