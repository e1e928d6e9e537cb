"""Trajectories to rows: ids unchanged, failures neutral, everything broken refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sky_trainer.batch import summary
from skyenv.adapters.trl import columns
from skyenv.errors import ConfigError, SkyEnvError
from skyenv.samples import RowRules, rows_from
from skyenv.types import Failure, Segment, StopReason, Trajectory, TrajectoryGroup

VOCAB, EOS = 50, 1
RULES = RowRules(EOS, VOCAB)
ids = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6)


@st.composite
def segments(draw: Any) -> Segment:
    segment = Segment()
    segment.append_context(draw(ids))
    for _ in range(draw(st.integers(1, 4))):
        sampled = draw(ids)
        segment.append_sampled(sampled, draw(st.lists(st.floats(-20, 0), min_size=len(sampled), max_size=len(sampled))))
        if draw(st.booleans()):
            segment.append_context(draw(ids))
    return segment


@st.composite
def trajectories(draw: Any) -> Trajectory:
    if draw(st.booleans()):
        return Trajectory(
            "t", segments=[draw(segments())], reward=draw(st.floats(-1, 1)), stop_reason=StopReason.FINISH
        )
    failed = Trajectory("t", failure=Failure("run", "EngineError", "500"), stop_reason=StopReason.ENGINE_ERROR)
    if draw(st.booleans()):
        failed.segments.append(draw(segments()))
    return failed


@given(st.lists(st.lists(trajectories(), min_size=1, max_size=4), min_size=1, max_size=3))
def test_rows_are_whole_and_unchanged(batch: list[list[Trajectory]]) -> None:
    groups = [TrajectoryGroup("t", n, members) for n, members in enumerate(batch)]
    rows = rows_from(groups, RULES)
    every = [t for members in batch for t in members]
    assert len(rows) == len(every)
    assert {len(values) for values in columns(rows).values()} == {len(every)}
    for row, trajectory in zip(rows, every, strict=True):
        assert row.prompt_ids
        assert row.completion_ids
        assert len(row.completion_ids) == len(row.logprobs) == len(row.loss_mask)
        if trajectory.failure is not None:
            assert (row.completion_ids, row.logprobs, row.loss_mask, row.reward) == ([EOS], [0.0], [0], None)
            assert row.status == "EngineError"
            continue
        segment, length = trajectory.segments[0], len(row.prompt_ids) + len(row.completion_ids)
        assert row.prompt_ids + row.completion_ids == segment.token_ids[:length]
        assert [0] * len(row.prompt_ids) + row.loss_mask == segment.loss_mask[:length]
        assert row.logprobs == segment.logprobs[len(row.prompt_ids) : length]
        assert sum(row.loss_mask) == trajectory.sampled_tokens  # nothing sampled is lost
        assert row.loss_mask[0] == row.loss_mask[-1] == 1


def one(trajectory: Trajectory, rules: RowRules = RULES) -> Any:
    return rows_from([TrajectoryGroup(trajectory.task_id, 0, [trajectory])], rules)[0]


def played(reward: float | None = 1.0) -> Trajectory:
    segment = Segment()
    segment.append_context([2, 3])
    segment.append_sampled([4, EOS], [-0.5, -0.1])
    return Trajectory("fix-it", 3, 1, segments=[segment], reward=reward, stop_reason=StopReason.FINISH)


def test_masked_samples_are_neutral_but_keep_their_prompt() -> None:
    row = one(played(reward=None))
    assert (row.prompt_ids, row.completion_ids, row.loss_mask, row.reward) == ([2, 3], [EOS], [0], None)


def test_retokenised_text_never_trains() -> None:
    trajectory = played()
    trajectory.exact = False
    assert one(trajectory).reward is None


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("token_ids", [2, 3, 4], "unequal lengths"),
        ("token_ids", [2, 3, 4, VOCAB], "token_ids.3. is 50"),
        ("logprobs", [0.0, 0.0, 0.3, -0.1], "logprobs.2. is 0.3"),
        ("logprobs", [0.0, 0.0, -0.1, float("nan")], "logprobs.3. is nan"),
        ("loss_mask", [0, 0, 1, 3], "loss_mask.3. is 3"),
        ("loss_mask", [1, 1, 1, 1], "prompt_ids is empty"),
    ],
)
def test_broken_rows_are_refused_by_name(field: str, value: list[Any], message: str) -> None:
    trajectory = played()
    setattr(trajectory.segments[0], field, value)
    with pytest.raises(SkyEnvError, match=rf"trajectory 'fix-it' \(group 3, sample 1\).*{message}"):
        one(trajectory)


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_rewards_are_numbers(reward: float) -> None:
    with pytest.raises(SkyEnvError, match="reward is"):
        one(played(reward))


def test_several_segments_are_refused_or_the_last_is_kept() -> None:
    trajectory = played()
    trajectory.segments.append(Segment([5, 6, 7], [0, 1, 1], [0.0, -1.0, -2.0]))
    with pytest.raises(ConfigError, match=r"has 2 segments.*rollout\.rows to segment"):
        one(trajectory)
    row = one(trajectory, RowRules(EOS, VOCAB, "last"))
    assert (row.prompt_ids, row.completion_ids) == ([5], [6, 7])


def test_summary_counts() -> None:
    failed = Trajectory(
        "fix-it", 3, 0, failure=Failure("init", "SandboxLost", ""), stop_reason=StopReason.SANDBOX_ERROR
    )
    solved = played()
    solved.verdict = {"resolved": True}
    solved.seconds = {"init": 2.0}
    solved.counters = {"nudges": 3}
    numbers = summary([TrajectoryGroup("fix-it", 3, [failed, solved])])
    assert numbers["rollout/failed"] == numbers["rollout/masked"] == numbers["rollout/resolved"] == 0.5
    assert numbers["stop/finish"] == numbers["stop/sandbox_error"] == 0.5
    assert numbers["seconds/init"] == 1.0
    assert numbers["count/nudges"] == 3.0
    assert numbers["rollout/sampled_tokens"] == 1.0
