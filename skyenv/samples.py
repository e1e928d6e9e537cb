"""Trajectories -> rows to train on, without torch: what an adapter hands to a trainer, each row checked.

A row is prompt ids and completion ids with the sampler's logprobs and a loss mask. Invariants: rows come trajectory by
trajectory, in the order given; the ids of a row are those of its part of the trajectory, unchanged; what stands after
the last sampled id is left out, since nothing is learnt from it; every sampled id is under mask 1 in exactly one row,
except under `last`. A trajectory that may not train is one neutral row: an end-of-sequence id with mask 0, logprob 0.0
and reward None.

>>> from skyenv.types import Segment, Trajectory, TrajectoryGroup
>>> first, second = Segment([1, 2], [0, 1], [0.0, -0.5]), Segment([1, 2, 3, 4], [0, 0, 0, 1], [0.0, 0.0, 0.0, -0.1])
>>> played = Trajectory("task", segments=[first, second], reward=1.0)
>>> (row,) = rows_from([TrajectoryGroup("task", 0, [played])], RowRules(eos_token_id=0))
>>> row.prompt_ids, row.completion_ids, row.loss_mask
([1], [2, 3, 4], [1, 0, 1])
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from skyenv.errors import ConfigError, SkyEnvError
from skyenv.types import Segment, Trajectory, TrajectoryGroup

Mode = Literal["trajectory", "last", "segment", "turn"]


@dataclass(frozen=True, slots=True)
class Row:
    """One row; the lists behind `completion_ids` are as long as it.

    `trajectory` counts the trajectories of the batch; rows with the same number share a reward and an advantage.
    `first_turn`: how many turns of that trajectory stand in earlier rows; each run of mask 1 is one turn.
    """

    task_id: str
    trajectory: int
    first_turn: int
    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    loss_mask: list[int]
    reward: float | None
    status: str


@dataclass(frozen=True, slots=True)
class RowRules:
    """How rows are made. `vocab_size` None: ids are not checked against one.

    `mode`: `trajectory` is one row each, and one whose history was rewritten is an error; `last` trains on the part
    after the last rewriting alone; `segment` is one row for each stretch of unrewritten history; `turn` one for each
    generation, behind everything that it saw. Whatever shares a prefix is merged first, except under `turn`.
    """

    eos_token_id: int
    vocab_size: int | None = None
    mode: Mode = "trajectory"


def rows_from(groups: Sequence[TrajectoryGroup], rules: RowRules) -> list[Row]:
    """The rows of a batch: at least one a trajectory.

    Raises ConfigError for trajectories that the mode cannot take and SkyEnvError for broken ones; the message names
    the trajectory and the field.
    """
    rows: list[Row] = []
    number = 0
    for group in groups:
        for trajectory in group.trajectories:
            rows += _rows_of(trajectory, number, group, rules)
            number += 1
    return rows


def _rows_of(trajectory: Trajectory, number: int, group: TrajectoryGroup, rules: RowRules) -> list[Row]:
    name = describe(trajectory)
    if trajectory.reward is not None and not math.isfinite(trajectory.reward):
        raise SkyEnvError(
            f"{name}: reward is {trajectory.reward!r}, not a finite number; return None to leave a sample out"
        )
    for index, segment in enumerate(trajectory.segments):
        try:
            segment.check(rules.vocab_size)
        except ValueError as error:
            raise SkyEnvError(f"{name}, segment {index}: {error}") from error
    if not trajectory.trainable:
        return [neutral_row(trajectory, number, group, rules)]
    rows = []
    for part in parts_of(trajectory, rules.mode):
        ids, mask, start = part.segment.token_ids, part.segment.loss_mask, part.segment.prompt_length
        if start == 0:
            raise SkyEnvError(f"{name}: prompt_ids is empty, the first id was sampled")
        end = sampled_end(part.segment)
        rows.append(
            Row(
                trajectory.task_id,
                number,
                part.first_turn,
                ids[:start],
                ids[start:end],
                part.segment.logprobs[start:end],
                mask[start:end],
                trajectory.reward,
                status_of(trajectory),
            )
        )
    return rows


def neutral_row(trajectory: Trajectory, number: int, group: TrajectoryGroup, rules: RowRules) -> Row:
    """The row of a trajectory that neither trains nor shifts a baseline; its prompt may be a sibling's."""
    eos = rules.eos_token_id
    prompt = _prompt_ids([trajectory, *group.trajectories]) or [eos]
    return Row(trajectory.task_id, number, 0, prompt, [eos], [0.0], [0], None, status_of(trajectory))


