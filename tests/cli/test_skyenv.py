"""The `skyenv` command as a user meets it: real processes, real sandboxes, wrong input."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import skyenv

PROGRAM = Path(sys.executable).parent / "skyenv"


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, timeout=500, check=False, cwd=cwd)


@pytest.mark.parametrize("program", ["skyenv", "sky_trainer"])
def test_version(program: str) -> None:
    answer = subprocess.run([PROGRAM.parent / program, "--version"], capture_output=True, text=True, check=True)
    assert answer.stdout == importlib.metadata.version("skyenv") + "\n"


def test_sources_that_nobody_installed_run(tmp_path: Path) -> None:
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "skyenv" not in entry.name:
            (tmp_path / entry.name).symlink_to(entry)
    paths = {"PYTHONPATH": f"{Path(skyenv.__file__).parents[1]}:{tmp_path}", "PATH": os.environ["PATH"]}
    command = [sys.executable, "-S", "-m", "skyenv.cli", "--version"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, env=paths, cwd=tmp_path)
    assert (answer.returncode, answer.stdout) == (0, "unknown: run from sources\n"), answer.stderr


def test_list_and_show() -> None:
    listed = run("tasks", "list", "builtin", "--json")
    names = json.loads(listed.stdout.splitlines()[-1])["tasks"]
    assert len(names) >= 30
    shown = run("tasks", "show", "builtin", names[0], "--json")
    row = json.loads(shown.stdout.splitlines()[-1])
    assert row["task_id"] == names[0]
    assert row["problem"] in shown.stdout
    assert "reference" not in row


def test_validate_says_which_task_is_unsound_and_why(tmp_path: Path) -> None:
    row = {
        "task_id": "nothing-to-fix",
        "problem": "It fails.",
        "source": {"files": {"one.py": "ONE = 1\n"}},
        "tests": {
            "files": {
                "tests/test_one.py": "import unittest\nimport one\n\n\nclass One(unittest.TestCase):\n"
                "    def test_one(self):\n        self.assertEqual(one.ONE, 1)\n"
            }
        },
        "fail_to_pass": ["tests/test_one.py::One::test_one"],
        "reference": {"patch": "--- a/one.py\n+++ b/one.py\n@@ -1 +1 @@\n-ONE = 1\n+ONE = 2\n"},
    }
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(row) + "\n")
    result = run("tasks", "validate", str(path), "--json")
    report = json.loads(result.stdout.splitlines()[-1])
    assert result.returncode == 1
    assert (report["tasks"], report["admitted"], report["refused"]) == (1, 0, 1)
    assert any("test_one" in problem for problem in report["problems"]["nothing-to-fix"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["tasks", "list", "builtn"], "did you mean 'builtin'"),
        (["tasks", "list", "/nowhere.yaml"], "/nowhere.yaml"),
        (["tasks", "show", "builtin", "no-such-task"], "no task 'no-such-task'"),
        (["tasks", "validate", "builtin", "--runs", "0"], "--runs"),
        (["tasks", "validate", "builtin", "--id", "absent"], "no task 'absent'"),
        (["serve", "--host", "0.0.0.0"], "token"),
        (["serve", "--token-file", "/nowhere/token"], "/nowhere/token"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(arguments: list[str], expected: str) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert expected in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
async def test_serve_answers_a_client_and_ends_on_a_signal(ending: signal.Signals, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a-secret\n")
    command = [PROGRAM, "serve", "--port", "0", "--token-file", token]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = next(word for word in server.stdout.readline().split() if word.startswith("http://127.0.0.1:"))
        async with skyenv.connect(url, "a-secret") as client, client.sandbox() as box:
            assert (await box.exec("echo alive")).output == "alive\n"
        with pytest.raises(skyenv.SkyEnvError, match="token"):
            async with skyenv.connect(url, "wrong") as client, client.sandbox():
                pass
        server.send_signal(ending)
        assert server.wait(timeout=300) == 0
        assert server.stderr is not None
        assert "Traceback" not in server.stderr.read()
