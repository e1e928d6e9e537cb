"""Looking at trajectories, and taking them elsewhere with exact ids."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from datasets import Dataset, load_from_disk
from hypothesis import given
from hypothesis import strategies as st

from sky_trainer.cli import main
from sky_trainer.evaluated import append_sample, read_samples
from sky_trainer.rows import export_rows, rows_of
from skyenv.errors import ConfigError
from skyenv.samples import turns_of
from skyenv.trajectory_io import append_trajectories, read_trajectories
from skyenv.types import Failure, Message, Segment, StopReason, ToolCall, Trajectory, Turn


def trajectory(task_id: str = "t", reward: float | None = 1.0) -> Trajectory:
    segment = Segment()
    segment.append_context([1, 2])
    segment.append_sampled([3, 4], [-0.5, -0.25])
    segment.append_context([5])
    segment.append_sampled([6], [-0.125])
    turn = Turn("look \x1b[31m", (ToolCall("execute_bash", {"command": "ls [bold]"}),), "a\nb", "stop", 7, 1.5, 0.5)
    return Trajectory(
        task_id,
        prompt=(Message("user", "Fix it."),),
        segments=[segment],
        turns=[turn],
        reward=reward,
        verdict={"status": "unresolved", "tests": {"t.py::a": "failed", "t.py::b": "passed"}, "resolved": False},
        stop_reason=StopReason.FINISH,
        seconds={"init": 1.0, "run": 2.0, "eval": 0.5},
    )


def spoiled() -> Trajectory:
    found = Trajectory("s", sample_index=2, failure=Failure("run", "SandboxLost", "it died"))
    found.stop_reason = StopReason.SANDBOX_ERROR
    return found


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "trajectories.jsonl"
    append_trajectories(path, [trajectory(), spoiled()])
    return path


def test_a_list_and_one_turn_by_turn(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(run_file.parent)]) == 0
    listed = capsys.readouterr().out
    assert "t#0" in listed
    assert "SandboxLost" in listed
    assert main(["show", str(run_file), "--trajectory", "t"]) == 0
    shown = capsys.readouterr().out
    for text in (
        "Fix it.",
        "turn 1",
        "policy 7",
        "execute_bash",
        '"ls [bold]"',
        "t.py::a: failed",
        "3 sampled",
        "engine 1.50, tools 0.50",
    ):
        assert text in shown
    assert "\x1b[31m" not in shown
    assert "\\x1b[31m" in shown


def test_filters_and_wrong_input(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(run_file), "--failed", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"trajectories": ["s#2"]}
    assert main(["show", str(run_file), "--resolved"]) == 1
    assert main(["show", str(run_file), "--trajectory", "s#3"]) == 2
    assert "did you mean 's#2'" in capsys.readouterr().err
    assert main(["show", str(run_file.parent / "nowhere.jsonl")]) == 2
    assert "nowhere.jsonl" in capsys.readouterr().err


def test_long_texts_are_shortened_unless_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = trajectory()
    long.prompt = (Message("user", "x" * 5000),)
    append_trajectories(tmp_path / "t.jsonl", [long])
    assert main(["show", str(tmp_path / "t.jsonl"), "--trajectory", "1"]) == 0
    assert "2000 characters left out" in capsys.readouterr().out
    assert main(["show", str(tmp_path / "t.jsonl"), "--trajectory", "1", "--full"]) == 0
    assert "left out" not in capsys.readouterr().out


def test_rows_of_segments_and_turns() -> None:
    (whole,) = rows_of(trajectory())
    assert (whole["token_ids"], whole["loss_mask"], whole["prompt_length"]) == (
        [1, 2, 3, 4, 5, 6],
        [0, 0, 1, 1, 0, 1],
        2,
    )
    assert [message["role"] for message in whole["messages"]] == ["user", "assistant", "tool"]
    first, second = rows_of(trajectory(), "turn")
    assert (first["token_ids"], first["loss_mask"], first["logprobs"]) == (
        [1, 2, 3, 4], [0, 0, 1, 1], [0.0, 0.0, -0.5, -0.25],
    )  # fmt: skip
    assert (second["token_ids"], second["loss_mask"]) == ([1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 1])
    assert list(rows_of(spoiled())) == []


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 99), max_size=3), st.lists(st.integers(0, 99), max_size=3)), max_size=5)
)
def test_turns_hold_every_sampled_id_once(parts: list[tuple[list[int], list[int]]]) -> None:
    segment = Segment()
    for context, sampled in parts:
        segment.append_context(context)
        segment.append_sampled(sampled, [-float(number) for number in sampled])
    turns = list(turns_of(segment))
    for turn in turns:
        turn.check()
        assert turn.token_ids == segment.token_ids[: len(turn.token_ids)]
        assert turn.loss_mask[-1] == 1
    sampled = [token for token, mask in zip(segment.token_ids, segment.loss_mask, strict=True) if mask]
    kept = [token for turn in turns for token, mask in zip(turn.token_ids, turn.loss_mask, strict=True) if mask]
    assert kept == sampled


def test_a_killed_rollout_goes_on_and_repeats_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "t.jsonl"
    words = ["rollout", "--policy", "gold", "--level", "1", "--limit", "3", "--k", "4", "--out", str(out)]
    command = [sys.executable, "-m", "sky_trainer.cli", *words, "--concurrency", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "/12 " in line and int(line.split("/")[0]) >= 4:
                process.kill()
        assert process.wait() == -signal.SIGKILL
    before = out.read_bytes()
    finished = len(list(read_trajectories(out)))
    assert 3 <= finished < 12  # a line is printed before it is written
    assert main([*words, "--json"]) == 0
    told = capsys.readouterr().out
    assert f"{finished:4}/12 samples are in {out} already" in told
    assert json.loads(told.splitlines()[-1])["trajectories"] == 12
    after = out.read_bytes()
    assert after.startswith(before)
    names = [(t.task_id, t.sample_index) for t in read_trajectories(out)]
    assert len(names) == len(set(names)) == 12


def test_separators_inside_texts_end_no_line(tmp_path: Path) -> None:
    """What Python takes for the end of a line and JSON does not: a sample that is there is not played again."""
    sample = trajectory()
    sample.turns[0] = replace(sample.turns[0], text="a\u2028b\u2029c\x85d\x1ce\rf", observation="\ud800")
    append_sample(tmp_path / "o.jsonl", sample, "mark")
    append_sample(tmp_path / "o.jsonl", spoiled(), "mark")
    assert read_samples(tmp_path / "o.jsonl", "mark") == [sample, spoiled()]
    assert read_samples(tmp_path / "o.jsonl", "other") == []


def test_a_damaged_store_is_shown_as_far_as_it_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trajectories.jsonl"
    append_trajectories(path, [trajectory("first")])
    whole = path.read_bytes()
    damages = [
        b"\xff\x00\n",
        b"[1]\nnull\n5\n",
        whole.replace(b'"reward": 1.0', b'"reward": "x"'),
        whole.replace(b'"verdict": {', b'"verdict": [], "x": {'),
        whole.replace(b'"seconds": {', b'"seconds": null, "x": {'),
        whole.replace(b'"init": 1.0', b'"init": "x"'),
        whole.replace(b'"generate_seconds": 1.5', b'"generate_seconds": "x"'),
        whole.replace(b'"text": "', b'"text": 5, "x": "'),
        whole.replace(b'"task_id": "first"', b'"task_id": 7'),
        whole[: len(whole) // 2],
    ]
    path.write_bytes(whole + b"".join(damages))
    append_trajectories(path, [trajectory("last")])
    assert main(["show", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told == {"trajectories": ["first#0", "last#0"]}
    for number in ("1", "2", "last"):
        assert main(["show", str(path), "--trajectory", number]) == 0
    assert main(["show", str(path), "--trajectory", "3"]) == 2
    path.write_bytes(b"")
    assert main(["show", str(path)]) == 1


def test_an_export_replaces_what_is_there_and_leaves_nothing_half_done(tmp_path: Path) -> None:
    for name in ("rows.parquet", "rows.jsonl", "rows"):
        for count in (1, 2):
            assert export_rows(tmp_path / name, [trajectory()] * count, "segment") == count
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows", "rows.jsonl", "rows.parquet"]
    assert len(load_from_disk(str(tmp_path / "rows"))) == 2
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--export .*file/rows\.parquet"):
        export_rows(tmp_path / "file" / "rows.parquet", [trajectory()], "segment")


@pytest.mark.parametrize("ending", ["rows.parquet", "rows.jsonl", "rows"])
def test_rollout_collects_and_exports(ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, export = tmp_path / "t.jsonl", tmp_path / ending
    words = ["rollout", "--policy", "gold", "--level", "1", "--limit", "1", "--k", "2", "--out", str(out), "--json"]
    assert main([*words, "--export", str(export), "--rows", "turn"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    kept = list(read_trajectories(out))
    assert (told["trajectories"], told["failed"]) == (2, 0)
    assert told["rows"] == sum(len(t.turns) for t in kept)
    if ending == "rows":
        rows = load_from_disk(str(export))
    else:
        rows = Dataset.from_parquet(str(export)) if ending.endswith("parquet") else Dataset.from_json(str(export))
    assert len(rows) == told["rows"]
    assert rows[0]["token_ids"][: rows[0]["prompt_length"]] == kept[0].segments[0].token_ids[: rows[0]["prompt_length"]]
    assert all(row["reward"] == 1.0 for row in rows)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--out or --export"),
        (["--export", "rows.csv"], "must end with .parquet"),
        (["--export", "rows.jsonl", "--min-reward", "2"], "no trajectory has sampled ids"),
    ],
)
def test_rollout_refuses(words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given = [str(tmp_path / word) if word.startswith("rows.") else word for word in words]
    assert main(["rollout", "--policy", "gold", "--level", "1", "--limit", "1", *given]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert ("1/1" in said.out) == ("--min-reward" in words)  # what can be known before is said before
