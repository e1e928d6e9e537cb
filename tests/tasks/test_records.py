"""Admission as its users meet it: what is measured, what is written, what grading and training make of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import skyenv
from skyenv.core import Sandbox, SandboxProvider
from skyenv.envs.swe.loading import load_tasks
from skyenv.envs.swe.records import read_records, records_path, require_records, write_records
from skyenv.envs.swe.rows import parse_task
from skyenv.envs.swe.tasks import Record, SweTask
from skyenv.envs.swe.validation import validate_task
from skyenv.errors import ConfigError

PROGRAM = Path(sys.executable).parent / "skyenv"
GOLD = "--- a/one.py\n+++ b/one.py\n@@ -1 +1 @@\n-ONE = 2\n+ONE = 1\n"
TESTS = """\
import os, unittest
import one

class One(unittest.TestCase):
    def test_one(self):
        self.assertEqual(one.ONE, 1)
        self.assertNotIn(os.environ.get("ROUND"), FAILING_ONE)
    def test_type(self):
        self.assertIsInstance(one.ONE, int)
        self.assertNotIn(os.environ.get("ROUND"), FAILING_TYPE)
    @unittest.skipUnless(one.ONE == 1 or SKIP, "not yet")
    def test_sometimes(self):
        if SKIP:
            self.skipTest("never here")
    @unittest.expectedFailure
    def test_known(self):
        self.fail()
