"""Ways in which graders of this kind have gone wrong, as far as no other file of this folder has them.

Leaks are in `test_swe_env` and `test_public_tasks`, the state of git and forging in `test_hostile` and
`test_pytest_runner`, runners of other people in `test_other_runners`, verifiers in `test_public_tasks`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio
import pytest

from envs.conftest import Sandboxes
from envs.repair import FIX, GOLD, SOURCE, TEST_UNITTEST, grade_script, task
from envs.test_hostile import code
from envs.test_other_runners import new_file
from skyenv.core import SandboxProvider
from skyenv.envs.swe.grading import grade_patch
from skyenv.envs.swe.tasks import Record, SweTask
from skyenv.envs.swe.validation import validate_task


def patched(test_patch: str, **changes: Any) -> SweTask:
    """The calculator, its graded tests given as a patch."""
    return task(tests={"patch": test_patch}, **changes)


RENAMED = """\
diff --git a/tests/test_old.py b/tests/test_calc.py
similarity index 10%
rename from tests/test_old.py
rename to tests/test_calc.py
--- a/tests/test_old.py
+++ b/tests/test_calc.py
@@ -1,2 +1,{count} @@
-def test_nothing():
-    pass
{lines}"""
TEST_PATCHES = {
    "adds a file": new_file("tests/test_calc.py", TEST_UNITTEST),
    "adds and deletes": new_file("tests/test_calc.py", TEST_UNITTEST)
    + "diff --git a/tests/test_old.py b/tests/test_old.py\ndeleted file mode 100644\n--- a/tests/test_old.py\n"
    "+++ /dev/null\n@@ -1,2 +0,0 @@\n-def test_nothing():\n-    pass\n",
    "renames": RENAMED.format(
        count=len(TEST_UNITTEST.splitlines()), lines="".join(f"+{line}\n" for line in TEST_UNITTEST.splitlines())
    ),
    "has a binary without content": new_file("tests/test_calc.py", TEST_UNITTEST)
    + "diff --git a/tests/x.png b/tests/x.png\nnew file mode 100644\nindex 0000000..1111111\n"
    "Binary files /dev/null and b/tests/x.png differ\n",
    "has Windows line ends": new_file("tests/test_calc.py", TEST_UNITTEST.replace("\n", "\r\n")).replace("\r\r", "\r"),
    "changes data elsewhere": new_file("tests/test_calc.py", TEST_UNITTEST) + new_file("data/x.json", "{}\n"),
}  # fmt: skip
ATTACKS = {
    "fix": (FIX, "resolved"),
    "wrong": ("sed -i 's/a - b/b - a/' calc.py", "unresolved"),
    "puts the same files there": (
        FIX + "echo 'import os; os._exit(0)' > tests/test_calc.py; mkdir data; touch data/x.json", "resolved",
    ),
    "directories in their place": (FIX + "mkdir -p tests/test_calc.py/x; touch tests/test_calc.py/x/y", "resolved"),
    "links in their place": (FIX + "ln -s ../calc.py tests/test_calc.py; rm tests/test_old.py", "resolved"),
}  # fmt: skip


@pytest.mark.parametrize("name", TEST_PATCHES)
@pytest.mark.parametrize("attack", ["fix", "wrong"])
def test_tests_given_as_a_patch(everywhere: Sandboxes, name: str, attack: str) -> None:
    script, status = ATTACKS[attack]
    verdict = everywhere.run(partial(grade_script, task=patched(TEST_PATCHES[name]), script=script))
    assert verdict["status"] == status, verdict


@pytest.mark.parametrize("attack", [name for name in ATTACKS if name not in ("fix", "wrong")])
def test_work_where_the_test_patch_goes(everywhere: Sandboxes, attack: str) -> None:
    script, status = ATTACKS[attack]
    graded = patched(TEST_PATCHES["changes data elsewhere"])
    verdict = everywhere.run(partial(grade_script, task=graded, script=script))
    assert verdict["status"] == status, verdict
    assert any(path.startswith("tests/test_calc.py") for path in verdict["dropped_paths"])


def test_what_an_agent_leaves_in_profiles_does_not_reach_the_tests(everywhere: Sandboxes) -> None:
    script = FIX + (
        "for file in ~/.bashrc ~/.profile ~/.bash_profile /etc/profile; do "
        "echo 'export PYTHONPATH=/nowhere PYTEST_ADDOPTS=--co PYTHONHOME= GIT_DIR=/nowhere; exit 0' >> $file; done"
    )
    verdict = everywhere.run(partial(grade_script, task=task(), script=script))
    assert verdict["status"] == "resolved", verdict


PYTEST: dict[str, tuple[dict[str, Any], str, str]] = {
    "module beside python -m pytest": (
        {"command": "python -m pytest {files}"},
        FIX.replace("a + b", "b - a") + "printf 'import os\\nos._exit(0)\\n' | tee pytest.py > pluggy.py",
        "unresolved",
    ),
    "python -m pytest": ({"command": "python -m pytest {files}"}, FIX, "resolved"),
    "files in the command": ({"command": "pytest -rA -v tests/test_calc.py"}, FIX, "resolved"),
    "files in the command, wrong": ({"command": "pytest -rA -v tests/test_calc.py"}, code("x = 1"), "unresolved"),
    "colours asked for": (
        {"source": {"files": {**SOURCE, "pytest.ini": "[pytest]\naddopts = --color=yes\n"}}}, FIX, "resolved",
    ),
    "stops at the first failure": (
        {"source": {"files": {**SOURCE, "pytest.ini": "[pytest]\naddopts = -x --exitfirst\n"}}}, FIX, "resolved",
    ),
    "prints result lines": (
        {}, FIX + code("print('FAILED tests/test_calc.py::TestCalc::test_add - no')\nprint('ERROR    root:x.py:1 no')"),
        "resolved",
    ),
    "hides that a test failed": (
        {},
        code(
            "import gc\nfor thing in gc.get_objects():\n"
            "    if type(thing).__name__ == '_Events':\n"
            "        real = type(thing).test\n"
            "        type(thing).test = lambda self, outcome, node: real(\n"
            "            self, 'passed' if 'test_calc' in node else outcome, node)\n"
        ),
        "tampered",
    ),
}  # fmt: skip


@pytest.mark.network
@pytest.mark.parametrize("name", PYTEST)
def test_pytest(everywhere: Sandboxes, name: str) -> None:
    changes, script, status = PYTEST[name]
    verdict = everywhere.run(partial(grade_script, task=task("pytest", **changes), script=script))
    assert verdict["status"] == status, verdict


CASES = """\
import pytest
import calc
@pytest.mark.parametrize("a", ["one two", "one three"])
def test_blank(a):
    assert calc.add(1, 1) == 2 or a.endswith(FAILS)
