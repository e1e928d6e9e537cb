"""Our verdicts beside SWE-bench's own report on the logs of the same runs."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from envs.conftest import Sandboxes
from envs.repair import FIX, grade_script, task

pytestmark = pytest.mark.network

# The package loads docker and much else; its report needs none of it.
SCRIPT = """
import json, sys, types
wheel = sys.argv[1]
sys.path.insert(0, wheel)
for name in ("swebench", "swebench.harness", "swebench.harness.test_spec"):
    module = types.ModuleType(name)
    module.__path__ = [wheel + "/" + name.replace(".", "/")]
    sys.modules[name] = module
spec = types.ModuleType("swebench.harness.test_spec.test_spec")
spec.TestSpec = object
sys.modules[spec.__name__] = spec
utils = types.ModuleType("swebench.harness.utils")
utils.ansi_escape = None  # for the parsers of other languages
sys.modules[utils.__name__] = utils
from swebench.harness import grading
from swebench.harness.constants import END_TEST_OUTPUT, START_TEST_OUTPUT
answers = []
for run in json.load(sys.stdin):
    open("log", "w").write(START_TEST_OUTPUT + "\\n" + run["output"] + "\\n" + END_TEST_OUTPUT)
    row = types.SimpleNamespace(
        instance_id="x", repo="pytest-dev/pytest", version="8.0",
        FAIL_TO_PASS=run["fail_to_pass"], PASS_TO_PASS=run["pass_to_pass"],
    )
    prediction = {"instance_id": "x", "model_name_or_path": "m", "model_patch": run["patch"]}
    report = grading.get_eval_report(row, prediction, "log", include_tests_status=True)["x"]
    answers.append([report["resolved"], report["tests_status"]])
print(json.dumps(answers))
"""
RUNS = {
    "fixed": FIX,
    "wrong": "sed -i 's/a - b/b - a/' calc.py",
    "skipped": "sed -i 's/return a - b/import pytest; pytest.skip()/' calc.py",
    "does not import": "echo 'def (' >> calc.py",
}


def test_verdicts_agree(everywhere: Sandboxes, tmp_path: Path) -> None:
    """Resolved or not, and which tests of each list passed."""
    download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "swebench==4.1.0", "-d", str(tmp_path)]
    subprocess.run(download, check=True, capture_output=True, timeout=500)
    (wheel,) = tmp_path.glob("*.whl")
    runs = [everywhere.run(partial(grade_script, task=task("pytest"), script=script)) for script in RUNS.values()]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(wheel)],
        input=json.dumps(runs), capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for name, ours, (resolved, status) in zip(RUNS, runs, json.loads(done.stdout), strict=True):
        assert ours["resolved"] == resolved, (name, ours["output"])
        theirs = {test for part in ("FAIL_TO_PASS", "PASS_TO_PASS") for test in status[part]["success"]}
        passed = {test for test, outcome in ours["tests"].items() if outcome == "passed"}
        assert passed == theirs, (name, ours["output"])
    assert [run["resolved"] for run in runs] == [True, False, False, False]