"""


def row(*, one: str = "()", kind: str = "()", skip: str = "True", **changes: Any) -> dict[str, Any]:
    tests = TESTS.replace("FAILING_ONE", one).replace("FAILING_TYPE", kind).replace("SKIP", skip)
    name = "tests/test_one.py::One::{}".format
    return {
        "task_id": "one",
        "problem": "ONE is 2",
        "source": {"files": {"one.py": "ONE = 2\n"}},
        "tests": {"files": {"tests/test_one.py": tests}},
        "fail_to_pass": [name("test_one")],
        "pass_to_pass": [name("test_type"), name("test_sometimes"), name("test_known")],
        "reference": {"patch": GOLD},
        "timeout": 20,
        **changes,
    }


def task(**changes: Any) -> SweTask:
    return parse_task(row(**changes), "test", Path())


class Rounds:
    """A provider that tells each of its sandboxes its number, so that tests can be made to differ from run to run."""

    def __init__(self, provider: SandboxProvider) -> None:
        self._provider, self._number = provider, 0

    @asynccontextmanager
    async def sandbox(
        self, image: str | None = None, *, env: Mapping[str, str] | None = None, **options: Any
    ) -> AsyncIterator[Sandbox]:
        self._number += 1
        variables = {**(env or {}), "ROUND": str(self._number)}
        async with self._provider.sandbox(image, env=variables, **options) as box:
            yield box

    async def delete_snapshot(self, snapshot: str) -> None:
        await self._provider.delete_snapshot(snapshot)


async def validate(given: SweTask, runs: int = 2) -> dict[str, Any]:
    async with skyenv.connect() as client:
        return await validate_task(given, Rounds(client), runs=runs)


async def test_what_the_reference_skips_and_expects_to_fail_is_noted() -> None:
    result = await validate(task())
    assert result["ok"], result["problems"]
    record = result["record"]
    name = "tests/test_one.py::One::{}".format
    assert record.accept == {name("test_sometimes"): "skipped", name("test_known"): "xfailed"}
    assert (record.flaky, record.allow, record.runs, record.exit_status) == ((), (), 2, 1)
    assert record.seconds > 0


async def test_a_test_to_keep_that_changes_its_mind_is_left_out() -> None:
    """The sixth sandbox is that of the second run with the reference."""
    given = task(kind="('6',)")
    result = await validate(given)
    assert result["ok"], result["problems"]
    assert result["record"].flaky == ("tests/test_one.py::One::test_type",)
    assert "tests/test_one.py::One::test_type" not in given.admitted(result["record"]).expected


async def test_a_failing_test_that_changes_its_mind_refuses_the_task() -> None:
    result = await validate(task(one="('6',)"))
    assert not result["ok"]
    assert any(problem.startswith("flaky: tests/test_one.py::One::test_one") for problem in result["problems"])


async def test_a_need_for_a_network_is_named() -> None:
    code = "import socket\nsocket.getaddrinfo('localhost.invalid', 80)\nONE = 2\n"
    patch = GOLD.replace("@@ -1 +1 @@", "@@ -1,3 +1,3 @@\n import socket\n socket.getaddrinfo('localhost.invalid', 80)")
    result = await validate(task(source={"files": {"one.py": code}}, reference={"patch": patch}), runs=1)
    assert any("it asks for a network" in problem for problem in result["problems"]), result["problems"]


def test_every_task_that_ships_has_a_record() -> None:
    """When this fails: `skyenv tasks validate NAME --runs 2 --out skyenv/envs/swe/data/NAME.records.jsonl`."""
    for name in ("builtin", "pypi", "mutated"):
        require_records(load_tasks(name), name)


def test_records_are_found_beside_the_set_and_only_for_the_row_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "set.json"
    path.write_text(json.dumps([row(), row(task_id="two")]))
    one, two = load_tasks(path)
    record = Record("one", one.digest, 1, 0.5, 1, {}, ("tests/test_one.py::One::test_known",))
    write_records(records_path(path), [record, Record("two", "0" * 64, 1, 0.5)])
    assert records_path(path) == tmp_path / "set.records.jsonl"
    admitted, stale = load_tasks(path)
    assert (admitted.record, stale.record) == (record, None)
    assert admitted.timeout == 20
    assert load_tasks(path, admitted=False)[0].record is None
    write_records(records_path(path), [], gone=["one"])
    assert set(read_records(records_path(path))) == {"two"}
    with pytest.raises(
        ConfigError, match=r"'one' \(and 1 more\) of .*set.json has no evaluation record.*tasks validate"
    ):
        require_records([one, two], path)


def test_what_does_not_change_grading_does_not_change_the_digest() -> None:
    same = task(problem="ONE should be 1", level=3)
    assert same.digest == task().digest
    assert len({task().digest, task(timeout=21).digest, task(skip="False").digest, task(repo_path="/x").digest}) == 4


@pytest.mark.parametrize("line", ["{", "[]", '{"task_id": "one"}', "null"])
def test_broken_records_are_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.records.jsonl").write_text(line + "\n")
    with pytest.raises(ConfigError, match=r"a\.records\.jsonl: line 1: .*validate the task again"):
        read_records(tmp_path / "a.records.jsonl")


def run(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([PROGRAM, *arguments], capture_output=True, input=stdin, timeout=500, check=False)


def test_commands(tmp_path: Path) -> None:
    """Validate a set with a broken row, then grade patches for the task that was admitted."""
    path, patch = tmp_path / "set.jsonl", tmp_path / "fix.diff"
    path.write_text(json.dumps(row(fail_to_pass=[])) + "\n" + json.dumps(row(task_id="two")) + "\n")
    patch.write_text(GOLD)
    done = run("tasks", "validate", str(path), "--json")
    report = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 1
    assert (report["tasks"], report["admitted"], report["refused"]) == (2, 1, 1)
    assert "row 1 (one): fail_to_pass: is empty" in report["rows"][0]
    assert set(read_records(Path(report["records"]))) == {"two"}
    path.write_text(json.dumps(row(task_id="two")) + "\n")
    good = run("tasks", "grade", str(path), "--id", "two", "--patch", str(patch), "--json")
    verdict = json.loads(good.stdout.splitlines()[-1])
    assert (good.returncode, verdict["status"], verdict["resolution"]) == (0, "resolved", "FULL")
    wrong_patch = GOLD.replace("+ONE = 1", "+ONE = 3").encode()
    bad = run("tasks", "grade", str(path), "--id", "two", "--patch", "-", "--json", stdin=wrong_patch)
    verdict = json.loads(bad.stdout.splitlines()[-1])
    assert (bad.returncode, verdict["status"], verdict["reward"]) == (1, "unresolved", 0.0)
    for arguments, message in (
        (["--id", "three", "--patch", "-"], b"no task 'three'"),
        (["--id", "two", "--patch", "x"], b"--patch x"),
    ):
        wrong = run("tasks", "grade", str(path), *arguments)
        assert (wrong.returncode, len(wrong.stderr.splitlines())) == (2, 1)
        assert message in wrong.stderr


def test_nothing_is_trained_on_without_a_record(tmp_path: Path) -> None:
    path = tmp_path / "set.json"
    path.write_text(json.dumps([row()]))
    recipe = Path(__file__).parents[2] / "recipes" / "demo.yaml"
    command = [PROGRAM.with_name("sky_trainer"), "train", str(recipe), "--tasks.source", str(path)]
    done = subprocess.run([*command, "--out", str(tmp_path / "run")], capture_output=True, timeout=500, check=False)
    assert done.returncode == 2, done.stderr
    assert f"tasks: 'one' of {path} has no evaluation record".encode() in done.stderr
    assert f"skyenv tasks validate {path}".encode() in done.stderr
    assert not (tmp_path / "run").exists()
