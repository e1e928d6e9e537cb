"""Advantages of trajectories within their groups, over the valid siblings alone, and which samples are left out.

A sample without a reward counts in no mean and no deviation. Statistics are per trajectory, however many rows it has.
With credit by turns, what counts for a turn is what was rewarded from it on, against what the siblings got from their
turn of the same number on; a sibling that had ended by then got its final reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

from skyenv.types import StopReason, Trajectory, TrajectoryGroup

Baseline = Literal["mean", "leave_one_out", "none"]
Scale = Literal["group", "batch", "none"]
Credit = Literal["trajectory", "turn"]

OVERLONG = frozenset({StopReason.MAX_TOKENS, StopReason.CONTEXT, StopReason.MAX_TURNS})
EPSILON = 1e-4


@dataclass(frozen=True, slots=True)
class AdvantageConfig:
    """`baseline`: the valid siblings' mean, that of the others alone (`leave_one_out`), or nothing.

    `credit` turn: each turn gets the advantage of what was rewarded from it on, by the environment's own step rewards
    (`Turn.reward`) and the final reward; without step rewards that is the same as `trajectory`.
    """

    baseline: Baseline = "mean"
    credit: Credit = "trajectory"


@dataclass(frozen=True, slots=True)
class AdvantageRules:
    """What `advantages` needs to know; `scale` divides by the deviation of the group's or of all valid rewards."""

    baseline: Baseline = "mean"
    scale: Scale = "none"
    credit: Credit = "trajectory"


def advantages(groups: Sequence[TrajectoryGroup], rules: AdvantageRules) -> list[list[float]]:
    """For each trajectory of the batch, in order, one advantage, or one for each of its turns.

    0.0 for a trajectory that may not train.
    """
    every = [t.reward for group in groups for t in group.trajectories if t.trainable and t.reward is not None]
    found = []
    for group in groups:
        valid = [t for t in group.trajectories if t.trainable]
        spread = deviation(rules.scale, [t.reward for t in valid if t.reward is not None], every)
        for trajectory in group.trajectories:
            turns = max(1, len(trajectory.turns)) if rules.credit == "turn" else 1
            if not trajectory.trainable:
                found.append([0.0] * turns)
                continue
            gains = [_above_baseline(trajectory, turn, valid, rules) for turn in range(turns)]
            found.append([gain / spread for gain in gains])
    return found


def _above_baseline(trajectory: Trajectory, turn: int, valid: Sequence[Trajectory], rules: AdvantageRules) -> float:
    """What it got from a turn on, less the baseline; nothing where nobody is left to compare with."""
    own = _from_turn(trajectory, turn, rules.credit)
    match rules.baseline:
        case "none":
            return own
        case "leave_one_out":
            rest = [_from_turn(other, turn, rules.credit) for other in valid if other is not trajectory]
            return own - fmean(rest) if rest else 0.0
        case "mean":
            return own - fmean(_from_turn(other, turn, rules.credit) for other in valid)


def _from_turn(trajectory: Trajectory, turn: int, credit: Credit) -> float:
    final = trajectory.reward or 0.0
    return final if credit == "trajectory" else final + sum(t.reward for t in trajectory.turns[turn:])


def deviation(scale: Scale, group: Sequence[float], every: Sequence[float]) -> float:
    """The divisor: a sample standard deviation plus a little, or 1. A single reward deviates from nothing."""
    rewards = {"group": group, "batch": every, "none": ()}[scale]
    if scale == "none":
        return 1.0
    return (stdev(rewards) if len(rewards) > 1 else 0.0) + EPSILON


def uniform(group: TrajectoryGroup, credit: Credit = "trajectory") -> bool:
    """Whether a group teaches nothing: fewer than two valid siblings, or all with the same reward."""
    valid = [t for t in group.trajectories if t.trainable]
    sums = {_from_turn(t, 0, credit) for t in valid}
    stepped = credit == "turn" and any(turn.reward for t in valid for turn in t.turns)
    return len(valid) < 2 or (len(sums) < 2 and not stepped)


def overlong(trajectory: Trajectory) -> bool:
    """Whether a budget of tokens or turns cut it off."""
    return trajectory.stop_reason in OVERLONG
