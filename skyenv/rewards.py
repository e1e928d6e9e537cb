"""Rewards: from a graded trajectory to one number, or to None, which leaves the sample out of training.

A reward is any function of that shape; a configuration names one of `REWARDS` or a dotted path `package.module:name`.
All read the verdict that the environment's evaluation left in the trajectory, none runs anything.

>>> from skyenv.types import Trajectory
>>> graded = {"reward": 0.0, "resolved": False, "tests": {"a": "passed", "b": "failed"}, "fail_to_pass": ["a", "b"]}
>>> outcome(Trajectory("task", verdict=graded)), shaped(Trajectory("task", verdict=graded))
(0.0, 0.25)
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
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
    reward = trajectory.verdict.get("reward")
    if reward is None:
        return None
    if isinstance(reward, bool) or not isinstance(reward, (int, float)) or not math.isfinite(reward):
        raise RewardError(f"the verdict's reward is {reward!r}, not a finite number")
    return float(reward)


def shaped(trajectory: Trajectory) -> float | None:
    """Outcome, and for unresolved work half of the share of fail-to-pass tests that pass now.

    Nothing for partial work that broke a test which passed before. Needs `tests` and `fail_to_pass` in the verdict;
    without them it is the outcome alone.
    """
    value = outcome(trajectory)
    verdict = trajectory.verdict
    tests, wanted = verdict.get("tests"), verdict.get("fail_to_pass")
    if value is None or value > 0 or not isinstance(tests, Mapping) or not wanted:
        return value
    if any(tests.get(test) != "passed" for test in verdict.get("pass_to_pass", ())):
        return value
    passed: int = sum(tests.get(test) == "passed" for test in wanted)
    return float(max(value, PARTIAL_CREDIT * passed / len(wanted)))


REWARDS: Mapping[str, Reward] = MappingProxyType({"outcome": outcome, "shaped": shaped})


def reward_function(reward: str | Reward) -> Reward:
    """The function that a configuration means: itself, a name of `REWARDS`, or `package.module:name`.

    Raises ConfigError naming what is wrong. Importing a path runs that module: configurations are trusted input.
    """
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
