"""The command line: what bad input gets, what good input leaves behind, and that nothing outlives an interrupt."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from packaging.requirements import Requirement

from sky_trainer.checks import EXTRA_MODULES
from sky_trainer.cli import main
from sky_trainer.commands.demo import recipe
from sky_trainer.commands.interrupts import deferred_interrupt
from sky_trainer.record import RunRecord, quarters, read_metrics
from skyenv.trajectory_io import read_trajectories

SMALL = [
    "--tasks.limit", "2", "--rollout.group_size", "2", "--rollout.groups_per_step", "2", "--micro_batch", "4",
    "--warm_start.steps", "5", "--warm_start.batch_size", "4", "--save_every", "1",
    "--rollout.max_tokens_per_turn", "16",
]  # fmt: skip


def last_json(text: str) -> dict[str, Any]:
    value = json.loads(text.strip().splitlines()[-1])
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "none.yaml"], "cannot read none.yaml: No such file"),
        (["train", str(recipe("demo")), "--stepz", "3"], "unknown key 'stepz'; did you mean 'steps'?"),
        (["train", str(recipe("demo")), "--steps", "few"], "steps is 'few'"),
        (["train", str(recipe("demo")), "--grpo.learning_rte", "1"], "did you mean 'grpo.learning_rate'"),
        (["train", str(recipe("demo")), "--tasks.source", "bultin"], "did you mean 'builtin'"),
        (["train", str(recipe("demo")), "--tasks.level", "99"], "nothing is left of builtin"),
        (["train", str(recipe("demo")), "--env.options", "{promt: brief}"], "promt"),
        (["train", str(recipe("demo")), "--out", "/proc/nowhere"], "cannot write to /proc/nowhere"),
        (["demo", "--steps", "0"], "--steps 0: must be at least 1"),
        (["demo", "--sed", "1"], "unknown argument '--sed'"),
        (["eval", "--policy", "gold", "--tasks", "nowhere"], "neither a set"),
        (["eval", "--policy", "gold", "--ids", "no-such-task"], "has no task 'no-such-task'"),
        (["eval", "--policy", "openai"], "needs --url"),
        (["eval", "--policy", "hf"], "needs --model"),
        (["eval", "--policy", "hf", "--model", "/nowhere", "--limit", "1"], "model '/nowhere'"),
        (["eval", "--policy", "scripted"], "needs --script"),
        (["eval", "--policy", "empty", "--k", "0"], "--k 0: must be at least 1"),
        (["eval", "--policy", "empty", "--format", "hermis"], "did you mean 'hermes'"),
        (["train", str(recipe("demo")), "--rollout.condenser", "summarise"], "set rollout.rows to segment"),
        (["train", str(recipe("demo")), "--env.options.tools", "opnhands"], "unknown name 'opnhands'"),
        (["eval", "--policy", "empty", "--rollout.histry", "strip"], "did you mean 'rollout.history'"),
        (["eval", "--policy", "empty", "--rollout", "3"], "rollout is a section"),
        (["eval", "--policy", "empty", "--rollout.group_size", "3"], "--rollout.group_size is for training alone; --k"),
        (["eval", "--policy", "empty", "--env.options.tools", "opnhands"], "unknown name 'opnhands'"),
        (
            ["eval", "--policy", "empty", "--tasks.limit", "3"],
            "unknown argument '--tasks'; see sky_trainer",
        ),
        (["eval", "--policy", "hf", "--model", "x", "--format", "openai"], "--format openai needs --policy openai"),
        (
            ["eval", "--policy", "openai", "--url", "http://x", "--rollout.template_options.enable_thinking", "false"],
            "rollout.template_options: they need --model",
        ),
        (["eval", "--policy", "empty", "--limit", "1", "--sandbox", "localhost:1"], "must start with http"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert "Traceback" not in errors
    assert len(errors.strip().splitlines()) == 1
    assert not list(tmp_path.glob("runs/*/checkpoint-*"))


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (["train", str(recipe("demo"))], "torch"),
        (["launch", str(recipe("demo"))], "packaging"),
        (["eval", "--policy", "empty", "--limit", "1"], "rich"),
        (["serve-engine", "tiny"], "torch"),
    ],
)
def test_without_the_extra_a_command_says_what_to_install(words: list[str], missing: str, tmp_path: Path) -> None:
    block = f"import sys; sys.modules.update(dict.fromkeys({sorted(EXTRA_MODULES)}))"
    program = f"{block}; from sky_trainer.cli import main; sys.exit(main({words}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"{words[0]} needs {missing}: pip install 'skyenv[train]'" in done.stderr


def test_the_extra_is_known_by_name() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = project["optional-dependencies"]["train"]
    assert {Requirement(text).name for text in wanted} == EXTRA_MODULES


def test_eval_gold_and_empty(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "t.jsonl"
    words = ["eval", "--level", "1", "--limit", "2", "--json", "--out", str(out)]
    assert main([*words, "--policy", "gold"]) == 0
    result = last_json(capsys.readouterr().out)
    expected = {"tasks": 2, "resolved": 2, "resolved_rate": 1.0, "statuses": {"resolved": 2}}
    assert {name: result[name] for name in expected} == expected
    assert [t.verdict["resolved"] for t in read_trajectories(out)] == [True, True]
    assert main([*words, "--policy", "empty", "--k", "2"]) == 0
    result = last_json(capsys.readouterr().out)
    assert result["resolved"] == result["pass@2"] == 0
    assert result["statuses"] == {"empty_patch": 4}


def test_eval_goes_on_where_it_ended(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out, predictions = tmp_path / "t.jsonl", tmp_path / "preds.jsonl"
    words = ["eval", "--level", "1", "--policy", "gold", "--json", "--out", str(out), "--predictions", str(predictions)]
    assert main([*words, "--limit", "1"]) == 0
    assert main([*words, "--limit", "2", "--k", "2"]) == 0
    printed = capsys.readouterr().out
    assert f"1/4 samples are in {out} already" in printed
    assert last_json(printed)["resolved"] == 4
    found = sorted((t.task_id, t.sample_index) for t in read_trajectories(out))
    assert len(found) == len(set(found)) == 4
    assert main([*words, "--limit", "2", "--k", "2"]) == 0
    assert len(list(read_trajectories(out))) == 4
    assert main([*words, "--limit", "1", "--fresh"]) == 0
    assert len(list(read_trajectories(out))) == 5
    rows = [json.loads(line) for line in predictions.read_text().splitlines()]
    assert [set(row) for row in rows] == [{"instance_id", "model_name_or_path", "model_patch"}]
    assert rows[0]["model_patch"].startswith("diff --git")


def test_eval_takes_keys_of_rollout_and_env(tmp_path: Path) -> None:
    out = tmp_path / "t.jsonl"
    script = tmp_path / "s.yaml"
    script.write_text("[{name: think, arguments: {thought: why}}, {name: finish}]")
    words = ["eval", "--policy", "scripted", "--script", str(script), "--level", "1", "--limit", "1", "--out", str(out)]
    assert main([*words, "--rollout.remind_seconds", "1800"]) == 0
    assert main([*words, "--rollout.format=codeact", "--env.options.tools", "openhands"]) == 0
    strict, openhands = (trajectory.turns[0] for trajectory in read_trajectories(out))
    assert "seconds left" in strict.observation
    assert "seconds left" not in openhands.observation
    assert "think" in strict.observation.splitlines()[0]  # no such tool in the preset
    assert "<function=think>" in openhands.text
    assert openhands.observation == "Your thought has been logged."


def test_eval_gold_by_patch_and_scripted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A task whose known fix is a patch, and a script that calls a tool that does not exist."""
    assert main(["eval", "--level", "3", "--limit", "1", "--json", "--policy", "gold"]) == 0
    assert last_json(capsys.readouterr().out)["resolved"] == 1
    script = tmp_path / "s.yaml"
    script.write_text("[{name: no_such_tool}, 'no call at all', {name: finish}]")
    words = ["eval", "--policy", "scripted", "--script", str(script), "--limit", "1", "--level", "1", "--json"]
    assert main(words) == 0
    assert last_json(capsys.readouterr().out)["statuses"] == {"empty_patch": 1}


