"""A file of trajectories gives back what was put in, whatever a crash did to its end."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyenv.errors import ConfigError
from skyenv.trajectory_io import append_trajectories, read_trajectories, trajectory_from_json, trajectory_to_json
from skyenv.types import Failure, Message, Segment, StopReason, ToolCall, Trajectory, Turn

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
calls = st.builds(ToolCall, st.text(), st.dictionaries(st.text(), json_values, max_size=3))
turns = st.builds(
    Turn,
    text=st.text(),
    calls=st.lists(calls, max_size=2).map(tuple),
    observation=st.text(),
    finish_reason=st.sampled_from(["stop", "length", "abort"]),
    policy_version=st.integers(0, 9),
    generate_seconds=st.floats(0, 100),
    step_seconds=st.floats(0, 100),
    error=st.none() | st.text(),
)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    segment = Segment()
    for _ in range(draw(st.integers(0, 3))):
        segment.append_context(draw(st.lists(st.integers(0, 2**20), max_size=4)))
        ids = draw(st.lists(st.integers(0, 2**20), max_size=4))
        segment.append_sampled(ids, [draw(st.floats(-1e3, 0)) for _ in ids])
    return segment


trajectories = st.builds(
    Trajectory,
    task_id=st.text(),
    group_id=st.integers(0, 9),
    sample_index=st.integers(0, 9),
    prompt=st.lists(st.builds(Message, st.sampled_from(["system", "user"]), st.text()), max_size=2).map(tuple),
    segments=st.lists(segments(), max_size=2),
    turns=st.lists(turns, max_size=2),
    reward=st.none() | st.floats(-1, 1),
    verdict=st.dictionaries(st.text(), json_values, max_size=3),
    stop_reason=st.none() | st.sampled_from(list(StopReason)),
    failure=st.none() | st.builds(Failure, st.sampled_from(["init", "run", "eval"]), st.text(), st.text()),
    exact=st.booleans(),
    attempts=st.integers(1, 3),
    seconds=st.dictionaries(st.text(), st.floats(0, 10), max_size=2),
    counters=st.dictionaries(st.text(), st.integers(0, 10), max_size=2),
    prompt_hash=st.text(),
)


@given(trajectories)
def test_round_trip(trajectory: Trajectory) -> None:
    line = json.dumps(trajectory_to_json(trajectory), ensure_ascii=False)
    assert trajectory_from_json(json.loads(line)) == trajectory


def example(task_id: str = "t") -> Trajectory:
    segment = Segment()
    segment.append_context([1, 2])
    segment.append_sampled([3, 4], [-0.1, -1e-17])
    turn = Turn("text\nmore", (ToolCall("bash", {"command": "ls"}),), "out\x00\u2028\udc80", "stop", 2, 0.5, 0.25)
    return Trajectory(task_id, segments=[segment], turns=[turn], reward=0.5, stop_reason=StopReason.FINISH)


def test_append_keeps_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "new" / "trajectories.jsonl"
    append_trajectories(path, [example("a"), example("b")], step=3)
    append_trajectories(path, [example("c")])
    assert list(read_trajectories(path)) == [example("a"), example("b"), example("c")]
    first = json.loads(path.read_bytes().splitlines()[0])
    assert first["step"] == 3
    assert first["turns"][0]["text"] == "text\nmore"


def test_a_line_cut_by_a_crash_is_reported_and_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trajectories.jsonl"
    append_trajectories(path, [example("a"), example("b")])
    path.write_bytes(path.read_bytes()[:-40])
    with caplog.at_level(logging.WARNING):
        assert list(read_trajectories(path)) == [example("a")]
    assert "line 2 skipped: cut short" in caplog.text
    append_trajectories(path, [example("c")])
    assert list(read_trajectories(path)) == [example("a"), example("c")]


@pytest.mark.parametrize("line", ["[]", "{}", "nonsense", '{"format": 99}', "\x00", "[" * 5000])
def test_a_foreign_line_spoils_no_other(line: str, tmp_path: Path) -> None:
    path = tmp_path / "trajectories.jsonl"
    append_trajectories(path, [example("a")])
    path.write_bytes(path.read_bytes() + line.encode() + b"\n")
    append_trajectories(path, [example("b")])
    assert list(read_trajectories(path)) == [example("a"), example("b")]


def test_unequal_arrays_are_refused(tmp_path: Path) -> None:
    record = trajectory_to_json(example())
    (nothing,) = trajectory_to_json(Trajectory("t", segments=[Segment()]))["segments"]
    record["segments"][0]["logprobs"] = nothing["logprobs"]
    with pytest.raises(ValueError, match="unequal"):
        trajectory_from_json(record)


def test_processes_that_write_at_once_do_not_mix_lines(tmp_path: Path) -> None:
    path = tmp_path / "trajectories.jsonl"
    code = (
        "import sys; from pathlib import Path; from skyenv.trajectory_io import *; from skyenv.types import *\n"
        "for n in range(50): append_trajectories(Path(sys.argv[1]), [Trajectory(sys.argv[2] * 3000, n)])"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, path, name]) for name in "ab"]
    assert [writer.wait(300) for writer in writers] == [0, 0]
    seen = [(trajectory.task_id[0], trajectory.group_id) for trajectory in read_trajectories(path)]
    assert sorted(seen) == [(name, n) for name in "ab" for n in range(50)]


def test_a_missing_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*missing"):
        list(read_trajectories(tmp_path / "missing"))


def test_a_line_of_the_first_format_is_still_read() -> None:
    segment = {"token_ids": [1, 2], "loss_mask": [0, 1], "logprobs": [0.0, -0.5]}
    record = {**trajectory_to_json(Trajectory("t")), "format": 1, "segments": [segment]}
    assert trajectory_from_json(record).segments == [Segment([1, 2], [0, 1], [0.0, -0.5])]


def test_packed_arrays_are_small_and_a_cut_one_is_refused() -> None:
    segment = Segment()
    for _turn in range(30):
        segment.append_context(list(range(1000, 1500)))
        segment.append_sampled(list(range(100)), [-0.1] * 100)
    record = trajectory_to_json(Trajectory("t", segments=[segment]))
    lists = {"token_ids": segment.token_ids, "loss_mask": segment.loss_mask, "logprobs": segment.logprobs}
    assert len(json.dumps(record["segments"])) * 4 < len(json.dumps(lists))
    record["segments"][0]["length"] += 1
    with pytest.raises(ValueError, match="18001"):
        trajectory_from_json(record)
