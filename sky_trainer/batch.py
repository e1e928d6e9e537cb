"""A batch of rollouts as the trainer takes it: rows with advantages and weights, its columns, its numbers by name.

Invariants: a batch has at least one row a trajectory; rows of one trajectory share its advantages, and only the first
carries its reward, so that means over rows are means over trajectories. Rows without loss fill a batch up to a
multiple of what the ranks and micro-batches need.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from sky_trainer.advantages import AdvantageRules, advantages, uniform
from skyenv.samples import Row, RowRules, rows_from
from skyenv.types import TrajectoryGroup

PADDING = "padding"


@dataclass(frozen=True, slots=True)
class Shape:
    """How a generation batch is cut: over `ranks`, each `steps` micro-steps of `micro_batch` trajectories.

    `row_mean`: the loss is a mean over each row's tokens, so that rows of one trajectory need weights of their own.
    """

    ranks: int
    steps: int
    micro_batch: int
    row_mean: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows for all ranks, in order, with their advantages for each completion id.

    `weights_R`: what a row counts in a mean over rows, 1.0 where every trajectory is one. `parts`: into how many equal
    forward passes each micro-step is cut. `uniform`: the share of groups that teach nothing.
    """

    rows: list[Row]
    advantages_RT: list[list[float]]
    weights_R: list[float]
    parts: int
    uniform: float


def make_batch(
    groups: Sequence[TrajectoryGroup], rules: RowRules, advantage: AdvantageRules, shape: Shape, silent: frozenset[int]
) -> Batch:
    """Rows of whole groups. The trajectories numbered in `silent` keep their place in baselines but have no loss.

    Raises as `skyenv.samples.rows_from`.
    """
    rows = _silenced(rows_from(groups, rules), silent, rules.eos_token_id)
    shares = advantages(groups, advantage)
    turns = [len(t.turns) for group in groups for t in group.trajectories]
    several = len(rows) > len(turns)
    weighted = several and shape.row_mean
    size = 1 if weighted else shape.micro_batch
    unit = shape.ranks * shape.steps * size
    parts = -(-len(rows) // unit)
    token_advantages = [_by_token(row, shares[row.trajectory]) for row in rows]
    weights = [share * size / shape.micro_batch for share in _shares(rows)] if weighted else [1.0] * len(rows)
    missing = parts * unit - len(rows)
    eos = rules.eos_token_id
    padding = Row("", -1, 0, [eos], [eos], [0.0], [0], None, PADDING)
    return Batch(
        rows + [padding] * missing,
        token_advantages + [[0.0]] * missing,
        weights + [1.0] * missing,
        parts,
        fmean(uniform(group, advantage.credit) for group in groups),
    )


def _silenced(rows: Sequence[Row], silent: frozenset[int], eos: int) -> list[Row]:
    """One row without loss, but with its reward, for each silent trajectory."""
    kept, seen = [], set()
    for row in rows:
        if row.trajectory not in silent:
            kept.append(row)
        elif row.trajectory not in seen:
            seen.add(row.trajectory)
            kept.append(dataclasses.replace(row, completion_ids=[eos], logprobs=[0.0], loss_mask=[0]))
    return kept


def _by_token(row: Row, shares: Sequence[float]) -> list[float]:
    """The advantage of each completion id: its turn's, or the trajectory's."""
    values, turn = [], row.first_turn - 1
    for before, mask in pairwise([0, *row.loss_mask]):
        turn += mask and not before
        values.append(shares[min(max(turn, 0), len(shares) - 1)])
    return values


def _shares(rows: Sequence[Row]) -> list[float]:
    """Each row's part of its trajectory's sampled ids."""
    totals: Counter[int] = Counter()
    for row in rows:
        totals[row.trajectory] += sum(row.loss_mask)
    return [sum(row.loss_mask) / totals[row.trajectory] if totals[row.trajectory] else 1.0 for row in rows]


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
