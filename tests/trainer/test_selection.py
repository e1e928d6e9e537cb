"""Evaluations in numbers, their file, and curriculum stages made from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sky_trainer.cli import main
from sky_trainer.evaluated import append_sample, read_samples, write_predictions
from sky_trainer.scores import interval, pass_at, scores
from skyenv.envs.swe.loading import load_tasks
from skyenv.types import Failure, StopReason, Trajectory

IDS = [task.task_id for task in load_tasks("builtin")][:4]


def sample(task_id: str, index: int, resolved: bool, failed: bool = False) -> Trajectory:
    verdict = {} if failed else {"resolved": resolved, "status": "resolved" if resolved else "unresolved", "patch": "p"}
    return Trajectory(
        task_id,
        sample_index=index,
        verdict=verdict,
        reward=None if failed else float(resolved),
        stop_reason=StopReason.SANDBOX_ERROR if failed else StopReason.FINISH,
        failure=Failure("run", "SandboxLost", "gone") if failed else None,
        seconds={"init": 1.0, "run": 2.0, "eval": 3.0},
    )


def evaluation(path: Path, solved: dict[str, int], samples: int, mark: str = "a") -> Path:
    for task_id, count in solved.items():
        for index in range(samples):
            append_sample(path, sample(task_id, index, index < count), mark)
    return path


def test_rates_intervals_and_pass_at_k() -> None:
    solved = {"a": (0, 4), "b": (1, 4), "c": (4, 4)}
    assert pass_at(solved, 1) == pytest.approx((0 + 1 / 4 + 1) / 3)
    assert pass_at(solved, 2) == pytest.approx((0 + (1 - 3 / 6) + 1) / 3)
    assert pass_at(solved, 4) == pytest.approx(2 / 3)
    assert interval({"a": (1, 1), "b": (0, 1)}) == pytest.approx((0.0945, 0.9055), abs=1e-3)  # Wilson, by hand
    assert interval({}) == interval({"a": (1, 4)}) == (0.0, 1.0)
    low, high = interval(solved)
    assert 0.0 <= low < 5 / 12 < high <= 1.0
    every = [sample("a", 0, True), sample("a", 1, False), sample("b", 0, False, failed=True), sample("b", 1, True)]
    result = scores(every, 2)
    assert (result["tasks"], result["resolved"], result["resolved_rate"]) == (2, 2, 0.5)
    assert result["statuses"] == {"SandboxLost": 1, "resolved": 2, "unresolved": 1}
    assert result["stop_reasons"] == {"finish": 3, "sandbox_error": 1}
    assert (result["pass@1"], result["pass@2"]) == (0.5, 1.0)
    assert result["seconds"]["eval"] == {"mean": 3.0, "p50": 3.0, "max": 3.0}
    assert scores([], 1)["resolved_rate"] == 0.0


def test_the_file_keeps_evaluations_apart_and_survives_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    append_sample(path, sample("a", 0, False, failed=True), "one")
    append_sample(path, sample("a", 0, True), "one")
    append_sample(path, sample("a", 0, False), "two")
    with path.open("a") as file:
        file.write('{"format": 1, "task_id": "cut')
    append_sample(path, sample("a", 1, True), "one")
    assert [(t.sample_index, t.reward) for t in read_samples(path, "one")] == [(0, 1.0), (1, 1.0)]
    assert [t.reward for t in read_samples(path, "two")] == [0.0]
    assert len(read_samples(path)) == 3


def test_predictions_are_one_sample_a_file(tmp_path: Path) -> None:
    every = [sample("a", 0, True), sample("b", 0, True, failed=True), sample("a", 1, False)]
    files = write_predictions(tmp_path / "deep" / "preds.jsonl", every, "m")
    assert [file.name for file in files] == ["preds.jsonl", "preds.sample1.jsonl"]
    rows = [json.loads(line) for line in files[0].read_text().splitlines()]
    assert rows == [{"instance_id": "a", "model_name_or_path": "m", "model_patch": "p"}]


def test_tasks_that_are_solved_sometimes_become_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    never, once, often, always = IDS
    one = evaluation(tmp_path / "one.jsonl", {never: 0, once: 1, often: 3, always: 4}, 4)
    two = evaluation(tmp_path / "two.jsonl", {never: 0, often: 4, always: 4}, 4, mark="b")
    out = tmp_path / "stage.json"
    words = ["select", str(one), str(two), "--tasks", "builtin", "--out", str(out), "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["sizes"] == [2]
    assert [task.task_id for task in load_tasks(out)] == [often, once]
    assert main([*words, "--sizes", "1", "--max-rate", "1"]) == 0
    stages = [[task.task_id for task in load_tasks(tmp_path / f"stage-{number}.json")] for number in (1, 2)]
    assert stages == [[always], [often, once]]
    assert main([*words, "--min-solved", "9"]) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-rate", "2"], "--max-rate 2.0: must be from 0 to 1"),
        (["--sizes", "x"], "--sizes x"),
        (["--sizes", "0"], "--sizes: each must be at least 1"),
        (["--tasks", "nowhere"], "neither a set"),
    ],
)
def test_wrong_input(words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = evaluation(tmp_path / "one.jsonl", {IDS[0]: 1}, 2)
    assert main(["select", str(one), "--tasks", "builtin", "--out", str(tmp_path / "o.json"), *words]) == 2
    assert message in capsys.readouterr().err


def test_files_that_are_no_evaluations_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "no.jsonl").write_text("{}\n")
    for name in ("no.jsonl", "missing.jsonl"):
        assert main(["select", str(tmp_path / name), "--tasks", "builtin", "--out", str(tmp_path / "o.json")]) == 2
        assert name in capsys.readouterr().err


def test_a_stage_names_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(json.dumps({"tasks": "builtin", "ids": [IDS[0][:-1] + "x"]}))
    with pytest.raises(ValueError, match=f"did you mean '{IDS[0]}'"):
        load_tasks(tmp_path / "s.json")
