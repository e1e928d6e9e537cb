"""Runs a task's hidden tests on a tree in a scratch directory, with the host's Python and nothing of the grader."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

SCRIPT = """
import json, sys, unittest
sys.path.insert(0, "")
sys.dont_write_bytecode = True
outcomes = {}
class Record(unittest.TestResult):
    def stopTest(self, test):
        super().stopTest(test)
        path = type(test).__module__.replace(".", "/") + ".py"
        broken = [t for t, _ in self.failures + self.errors]
        broken = [getattr(t, "test_case", t) for t in broken] + [t for t, _ in self.skipped]
        outcomes[path + "::" + type(test).__qualname__ + "::" + test._testMethodName] = test not in broken
unittest.defaultTestLoader.loadTestsFromNames(sys.argv[1:]).run(Record())
print(json.dumps(outcomes))
"""


def run_tests(files: Mapping[str, bytes], tests: Mapping[str, bytes], root: Path) -> dict[str, bool]:
    """Whether each test passed, by test id."""
    for path, data in {**files, **tests}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    modules = [
        path.removesuffix(".py").replace("/", ".") for path in sorted(tests) if Path(path).name.startswith("test_")
    ]
    done = subprocess.run(
        [sys.executable, "-S", "-E", "-c", SCRIPT, *modules], cwd=root, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes: dict[str, bool] = json.loads(done.stdout.splitlines()[-1])
    return outcomes
