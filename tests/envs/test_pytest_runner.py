"""pytest as the runner: the same rules as for unittest, and the doors that only pytest has."""

from __future__ import annotations

from functools import partial

import pytest

from envs.conftest import Sandboxes
from envs.repair import FIX, grade_script, task
from envs.test_hostile import code
from skyenv.envs.swe.validation import validate_task

pytestmark = pytest.mark.network

XFAIL_HOOK = """cat > conftest.py <<'EOF'
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    (yield).get_result().outcome = "passed"
EOF
"""
HOOK = "import _pytest.runner\n"
SCRIPTS = {
    "fix": (FIX, "resolved"),
    "fix beside a hook": (FIX + XFAIL_HOOK, "resolved"),
    "fix that prints": (FIX + code("print('=== 3 failed ==='); import os; os.write(2, bytes(range(256)))"), "resolved"),
    "fix that warns": (FIX + code("import warnings; warnings.warn('old')"), "resolved"),
    "hook only": (XFAIL_HOOK, "empty_patch"),
    "deselect all": ("printf '[pytest]\\naddopts = --co -k nothing\\n' > pytest.ini", "empty_patch"),
    "shared files": ("sed -i s/-ra/--co/ pyproject.toml; echo '[tool:pytest]' > setup.cfg", "empty_patch"),
    "own pytest": ("mkdir pytest pluggy; touch pytest/__init__.py pluggy/__init__.py _pytest.py", "empty_patch"),
    "own plugin": ("mkdir x.dist-info; echo '[pytest11]' > x.dist-info/entry_points.txt", "empty_patch"),
    "wrong": ("sed -i 's/a - b/b - a/' calc.py", "unresolved"),
    "xfail": ("sed -i 's/return a - b/import pytest; pytest.xfail()/' calc.py", "unresolved"),
    "skip": ("sed -i 's/return a - b/import pytest; pytest.skip()/' calc.py", "unresolved"),
    "skip at import": (code("import pytest\npytest.skip(allow_module_level=True)"), "unresolved"),
    "leave": (code("import pytest\npytest.exit('enough', 0)"), "unresolved"),
    "exit": (code("import os\nos._exit(0)"), "unresolved"),
    "syntax error": (code("def ("), "unresolved"),
    "importorskip": (code("import pytest\npytest.importorskip('nothing')"), "unresolved"),
    "reports rewritten": (
        code(HOOK + "real = _pytest.runner.TestReport.from_item_and_call\n"
             "def report(item, call):\n    call.excinfo = None\n    return real(item, call)\n"
             "_pytest.runner.TestReport.from_item_and_call = report"),
        "tampered",
    ),
    "calls skipped": (code(HOOK + "_pytest.runner.pytest_runtest_call = print\nimport _pytest.python\n"
                           "_pytest.python.Function.runtest = lambda self: None"), "tampered"),
    "exit status": (FIX + code("import atexit, os\natexit.register(os._exit, 0)"), "tampered"),
    "events": (code("open('/testbed.skyenv/events', 'a').write('x\\n')"), "tampered"),
    "tests rewritten": (code("open('tests/helper.py', 'w').write('check = print')"), "tampered"),
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts(everywhere: Sandboxes, name: str) -> None:
    script, status = SCRIPTS[name]
    verdict = everywhere.run(partial(grade_script, task=task("pytest"), script=script))
    assert verdict["status"] == status, verdict
    assert verdict["reward"] == float(status == "resolved")


def test_validation(everywhere: Sandboxes) -> None:
    record = everywhere.run(partial(validate_task, task("pytest")))
    assert record["ok"], record


def test_packages_of_the_checkout_are_found(everywhere: Sandboxes) -> None:
    """A `src` layout, and a child process that imports the package."""
    test = (
        "import subprocess, sys\nimport calc\n"
        "def test_add():\n    assert calc.add(2, 3) == 5\n"
        "def test_child():\n    assert subprocess.run([sys.executable, '-c', 'import calc']).returncode == 0\n"
    )
    layout = task(
        "pytest",
        source={"files": {"src/calc.py": "def add(a, b):\n    return a - b\n"}},
        tests={"files": {"tests/test_src.py": test}},
        environment={"packages": ["pytest==8.3.5"], "env": {"PYTHONPATH": "/testbed/src"}},
        fail_to_pass=["tests/test_src.py::test_add"],
        pass_to_pass=["tests/test_src.py::test_child"],
    )
    verdict = everywhere.run(partial(grade_script, task=layout, script="sed -i 's/a - b/a + b/' src/calc.py"))
    assert verdict["status"] == "resolved", verdict