def test_an_empty_script_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--policy", "scripted", "--limit", "1", "--level", "1", "--script", "/dev/null"]) == 2
    assert "no list of turns" in capsys.readouterr().err


@pytest.mark.parametrize(("status", "body"), [(500, "{}"), (200, '{"choices": 7}'), (200, "<html>")])
def test_a_server_that_answers_nonsense_is_a_typed_failure(
    status: int, body: str, capsys: pytest.CaptureFixture[str]
) -> None:
    class Nonsense(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Nonsense) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        words = ["eval", "--policy", "openai", "--url", url, "--model", "m", "--limit", "1", "--level", "1", "--json"]
        assert main(words) == 1
        server.shutdown()
    output = capsys.readouterr()
    assert last_json(output.out)["statuses"] == {"EngineUnavailable" if status == 500 else "EngineError": 1}
    assert "Traceback" not in output.err


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor", "--json"])
    result = last_json(capsys.readouterr().out)
    assert status == (0 if result["ok"] else 1)
    names = {check["name"] for check in result["checks"]}
    assert {"system", "packages", "sandboxes", "disk", "gpu", "docker"} <= names
    assert all(check["ok"] or check["advice"] for check in result["checks"])


def test_a_small_run_end_to_end_and_resumed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The demo's own path: experts, warm start and GRPO in real sandboxes with the real grader."""
    run_dir = tmp_path / "run"
    words = ["train", str(recipe("demo")), "--json", "--out", str(run_dir), *SMALL]
    assert main([*words, "--steps", "2"]) == 0
    result = last_json(capsys.readouterr().out)
    assert result["run_dir"] == str(run_dir)
    assert result["seed"] == 0
    assert 0 <= result["first_quarter"] <= 1
    for name in (
        "config.yaml",
        "metrics.jsonl",
        "trajectories.jsonl",
        "reward.png",
        "checkpoint-2",
        "final",
        "tensorboard",
    ):
        assert (run_dir / name).exists(), name
    assert not (run_dir / "README.md").exists()
    assert [row["step"] for row in read_metrics(run_dir)] == [1, 2]
    played = list(read_trajectories(run_dir / "trajectories.jsonl"))
    assert len(played) == 8
    assert all(trajectory.exact and trajectory.failure is None for trajectory in played)
    for row in read_metrics(run_dir):
        assert row["count/drift"] == 0
        assert row["sampling/sampling_logp_difference/max"] < 1e-4
    assert main([*words, "--steps", "3"]) == 0
    assert [row["step"] for row in read_metrics(run_dir)] == [1, 2, 3]
    assert len(list(read_trajectories(run_dir / "trajectories.jsonl"))) == 12
    capsys.readouterr()
    assert main([*words, "--steps", "3", "--rollout.temperature", "0.5"]) == 2
    assert "another rollout.temperature" in capsys.readouterr().err
    assert main([*words, "--steps", "3", "--resume", "false"]) == 2
    assert "holds a run already" in capsys.readouterr().err


