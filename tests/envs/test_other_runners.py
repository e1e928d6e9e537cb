"""Runners of other people, on repositories of our own that run tests as Django and sympy do, and by any command."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from envs.conftest import Sandboxes
from envs.repair import FIX, GOLD, SOURCE, grade_script
from envs.test_hostile import code
from skyenv.envs.swe.rows import parse_task
from skyenv.envs.swe.tasks import SweTask
from skyenv.envs.swe.validation import validate_task

RUNTESTS = """\
#!/usr/bin/env python3
import os, sys, unittest
os.chdir(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [os.getcwd(), os.path.dirname(os.getcwd())]
labels = [word for word in sys.argv[1:] if not word.startswith("-") and word not in ("2", "1")]
suite = unittest.TestSuite()
for label in labels:
    name = label + ".tests" if os.path.isdir(label.replace(".", "/")) else label
    suite.addTests(unittest.defaultTestLoader.loadTestsFromName(name))
print("Testing against Django installed in ...")
result = unittest.TextTestRunner(verbosity=2, stream=sys.stdout).run(suite)
sys.exit(not result.wasSuccessful())
"""
DJANGO_TEST = """\
import unittest

import calc


class AddTests(unittest.TestCase):
    def test_add(self):
        self.assertEqual(calc.add(2, 3), 5)

    def test_mul(self):
        "Multiplies."
        self.assertEqual(calc.mul(2, 3), 6)
"""
BIN_TEST = """\
#!/usr/bin/env python3
import importlib.util, os, sys
sys.path.insert(0, os.getcwd())
bad = []
for path in [word for word in sys.argv[1:] if not word.startswith("-")]:
    spec = importlib.util.spec_from_file_location(path[:-3].replace("/", "."), path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tests = [name for name in vars(module) if name.startswith("test_")]
    print("%s[%d] " % (path, len(tests)))
    for name in tests:
        try:
            vars(module)[name]()
            print(name, "ok")
        except AssertionError:
            print(name, "F")
            bad.append((path, name))
for path, name in bad:
    print("_" * 80)
    print("_" * 10, "%s:%s" % (path, name), "_" * 10)
sys.exit(1 if bad else 0)
"""
SYMPY_TEST = (
    "import calc\ndef test_add():\n    assert calc.add(2, 3) == 5\ndef test_mul():\n    assert calc.mul(2, 3) == 6\n"
)
TAP = """\
import calc
checks = {"adds": calc.add(2, 3) == 5, "multiplies": calc.mul(2, 3) == 6}
for number, (name, good) in enumerate(checks.items(), 1):
    print("ok" if good else "not ok", number, "-", name)
raise SystemExit(not all(checks.values()))
"""
NEW = "diff --git a/{0} b/{0}\nnew file mode 100644\n--- /dev/null\n+++ b/{0}\n@@ -0,0 +1,{1} @@\n{2}"


def new_file(path: str, text: str) -> str:
    lines = text.splitlines()
    return NEW.format(path, len(lines), "".join(f"+{line}\n" for line in lines))


def task(kind: str, **changes: Any) -> SweTask:
    """The calculator under a runner; the graded tests come as a patch that adds a file."""
    files = {
        "django": {"tests/runtests.py": RUNTESTS, "tests/calcs/__init__.py": ""},
        "sympy": {"bin/test": BIN_TEST},
        "command": {},
    }[kind]
    test = {
        "django": ("tests/calcs/test_add.py", DJANGO_TEST),
        "sympy": ("calcs/tests/test_add.py", SYMPY_TEST),
        "command": ("checks.py", TAP),
    }[kind]
    ids = {
        "django": ("test_add (calcs.test_add.AddTests.test_add)", "Multiplies."),
        "sympy": ("test_add", "test_mul"),
        "command": ("adds", "multiplies"),
    }[kind]
    command = {
        "django": "python3 tests/runtests.py --verbosity 2 {files}",
        "sympy": "python3 bin/test -C --verbose {files}",
        "command": "python3 checks.py",
    }[kind]
    row = {
        "task_id": f"calc-{kind}",
        "problem": "add subtracts",
        "source": {"files": {**SOURCE, **files}},
        "tests": {"patch": new_file(*test)},
        "runner": kind,
        "command": command,
        "parser": {"django": "django", "sympy": "sympy", "command": "tap"}[kind],
        "fail_to_pass": [ids[0]],
        "pass_to_pass": [ids[1]],
        "reference": {"patch": GOLD},
        "timeout": 120,
        **changes,
    }
    return parse_task(row, "test", Path.cwd())


KINDS = ("django", "sympy", "command")
FILES = {"django": "tests/calcs/test_add.py", "sympy": "calcs/tests/test_add.py", "command": "checks.py"}
LINES = {
    "django": "test_add (calcs.test_add.AddTests.test_add) ... ok",
    "sympy": "test_add ok",
    "command": "ok 9 - adds",
}


@pytest.mark.parametrize("kind", KINDS)
def test_admission(everywhere: Sandboxes, kind: str) -> None:
    result = everywhere.run(partial(validate_task, task(kind), runs=2))
    assert result["ok"], result["problems"]
    assert result["record"].exit_status == (0 if kind == "command" else 1)


SCRIPTS: dict[str, tuple[str, dict[str, str]]] = {
    "fix": (FIX, dict.fromkeys(KINDS, "resolved")),
    "wrong": ("sed -i 's/a - b/b - a/' calc.py", dict.fromkeys(KINDS, "unresolved")),
    "broke another": (FIX + "sed -i 's/a [*] b/a/' calc.py", dict.fromkeys(KINDS, "unresolved")),
    "syntax error": (code("def ("), dict.fromkeys(KINDS, "unresolved")),
    "graded test put there": (
        "mkdir -p calcs/tests; touch GRADED",
        dict.fromkeys(KINDS, "empty_patch"),
    ),
    "exit 0 at import": (code("import os\nos._exit(0)"), dict.fromkeys(KINDS, "unresolved")),
    "success printed, then exit 0": (
        code("import os\nprint('LINE\\nLINE2', flush=True)\nos._exit(0)"),
        {"django": "tampered", "sympy": "tampered", "command": "resolved"},
    ),
    "success printed beside the failure": (code("print('LINE')"), dict.fromkeys(KINDS, "unresolved")),
    "success printed, exit status wrong": (
        code("import os\nprint('LINE\\nLINE2', flush=True)\nos._exit(3)"), dict.fromkeys(KINDS, "unresolved"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts(everywhere: Sandboxes, name: str, kind: str) -> None:
    """A whole forged log passes where there is no canary: that is what a canary is for, and is said in the docs."""
    script, statuses = SCRIPTS[name]
    others = {"django": "Multiplies. ... ok", "sympy": "test_mul ok", "command": "ok 10 - multiplies"}
    script = script.replace("GRADED", FILES[kind]).replace("LINE2", others[kind]).replace("LINE", LINES[kind])
    verdict = everywhere.run(partial(grade_script, task=task(kind), script=script))
    assert verdict["status"] == statuses[kind], verdict
    assert verdict["reward"] == float(statuses[kind] == "resolved")
    assert verdict["valid_for_training"]


def test_a_suite_that_always_ends_badly_is_admitted_as_it_is(everywhere: Sandboxes) -> None:
    """An exit status that the reference has too (a coverage threshold) is no reason against a patch."""
    strict = task("command", command="python3 checks.py; exit 5")
    result = everywhere.run(partial(validate_task, strict))
    assert result["ok"], result["problems"]
    verdict = everywhere.run(partial(grade_script, task=strict.admitted(result["record"]), script=FIX))
    assert verdict["status"] == "resolved"
    assert everywhere.run(partial(grade_script, task=strict, script=FIX))["status"] == "unresolved"


def test_a_command_that_says_nothing_is_the_tasks_fault(everywhere: Sandboxes) -> None:
    verdict = everywhere.run(partial(grade_script, task=task("command", command="true"), script=FIX))
    assert (verdict["status"], verdict["flags"]) == ("instance_error", ["no_test_ran"])
    result = everywhere.run(partial(validate_task, task("command", command="true")))
    assert any("with the reference: instance_error no_test_ran" in problem for problem in result["problems"])


def test_absent_tests_that_stand_for_success(everywhere: Sandboxes) -> None:
    """Suites that name failures only: an expected id that is absent holds, if the run as a whole says so."""
    quiet = "python3 checks.py > log; status=$?; grep '^not ok' log; echo 'ok 99 - ran'; exit $status"
    accept = {"adds": "missing", "multiplies": "missing"}
    silent = task("command", command=quiet, accept=accept)
    for script, status in ((FIX, "resolved"), ("sed -i 's/a - b/b/' calc.py", "unresolved")):
        assert everywhere.run(partial(grade_script, task=silent, script=script))["status"] == status
