"""A small repository with one bug, as a task for both runners, and a way to grade what a script does to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from skyenv.core import SandboxProvider
from skyenv.envs.swe.environment import Environments, start_repository
from skyenv.envs.swe.grading import grade_work_tree, read_agent
from skyenv.envs.swe.rows import parse_task
from skyenv.envs.swe.tasks import SweTask

FIX = "sed -i 's/a - b/a + b/' calc.py\n"

SOURCE = {
    "calc.py": "def add(a, b):\n    return a - b\n\n\ndef mul(a, b):\n    return a * b\n",
    "crlf.txt": "one\r\ntwo\r\n",
    "README.md": "A calculator\n\n\n",
    ".gitignore": "*.dat\nbuild/\n",
    "pyproject.toml": '[project]\nname = "calc"\n[tool.pytest.ini_options]\naddopts = "-ra"\n',
    "tests/helper.py": "def check(left, right):\n    assert left == right, (left, right)\n",
    "tests/test_old.py": "def test_nothing():\n    pass\n",
}
TEST_UNITTEST = """\
import unittest

import calc
from tests.helper import check


class Calc(unittest.TestCase):
    def test_add(self):
        check(calc.add(2, 3), 5)

    def test_add_negative(self):
        check(calc.add(2, -3), -1)

    def test_mul(self):
        check(calc.mul(2, 3), 6)
"""
TEST_PYTEST = """\
import calc
from tests.helper import check


class TestCalc:
    def test_add(self):
        check(calc.add(2, 3), 5)

    def test_add_negative(self):
        check(calc.add(2, -3), -1)

    def test_mul(self):
        check(calc.mul(2, 3), 6)
"""
GOLD = """\
--- a/calc.py
+++ b/calc.py
@@ -1,5 +1,5 @@
 def add(a, b):
-    return a - b
+    return a + b
 
 
 def mul(a, b):
"""  # noqa: W293


def row(runner: str = "unittest", **changes: Any) -> dict[str, Any]:
    kind = "Calc" if runner == "unittest" else "TestCalc"
    test = TEST_UNITTEST if runner == "unittest" else TEST_PYTEST
    return {
        "task_id": f"calc-{runner}",
        "problem": "add subtracts",
        "source": {"files": dict(SOURCE)},
        "tests": {"files": {"tests/test_calc.py": test}},
        "runner": runner,
        "environment": {} if runner == "unittest" else {"packages": ["pytest==8.3.5"]},
        "fail_to_pass": [f"tests/test_calc.py::{kind}::{name}" for name in ("test_add", "test_add_negative")],
        "pass_to_pass": [f"tests/test_calc.py::{kind}::test_mul"],
        "reference": {"patch": GOLD},
        "timeout": 120,
        **changes,
    }


def task(runner: str = "unittest", **changes: Any) -> SweTask:
    return parse_task(row(runner, **changes), "test", Path.cwd())


async def grade_script(provider: SandboxProvider, task: SweTask, script: str) -> dict[str, Any]:
    """Do what an agent would: run a script in the repository; then grade what is there."""
    environments = Environments.of(provider)
    async with environments.open(task) as box:
        await start_repository(box, task.repo_path)
        await box.exec(script, timeout=300.0)
        tree = await read_agent(task, box, environments)
    return await grade_work_tree(task, tree, environments)