def test_an_interrupt_keeps_what_was_written_and_leaves_nothing(tmp_path: Path) -> None:
    run_dir, state = tmp_path / "run", tmp_path / "state"
    state.mkdir()
    words = ["train", str(recipe("demo")), "--out", str(run_dir), *SMALL, "--steps", "500"]
    process = subprocess.Popen(
        [sys.executable, "-m", "sky_trainer.cli", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "SKYENV_STATE_DIR": str(state)},
    )
    deadline = time.monotonic() + 400
    while len(read_metrics(run_dir)) < 2:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    (line,) = [line for line in errors.splitlines() if line.startswith("sky_trainer:")]
    assert "interrupted after" in line
    assert "Traceback" not in errors
    assert len(read_metrics(run_dir)) >= 2
    assert (run_dir / "reward.png").exists()
    assert list(state.iterdir()) == []
    mounts = Path("/proc/self/mounts").read_text()
    assert str(state) not in mounts
    assert not [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(state) in read_or_nothing(p)]


def test_an_interrupt_during_imports_is_not_lost() -> None:
    """One that lands in a destructor, where Python drops exceptions, is raised at the end all the same."""

    class Fragile:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    def import_much() -> None:
        with deferred_interrupt():
            Fragile()
            reached.append(True)

    before = signal.getsignal(signal.SIGINT)
    reached: list[bool] = []
    with pytest.raises(KeyboardInterrupt):
        import_much()
    assert reached
    assert signal.getsignal(signal.SIGINT) is before


def read_or_nothing(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""


def test_records_of_steps_after_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    record = RunRecord(tmp_path)
    for step in (1, 2, 3):
        record.metrics(step, {"reward": step / 10, "broken": float("nan"), "text": "no number"})
    record.close()
    (tmp_path / "metrics.jsonl").open("a").write('{"step": 4, "rew')  # cut short by a crash
    again = RunRecord(tmp_path, first_step=2)
    again.metrics(3, {"reward": 0.9})
    again.close()
    rows = read_metrics(tmp_path)
    assert [(row["step"], row["reward"]) for row in rows] == [(1, 0.1), (2, 0.2), (3, 0.9)]
    assert rows[0]["broken"] is None
    assert rows[2]["elapsed"] >= rows[1]["elapsed"]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([], (None, None)),
        ([0.5], (0.5, 0.5)),
        ([0, 0.2, 0.5, 0.5, 0.5, 0.5, 0.8, 1.0], (0.1, 0.9)),
        ([None, 1.0], (1.0, 1.0)),
    ],
)
def test_quarters(rewards: list[float | None], expected: tuple[float | None, float | None]) -> None:
    assert quarters([{"reward": reward} for reward in rewards]) == expected
