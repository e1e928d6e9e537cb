"""What a stop reason does to a reward, what an error stands for and how often it is tried again, when a run fails."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from skyenv import errors
from skyenv.errors import ConfigError, EngineError, RewardError, SandboxError, SkyEnvError, SourceUnavailable
from skyenv.types import StopPolicy, StopReason, Trajectory

PENALTY = 0.5

StopAction = StopPolicy | float
"""Leave the reward, leave the sample out of training, make the reward 0, or take `PENALTY` or this number off it."""


@dataclass(frozen=True, slots=True)
class FailureThreshold:
    """A run ends when more than `share` of the trajectories that came back failed, once `minimum` came back."""

    share: float = 0.5
    minimum: int = 20

    def exceeded(self, done: int, failed: int) -> bool:
        """Whether `failed` of `done` is too much."""
        return done >= self.minimum and failed > self.share * done


class Failing:
    """What failed in a run, by reason."""

    def __init__(self, threshold: FailureThreshold) -> None:
        self._threshold = threshold
        self._reasons: Counter[str] = Counter()

    def too_much(self, trajectory: Trajectory, counts: tuple[int, int]) -> SkyEnvError | None:
        """Note a trajectory that came back; why the run is to end when so many of so many (`counts`) failed."""
        failure = trajectory.failure
        if failure is None or trajectory.stop_reason is StopReason.CANCELLED:
            return None
        self._reasons[f"{failure.stage}: {failure.kind}: {failure.message}"] += 1
        done, failed = counts
        if not self._threshold.exceeded(done, failed):
            return None
        (reason, times), *_ = self._reasons.most_common(1)
        return SkyEnvError(f"stopped: {failed} of {done} trajectories failed, {times} of them in {reason}")


def check_stop_policy(policy: Mapping[StopReason, StopAction]) -> None:
    """ConfigError naming the first entry that is no stop reason, no action, or tries to train on a failure."""
    for reason, action in policy.items():
        if reason not in tuple(StopReason):
            raise ConfigError(f"stop_policy: unknown reason {reason!r}; choose of {', '.join(StopReason)}")
        number = isinstance(action, int | float) and not isinstance(action, bool)
        named = action in get_args(StopPolicy)
        if not named and not (number and math.isfinite(float(action)) and float(action) >= 0):
            raise ConfigError(
                f"stop_policy.{reason}: {action!r} is not {', '.join(get_args(StopPolicy))} or a number of at least 0"
            )
        if StopReason(reason).is_failure and action != "mask":
            raise ConfigError(f"stop_policy.{reason}: a failure says nothing about the policy and is always masked")


def settled(reward: float | None, reason: StopReason | None, policy: Mapping[StopReason, StopAction]) -> float | None:
    """The reward after the stop policy."""
    action = policy.get(reason, "keep") if reason is not None else "keep"
    if reward is None or action == "mask":
        return None
    if action == "keep":
        return reward
    if action == "zero":
        return 0.0
    return reward - (PENALTY if isinstance(action, str) else action)


def failed_reason(error: SkyEnvError) -> StopReason:
    """The stop reason that an error stands for: what is neither infrastructure's nor the grader's is a bug."""
    if isinstance(error, SandboxError | SourceUnavailable):
        return StopReason.SANDBOX_ERROR
    if isinstance(error, EngineError):
        return StopReason.ENGINE_ERROR
    return StopReason.EVAL_ERROR if isinstance(error, RewardError) else StopReason.TOOL_BUG


def check_attempts(attempts: Mapping[str, int]) -> None:
    """ConfigError naming the first entry that is no class of `skyenv.errors` or no number of attempts."""
    for name, times in attempts.items():
        kind = vars(errors).get(name)
        if not (isinstance(kind, type) and issubclass(kind, SkyEnvError)):
            raise ConfigError(f"attempts: {name!r} is no class of skyenv.errors{errors.did_you_mean(name, KINDS)}")
        if times < 1:
            raise ConfigError(f"attempts.{name}: must be at least 1, not {times}")


def attempts_for(error: SkyEnvError, attempts: Mapping[str, int], default: int) -> int:
    """How often to try in all when `error` ends an attempt: what is said of its nearest class.

    Where nothing is said, `default` for infrastructure, and once for everything else, which would only fail again.
    """
    for kind in type(error).__mro__:
        if kind.__name__ in attempts:
            return attempts[kind.__name__]
    return default if isinstance(error, SandboxError | EngineError | SourceUnavailable) else 1


KINDS = tuple(name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, SkyEnvError))
