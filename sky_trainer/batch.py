"""Groups of trajectories -> rows that TRL can train on, each checked before TRL sees it.

Invariants: as many rows as trajectories, group by group in the order given. The ids of a row are the ids of its
segment, unchanged; what stands after the last sampled id is left out, since nothing is learnt from it. A trajectory
that may not train becomes one end-of-sequence id with mask 0, logprob 0.0 and reward None, which TRL leaves out of the
group's mean and to which it gives advantage 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from skyenv.errors import ConfigError, SkyEnvError
from skyenv.types import Segment, Trajectory, TrajectoryGroup

SegmentRule = Literal["refuse", "last"]


@dataclass(frozen=True, slots=True)
class Row:
    """One rollout for TRL: prompt and completion ids; the last three lists are as long as `completion_ids`."""

    task_id: str
    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    env_mask: list[int]
    reward: float | None
    status: str


@dataclass(frozen=True, slots=True)
class RowRules:
    """What rows must satisfy. `segments`: a trajectory of several segments is an error, or trains on its last one.

    TRL takes one row a rollout, so a rewritten history cannot train in full: `last` drops the earlier segments.
    """

    eos_token_id: int
    vocab_size: int
    segments: SegmentRule = "refuse"


def rows_from(groups: Sequence[TrajectoryGroup], rules: RowRules) -> list[Row]:
    """Turn every trajectory into one valid row.

    Raises ConfigError for trajectories that the rules cannot take and SkyEnvError for broken ones; the message names
    the trajectory and the field.
    """
    return [row_from(trajectory, group, rules) for group in groups for trajectory in group.trajectories]


def row_from(trajectory: Trajectory, group: TrajectoryGroup, rules: RowRules) -> Row:
    """One row: the trajectory's own ids, or the neutral row when it may not train."""
    name = describe(trajectory)
    _check_reward(name, trajectory.reward)
    for index, segment in enumerate(trajectory.segments):
        try:
            segment.check(rules.vocab_size)
        except ValueError as error:
            raise SkyEnvError(f"{name}, segment {index}: {error}") from error
    if not trajectory.trainable:
        return neutral_row(trajectory, group, rules)
    segment = _chosen_segment(trajectory, rules.segments)
    start, end = segment.prompt_length, len(segment.loss_mask) - segment.loss_mask[::-1].index(1)
    if start == 0:
        raise SkyEnvError(f"{name}: prompt_ids is empty, the first id was sampled")
    return Row(
        trajectory.task_id,
        segment.token_ids[:start],
        segment.token_ids[start:end],
        segment.logprobs[start:end],
        segment.loss_mask[start:end],
        trajectory.reward,
        status_of(trajectory),
    )


def neutral_row(trajectory: Trajectory, group: TrajectoryGroup, rules: RowRules) -> Row:
    """The row of a trajectory that neither trains nor shifts the baseline."""
    eos = rules.eos_token_id
    prompt = _prompt_ids([trajectory, *group.trajectories]) or [eos]
    return Row(trajectory.task_id, prompt, [eos], [0.0], [0], None, status_of(trajectory))


def columns(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """Rows as the columns that TRL's `rollout_func` returns; the last three reach the reward function."""
    return {
        "prompt_ids": [row.prompt_ids for row in rows],
        "completion_ids": [row.completion_ids for row in rows],
        "logprobs": [row.logprobs for row in rows],
        "env_mask": [row.env_mask for row in rows],
        "env_reward": [row.reward for row in rows],
        "status": [row.status for row in rows],
        "task_id": [row.task_id for row in rows],
    }


def describe(trajectory: Trajectory) -> str:
    """A name for messages: task, group and sample."""
    return f"trajectory {trajectory.task_id!r} (group {trajectory.group_id}, sample {trajectory.sample_index})"


def status_of(trajectory: Trajectory) -> str:
    """Why it ended, or the kind of its failure."""
    if trajectory.failure is not None:
        return trajectory.failure.kind
    return str(trajectory.stop_reason or "unknown")


def summary(groups: Iterable[TrajectoryGroup]) -> dict[str, float]:
    """Numbers of one batch of rollouts, by metric name; shares are of all trajectories, seconds are means."""
    every = [trajectory for group in groups for trajectory in group.trajectories]
    if not every:
        return {}
    total = len(every)
    kept = [t for t in every if t.trainable]
    numbers = {
        "rollout/trajectories": float(total),
        "rollout/masked": (total - len(kept)) / total,
        "rollout/failed": sum(t.failure is not None for t in every) / total,
        "rollout/inexact": sum(not t.exact for t in every) / total,
        "rollout/resolved": sum(bool(t.verdict.get("resolved")) for t in every) / total,
        "rollout/turns": fmean(len(t.turns) for t in every),
        "rollout/sampled_tokens": fmean(t.sampled_tokens for t in every),
    }
    reasons = Counter(str(t.stop_reason) for t in every if t.stop_reason is not None)
    numbers |= {f"stop/{reason}": count / total for reason, count in reasons.items()}
    for stage in sorted({stage for t in every for stage in t.seconds}):
        numbers[f"seconds/{stage}"] = fmean(t.seconds.get(stage, 0.0) for t in every)
    graded = [t.verdict["reward_terms"] for t in every if t.verdict.get("reward_terms")]
    for term in sorted({term for terms in graded for term in terms}):
        numbers[f"reward/{term}"] = fmean(terms.get(term, 0.0) for terms in graded)
    for counter in sorted({counter for t in every for counter in t.counters}):
        numbers[f"count/{counter}"] = float(sum(t.counters.get(counter, 0) for t in every))
    return numbers


def _check_reward(name: str, reward: float | None) -> None:
    if reward is not None and not math.isfinite(reward):
        raise SkyEnvError(f"{name}: reward is {reward!r}, not a finite number; return None to leave a sample out")


def _chosen_segment(trajectory: Trajectory, rule: SegmentRule) -> Segment:
    sampled = [segment for segment in trajectory.segments if 1 in segment.loss_mask]
    if len(sampled) > 1 and rule == "refuse":
        raise ConfigError(
            f"{describe(trajectory)} has {len(sampled)} segments, but TRL trains one row a rollout; turn history"
            " condensing off or set rollout.segments to last, which trains on the last segment alone"
        )
    return sampled[-1]


def _prompt_ids(trajectories: Sequence[Trajectory]) -> list[int]:
    for trajectory in trajectories:
        for segment in trajectory.segments:
            if segment.prompt_length:
                return segment.token_ids[: segment.prompt_length]
    return []
