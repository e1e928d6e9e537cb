"""`skyenv tasks build` as its user meets it: a small project of their own becomes tasks that grade as they must."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import skyenv
from skyenv.envs.swe.loading import load_tasks
from skyenv.envs.swe.making.releases import change_log, changed_code
from skyenv.envs.swe.sources import TreeFile
from skyenv.envs.swe.validation import validate_task
from tests.rollout.servers import Server, serving

PROGRAM = Path(sys.executable).parent / "skyenv"
CODE = '''"""Numbers."""


def clamp(value, low, high=10):
    """Bring a value into a range.

    Details.
    """
    if value < low:
        return low
    if value > high:
        return high
    return value


def spread(values):
    ordered = sorted(values)
    return ordered[-1] - ordered[0]
'''
TESTS = """import unittest

from numbers_ import clamp, spread


class Clamp(unittest.TestCase):
    def test_below(self):
        self.assertEqual(clamp(-5, 0), 0)

    def test_above(self):
        self.assertEqual(clamp(50, 0), 10)

    def test_inside(self):
        self.assertEqual(clamp(5, 0), 5)
"""
SPREAD_TESTS = TESTS.replace("Clamp", "Spread").partition("    def")[0] + (
    "    def test_order_does_not_matter(self):\n        self.assertEqual(spread([3, 1, 2]), 2)\n"
)


def build(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [PROGRAM, "tasks", "build", *arguments, "--runner", "unittest", "--packages", "--json"]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)


def project(folder: Path) -> Path:
    folder.mkdir()
    (folder / "tests").mkdir()
    (folder / "numbers_.py").write_text(CODE)
    (folder / "tests" / "__init__.py").write_text("")
    (folder / "tests" / "test_clamp.py").write_text(TESTS)
    (folder / "tests" / "test_spread.py").write_text(SPREAD_TESTS)
    return folder


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


async def test_bugs_are_injected_and_the_tests_that_tell_are_taken_away(tmp_path: Path) -> None:
    folder, out = project(tmp_path / "numbers"), tmp_path / "tasks.jsonl"
    (folder / ".venv").mkdir()
    (folder / ".venv" / "test_nothing.py").write_text("raise SystemExit")
    done = build("mutate", str(folder), "--out", str(out), "--count", "4")
    assert done.returncode == 0, done.stderr + done.stdout
    assert json.loads(done.stdout.splitlines()[-1])["tasks"] == 4
    for row in rows(out):
        telling = {test.split("::")[0] for test in row["fail_to_pass"]}
        assert set(row["source"]["edited"]["remove"]) == telling
        assert "numbers_" in row["problem"]
        assert all(
            edit["new"] not in row["problem"] for edit in row["source"]["edited"]["edits"] if len(edit["new"]) > 9
        )
    async with skyenv.connect() as client:
        record = await validate_task(load_tasks(out)[0], client)
    assert record["ok"], record


def test_a_second_run_goes_on_where_the_first_ended(tmp_path: Path) -> None:
    folder, out = project(tmp_path / "numbers"), tmp_path / "tasks.jsonl"
    assert build("mutate", str(folder), "--out", str(out), "--count", "1").returncode == 0
    first = rows(out)
    again = build("mutate", str(folder), "--out", str(out), "--count", "2")
    assert json.loads(again.stdout.splitlines()[-1])["tasks"] == 1
    assert rows(out)[:1] == first
    assert len(load_tasks(out)) == 2


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=A", "-c", "user.email=a@localhost"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def history(folder: Path) -> Path:
    """Four commits: a start with a bug, one of documents, one that fixes it with a test, one of code alone."""
    project(folder)
    good = (folder / "numbers_.py").read_text()
    (folder / "numbers_.py").write_text(good.replace("ordered[-1]", "ordered[-2]"))
    (folder / "tests" / "test_spread.py").unlink()
    git(folder, "init", "-q", "-b", "main")
    for message, write in (
        ("Start", lambda: None),
        ("Say more", lambda: (folder / "README").write_text("more")),
        (
            "Spread covers the largest value\n\nIt was one short.\n\nSigned-off-by: A <a@localhost>",
            lambda: (
                (folder / "numbers_.py").write_text(good),
                (folder / "tests/test_spread.py").write_text(SPREAD_TESTS),
            ),
        ),
        ("Rename", lambda: (folder / "numbers_.py").write_text(good.replace("ordered", "sorted_"))),
    ):
        write()
        git(folder, "add", "-A")
        git(folder, "commit", "-q", "-m", message)
    return folder


def test_commits_that_fix_code_together_with_tests_become_tasks(tmp_path: Path) -> None:
    folder, out = history(tmp_path / "numbers"), tmp_path / "tasks.jsonl"
    done = build("git", str(folder), "--out", str(out), "--tests", "tests")
    assert done.returncode == 0, done.stderr + done.stdout
    (row,) = rows(out)
    assert row["problem"].startswith("Spread covers the largest value\n\nIt was one short.")
    assert "Signed-off-by" not in row["problem"]
    assert row["fail_to_pass"] == ["tests/test_spread.py::Spread::test_order_does_not_matter"]
    assert row["reference"]["git"]["paths"] == ["numbers_.py"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["mutate", "missing"], "neither a directory nor NAME==VERSION"),
        (["mutate", ".", "--operators", "typo"], "--operators typo"),
        (["mutate", ".", "--count", "0"], "--count"),
        (["mutate", ".", "--env", "A"], "NAME=VALUE"),
        (["mutate", ".", "--tests", "nowhere"], "--tests"),
        (["git", "missing"], "cannot be cloned"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], said: str, tmp_path: Path) -> None:
    folder = str(project(tmp_path / "numbers"))
    given = [folder if argument == "." else argument for argument in arguments]
    done = build(*given, "--out", str(tmp_path / "out.jsonl"))
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_a_project_whose_tests_fail_makes_no_tasks(tmp_path: Path) -> None:
    folder = project(tmp_path / "numbers")
    (folder / "numbers_.py").write_text("def clamp(*_): pass\ndef spread(_): pass\n")
    done = build("mutate", str(folder), "--out", str(tmp_path / "out.jsonl"))
    assert done.returncode == 2
    assert "none of the source's own tests passes" in done.stderr


def test_a_model_writes_the_issue_text(tmp_path: Path) -> None:
    folder, out = project(tmp_path / "numbers"), tmp_path / "tasks.jsonl"
    with serving(Server(owner="openai")) as server:
        done = build("mutate", str(folder), "--out", str(out), "--count", "1", "--writer-url", server.url)
        assert done.returncode == 0, done.stderr + done.stdout
        (asked,) = [body for body in server.bodies if "messages" in body]
    prompt = asked["messages"][0]["content"]
    (row,) = rows(out)
    assert "Something is wrong with" in prompt
    assert row["problem"] != prompt
    assert all(edit["old"] not in prompt for edit in row["source"]["edited"]["edits"] if len(edit["old"]) > 9)


def test_releases_are_told_apart_by_their_own_code_and_change_log() -> None:
    old = {"CHANGES.md": TreeFile(b"1\nfirst\n"), "p/a.py": TreeFile(b"1"), "p/b.py": TreeFile(b"1")}
    new = {
        "CHANGES.md": TreeFile(b"2\nsecond\n1\nfirst\n"), "p/a.py": TreeFile(b"2"), "p/b.py": TreeFile(b"1"),
        "tests/test_a.py": TreeFile(b""), "p/c.py": TreeFile(b""), "docs/conf.py": TreeFile(b"2"),
    }  # fmt: skip
    assert changed_code(old, new, ["tests/test_a.py"]) == ["p/a.py", "p/c.py"]
    assert change_log(old, new) == "2\nsecond"
    assert change_log(old, {}) == ""