@pytest.fixture
def closing():
    yield
    assert calc.add(1, 1) == 2
def test_teardown(closing):
    pass
"""
FAMILIES: dict[str, tuple[str, str, str, str]] = {
    "ids with blanks, all pass": (CASES, "tests/test_calc.py::test_blank[one", FIX, "resolved"),
    "ids with blanks, one fails": (CASES, "tests/test_calc.py::test_blank[one", code("x = 1"), "unresolved"),
    "passes but fails when torn down": (CASES, "tests/test_calc.py::test_teardown", code("x = 1"), "unresolved"),
    "torn down as it should be": (CASES, "tests/test_calc.py::test_teardown", FIX, "resolved"),
}


@pytest.mark.network
@pytest.mark.parametrize("name", FAMILIES)
def test_several_outcomes_for_one_id(everywhere: Sandboxes, name: str) -> None:
    text, expected, script, status = FAMILIES[name]
    graded = task(
        "pytest",
        tests={"files": {"tests/test_calc.py": text.replace("FAILS", "'three'")}},
        fail_to_pass=[expected],
        pass_to_pass=[],
        parser="pytest",
    )
    verdict = everywhere.run(partial(grade_script, task=graded, script=script))
    assert verdict["status"] == status, verdict


def test_the_same_work_is_judged_alike_twice_and_at_once(everywhere: Sandboxes) -> None:
    """Nothing is remembered from one patch to the next."""
    wrong = GOLD.replace("+    return a + b", "+    return b - a")
    patches = [GOLD, wrong, GOLD, wrong, ""] * 2

    async def all_at_once(provider: SandboxProvider) -> list[str]:
        statuses = [""] * len(patches)

        async def one(number: int) -> None:
            statuses[number] = (await grade_patch(graded, patches[number].encode(), provider))["status"]

        async with anyio.create_task_group() as group:
            for number in range(len(patches)):
                group.start_soon(one, number)
        return statuses

    graded = task()
    assert everywhere.run(all_at_once) == ["resolved", "unresolved", "resolved", "unresolved", "empty_patch"] * 2


def test_a_protected_path_that_the_reference_needs_is_allowed_by_its_record(everywhere: Sandboxes) -> None:
    """The reference edits the runner's configuration: admission finds out, and from then on an agent may."""
    hook = new_file("conftest.py", "import calc\n") + GOLD
    needs = TEST_UNITTEST.replace("class Calc", "import conftest\n\n\nclass Calc")
    ids = [*task().expected]
    graded = task(
        tests={"files": {"tests/test_calc.py": needs}}, reference={"patch": hook}, fail_to_pass=ids, pass_to_pass=[]
    )
    refused = everywhere.run(partial(grade_script, task=graded, script=FIX + "echo 'import calc' > conftest.py"))
    assert (refused["status"], refused["dropped_paths"]) == ("unresolved", ["conftest.py"])
    result = everywhere.run(partial(validate_task, graded))
    assert result["ok"], result["problems"]
    assert result["record"].allow == ("conftest.py",)
    admitted = graded.admitted(result["record"])
    for script, status in (
        (FIX + "echo 'import calc' > conftest.py", "resolved"),
        (FIX + "echo 'import calc' > conftest.py; echo > tests/test_calc.py", "resolved"),
        (FIX + "touch tests/conftest.py", "unresolved"),
    ):
        assert everywhere.run(partial(grade_script, task=admitted, script=script))["status"] == status


def test_a_record_sets_the_time_limit_and_what_else_counts() -> None:
    graded = task(timeout=300)
    record = Record("calc-unittest", graded.digest, 3, 9.0, 1, {"x": "xfailed"}, (graded.pass_to_pass[0],), (), False)
    admitted = graded.admitted(record)
    assert (admitted.timeout, admitted.pass_to_pass, admitted.accept) == (90.0, (), {"x": "xfailed"})
    assert graded.admitted(Record("calc-unittest", graded.digest, 1, 0.1)).timeout == 60.0
    assert graded.admitted(Record("calc-unittest", graded.digest, 1, 1000.0)).timeout == 300.0


def test_a_patch_and_what_it_was_judged_by_have_digests(everywhere: Sandboxes) -> None:
    verdict = everywhere.run(partial(grade_patch, task(), GOLD.encode()))
    again = everywhere.run(partial(grade_patch, task(), GOLD.encode()))
    assert verdict["digests"] == again["digests"]
    assert len(verdict["digests"]["patch"]) == 64
    assert verdict["digests"]["task"] != task(timeout=5).digest
    assert set(verdict["timings"]) == {"start", "prepare", "tests"}
