"""Our log parsers beside SWE-bench's own, on logs of ours: where it finds a test, we find it with the same outcome."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from envs.test_log_parsers import LOGS
from skyenv.envs.swe.runners import merge
from skyenv.envs.swe.runners.ids import NORMALISERS
from skyenv.envs.swe.runners.logs import parse_log

pytestmark = pytest.mark.network

# The package loads docker and much else; its parsers need none of it.
SCRIPT = """
import json, sys, types
wheel = sys.argv[1]
sys.path.insert(0, wheel)
for name in ("swebench", "swebench.harness", "swebench.harness.log_parsers", "swebench.harness.test_spec"):
    module = types.ModuleType(name)
    module.__path__ = [wheel + "/" + name.replace(".", "/")]
    sys.modules[name] = module
spec = types.ModuleType("swebench.harness.test_spec.test_spec")
spec.TestSpec = object
sys.modules[spec.__name__] = spec
from swebench.harness.log_parsers import python as parsers
logs = json.load(sys.stdin)
print(json.dumps([getattr(parsers, "parse_log_" + name)(log, None) for name, log in logs]))
"""
WORDS = {"PASSED": "passed", "FAILED": "failed", "ERROR": "error", "SKIPPED": "skipped", "XFAIL": "xfailed"}
SAME = [name for name, (parser, _, _) in LOGS.items() if parser in ("pytest", "django", "sympy")]
KNOWN = {
    "pytest summary": {"[1]"},
    "captured log records are no tests": {"root:calc.py:12"},
    "django system checks between": {"test_a (m.T) ... System check identified no issues (0 silenced)."},
}
"""What SWE-bench takes for a test and is none."""


def test_parsers_agree(tmp_path: Path) -> None:
    download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "swebench==4.1.0", "-d", str(tmp_path)]
    subprocess.run(download, check=True, capture_output=True, timeout=500)
    (wheel,) = tmp_path.glob("*.whl")
    logs = [LOGS[name][:2] for name in SAME]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(wheel)], input=json.dumps(logs), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for name, theirs in zip(SAME, json.loads(done.stdout), strict=True):
        parser, log, _ = LOGS[name]
        normalise = NORMALISERS.get(parser, str)
        ours = merge((normalise(test), outcome) for test, outcome in parse_log(parser, log))
        for test, word in theirs.items():
            if test not in KNOWN.get(name, ()):
                assert ours.get(test) == WORDS.get(word, ours.get(test)), (name, test, word, ours)