class Part(NamedTuple):
    """A stretch of a trajectory, and how many of its turns stand before it."""

    segment: Segment
    first_turn: int


def parts_of(trajectory: Trajectory, mode: Mode) -> list[Part]:
    """The stretches of a trajectory that rows are made of; empty without sampled ids.

    ConfigError under mode `trajectory` for several that share no prefix.
    """
    segments = trajectory.segments if mode == "turn" else merged(trajectory.segments)
    parts, turns = [], 0
    for segment in segments:
        for piece in turns_of(segment) if mode == "turn" else [segment]:
            count = turn_count(piece)
            if count:
                parts.append(Part(piece, turns))
            turns += count
    if mode == "trajectory" and len(parts) > 1:
        raise ConfigError(
            f"{describe(trajectory)} has {len(parts)} segments, since its history was rewritten; set rollout.rows to"
            " segment, which trains on all of them, or keep the history whole"
        )
    return parts[-1:] if mode == "last" else parts


def merged(segments: Sequence[Segment]) -> list[Segment]:
    """Segments, one for each chain in which each begins with all that the one before it had sampled from.

    What stood behind the last sampled id of the earlier one may differ. The segments given are not changed.
    """
    found: list[Segment] = []
    for segment in segments:
        before = found[-1] if found else None
        end = sampled_end(before) if before is not None else 0
        if before is None or segment.token_ids[:end] != before.token_ids[:end] or any(segment.loss_mask[:end]):
            found.append(segment)
            continue
        found[-1] = Segment(
            segment.token_ids,
            before.loss_mask[:end] + segment.loss_mask[end:],
            before.logprobs[:end] + segment.logprobs[end:],
        )
    return found


def turns_of(segment: Segment) -> Iterator[Segment]:
    """One segment for each run of sampled ids: all that precedes it at mask 0, then the run."""
    end, length = 0, len(segment.loss_mask)
    while end < length:
        start = next((place for place in range(end, length) if segment.loss_mask[place]), length)
        end = next((place for place in range(start, length) if not segment.loss_mask[place]), length)
        if start < end:
            turn = Segment()
            turn.append_context(segment.token_ids[:start])
            turn.append_sampled(segment.token_ids[start:end], segment.logprobs[start:end])
            yield turn


def turn_count(segment: Segment) -> int:
    """How many runs of sampled ids a segment holds."""
    return sum(mask and not before for before, mask in zip([0, *segment.loss_mask], segment.loss_mask, strict=False))


def sampled_end(segment: Segment) -> int:
    """Where the last sampled id ends; 0 without one."""
    mask = segment.loss_mask
    return len(mask) - mask[::-1].index(1) if 1 in mask else 0


def describe(trajectory: Trajectory) -> str:
    """A name for messages: task, group and sample."""
    return f"trajectory {trajectory.task_id!r} (group {trajectory.group_id}, sample {trajectory.sample_index})"


def status_of(trajectory: Trajectory) -> str:
    """Why it ended, or the kind of its failure."""
    if trajectory.failure is not None:
        return trajectory.failure.kind
    return str(trajectory.stop_reason or "unknown")


def _prompt_ids(trajectories: Sequence[Trajectory]) -> list[int]:
    for trajectory in trajectories:
        for segment in trajectory.segments:
            if segment.prompt_length:
                return segment.token_ids[: segment.prompt_length]
    return []
