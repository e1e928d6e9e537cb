"""Trajectories cut into rows: nothing sampled is lost, nothing is learnt twice, whatever the cut."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyenv.errors import ConfigError
from skyenv.samples import Mode, RowRules, merged, parts_of, rows_from, turn_count
from skyenv.types import Segment, Trajectory, TrajectoryGroup

ids = st.lists(st.integers(2, 30), min_size=1, max_size=4)


@st.composite
def segments(draw: Any) -> Segment:
    segment = Segment()
    segment.append_context(draw(ids))
    for _ in range(draw(st.integers(1, 3))):
        sampled = draw(ids)
        segment.append_sampled(sampled, [-float(token) for token in sampled])
        segment.append_context(draw(ids))
    return segment


def rows(segments: list[Segment], mode: Mode) -> Any:
    played = Trajectory("task", segments=segments, reward=0.5)
    return rows_from([TrajectoryGroup("task", 0, [played])], RowRules(0, mode=mode))


@given(st.lists(segments(), min_size=1, max_size=3), st.sampled_from(["segment", "turn"]))
def test_every_sampled_id_is_learnt_once_in_order(parts: list[Segment], mode: Mode) -> None:
    found = rows(parts, mode)
    sampled = [t for s in parts for t, m in zip(s.token_ids, s.loss_mask, strict=True) if m]
    learnt = [t for r in found for t, m in zip(r.completion_ids, r.loss_mask, strict=True) if m]
    assert learnt == sampled
    assert all(row.prompt_ids and row.loss_mask[-1] == 1 and row.reward == 0.5 for row in found)
    assert all(
        logprob == -float(token) * mask
        for row in found
        for token, logprob, mask in zip(row.completion_ids, row.logprobs, row.loss_mask, strict=True)
    )
    turns = [turn_count(s) for s in parts]
    if mode == "turn":
        assert [row.first_turn for row in found] == list(range(sum(turns)))
    else:
        assert found[0].first_turn == 0


@given(segments())
def test_turns_recorded_one_by_one_merge_into_the_whole(segment: Segment) -> None:
    """A recorder that keeps prompt and completion of each call, as a proxy in front of a server does."""
    calls, end = [], 0
    while 1 in segment.loss_mask[end:]:
        start = segment.loss_mask.index(1, end)
        end = next((i for i in range(start, len(segment.loss_mask)) if not segment.loss_mask[i]), None) or 0
        call = Segment()
        call.append_context(segment.token_ids[:start])
        call.append_sampled(segment.token_ids[start:end], segment.logprobs[start:end])
        calls.append(call)
    (one,) = merged(calls)
    assert (one.token_ids, one.loss_mask, one.logprobs) == (
        segment.token_ids[:end], segment.loss_mask[:end], segment.logprobs[:end],
    )  # fmt: skip
    assert len(rows(calls, "trajectory")) == 1


def test_a_rewritten_history_is_refused_cut_or_taken_whole() -> None:
    first, second = Segment([5, 6, 7], [0, 1, 1], [0.0, -1.0, -2.0]), Segment([5, 8, 9], [0, 0, 1], [0.0, 0.0, -3.0])
    with pytest.raises(ConfigError, match=r"has 2 segments.*set rollout\.rows to segment"):
        rows([first, second], "trajectory")
    (last,) = rows([first, second], "last")
    assert (last.prompt_ids, last.completion_ids, last.first_turn) == ([5, 8], [9], 1)
    both = rows([first, second], "segment")
    assert [(row.completion_ids, row.first_turn, row.trajectory) for row in both] == [([6, 7], 0, 0), ([9], 1, 0)]


def test_an_earlier_answer_that_is_context_later_is_not_learnt_again() -> None:
    """The next segment repeats what was sampled as context, and its own template ends the answer otherwise."""
    before = Segment([1, 2, 3], [0, 1, 0], [0.0, -1.0, 0.0])
    after = Segment([1, 2, 9, 4], [0, 0, 0, 1], [0.0, 0.0, 0.0, -2.0])
    (part,) = parts_of(Trajectory("task", segments=[before, after], reward=1.0), "trajectory")
    assert (part.segment.loss_mask, part.segment.logprobs) == ([0, 1, 0, 1], [0.0, -1.0, 0.0, -2.0])
    assert (before.loss_mask, after.loss_mask) == ([0, 1, 0], [0, 0, 0, 1])
