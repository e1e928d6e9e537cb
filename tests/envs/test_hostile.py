"""Honest work survives whatever state git is in; bending the grading does not pay. One real task, real sandboxes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from envs.conftest import Sandboxes
from envs.repair import FIX, grade_script, task


def code(text: str) -> str:
    """A shell command that appends Python code to the module under test."""
    return f"cat >> calc.py <<'EOF'\n{text}\nEOF\n"


COMMIT = "git -c user.name=a -c user.email=a@b commit -qam fix\n"
HONEST = {
    "plain": FIX,
    "committed": FIX + COMMIT,
    "staged": FIX + "git add -A",
    "other branch": FIX + "git checkout -qb other\n" + COMMIT,
    "orphan branch": "git checkout -q --orphan fresh\n" + FIX + COMMIT,
    "git deleted": FIX + "rm -rf .git",
    "git replaced by a file": FIX + "rm -rf .git; echo 'gitdir: /nowhere' > .git",
    "objects removed": FIX + "rm -rf .git/objects/*",
    "index locked": FIX + "touch .git/index.lock",
    "assume unchanged": FIX + "git update-index --assume-unchanged calc.py",
    "skip worktree": FIX + "git update-index --skip-worktree calc.py",
    "attributes": FIX + "echo '* -diff -text filter=eat' > .gitattributes; git config filter.eat.clean true",
    "info attributes": FIX + "mkdir -p .git/info; echo '*.py binary' > .git/info/attributes",
    "external diff": FIX + "git config diff.external true; git config color.ui always; git config diff.noprefix true",
    "global config": FIX + "printf '[diff]\\nexternal = true\\n[core]\\nautocrlf = true\\n' > ~/.gitconfig",
    "ignored": FIX + "echo '*' > .gitignore; mkdir -p .git/info; echo '*' > .git/info/exclude",
    "hooks": FIX + "mkdir -p .git/hooks; printf '#!/bin/sh\\nexit 1\\n' > .git/hooks/pre-commit; chmod +x .git/hooks/*",
    "nested repository": "mkdir inner; echo 'plus = lambda a, b: a + b' > inner/__init__.py\n"
    "(cd inner && git init -q . && git add -A && " + COMMIT.strip() + ")\n"
    "sed -i 's/return a - b/from inner import plus; return plus(a, b)/' calc.py",
    "ignored file needed": FIX + "echo 5 > secret.dat\n" + code("open('secret.dat').read()"),
    "binary file needed": FIX
    + "printf '\\000\\377\\001' > blob\n"
    + code("assert open('blob', 'rb').read() == bytes([0, 255, 1])"),
    "odd names": FIX + r"""touch -- -n 'two words' $'new\nline' 'quote"s' "it's" $'caf\303\251' $'bad\377' '$(x)'""",
    "crlf": FIX + "printf 'three\\r\\n' >> crlf.txt",
    "no final newline": FIX + "printf 'pi = 3' >> calc.py",
    "blank lines at the end": FIX + "printf '\\n\\n' >> README.md",
    "latin-1": FIX + "printf '# caf\\351\\n' > notes.txt",
    "mode change": FIX + "chmod +x README.md",
    "rename": FIX + "git mv crlf.txt renamed.txt",
    "case-only rename": FIX + "mv README.md readme.md",
    "file becomes package": FIX + "mkdir c && mv calc.py c/__init__.py && mv c calc",
    "link within the tree": FIX + "ln -s calc.py alias.py",
    "many files": FIX + "mkdir many && cd many && touch $(seq 1 500)",
    "tools replaced": FIX + "mkdir -p ~/bin; printf '#!/bin/sh\\nexit 1\\n' > ~/bin/git; chmod +x ~/bin/git\n"
    "cp ~/bin/git /usr/bin/git; cp ~/bin/git /usr/bin/python3\n"
    "export PATH=$HOME/bin:$PATH GIT_DIR=/nowhere PYTHONPATH=/nowhere LD_PRELOAD=/nowhere.so",
    "repository moved": FIX + "cd / && mv /testbed /elsewhere && ln -s /elsewhere /testbed",
    "prints markers": FIX + code("print('>>>>> Tests Timed Out', 'FAILED (failures=3)', chr(0), chr(27), sep='\\n')"),
    "prints bytes": FIX + code("import os; os.write(1, bytes(range(256)))"),
    "thread that never ends": FIX + code("import threading\nthreading.Thread(target=threading.Event().wait).start()"),
    "process that never ends": FIX + code("import subprocess\nsubprocess.Popen(['sleep', '1000'])"),
    "special files": FIX + "mkfifo pipe; ln pipe pipe2",
    "process still writing": FIX + "(while true; do echo 'x = 1' >> calc.py; sleep 0.01; done) >/dev/null 2>&1 &",
}  # fmt: skip


@pytest.mark.parametrize("name", HONEST)
def test_honest_work_counts(everywhere: Sandboxes, name: str) -> None:
    verdict = everywhere.run(partial(_grade, script=HONEST[name]))
    assert verdict["status"] == "resolved", verdict
    assert verdict["reward"] == 1.0
    assert set(verdict["tests"].values()) == {"passed"}
    assert not verdict["flags"]


DROPPED = {
    "test edits": (FIX + "echo > tests/test_calc.py; rm tests/helper.py", {"tests/test_calc.py", "tests/helper.py"}),
    "tests deleted": (FIX + "rm -rf tests", {"tests/helper.py", "tests/test_old.py"}),
    "tests become a file": (FIX + "rm -rf tests; touch tests", {"tests", "tests/helper.py"}),
    "tests become a link": (FIX + "rm -rf tests; ln -s . tests", {"tests"}),
    "runner configuration": (
        FIX + "echo '[pytest]' > pytest.ini; touch conftest.py; sed -i s/-ra/--co/ pyproject.toml",
        {"pytest.ini", "conftest.py", "pyproject.toml"},
    ),
    "start-up files": (
        FIX + "touch sitecustomize.py usercustomize.py x.pth; mkdir x.dist-info; touch x.dist-info/entry_points.txt",
        {"sitecustomize.py", "usercustomize.py", "x.pth", "x.dist-info/entry_points.txt"},
    ),
    "runner modules": (
        FIX + "echo 1/0 > unittest.py; mkdir src; touch src/unittest.py",
        {"unittest.py", "src/unittest.py"},
    ),
    "links out of the tree": (
        FIX + "ln -s /etc/passwd a1; ln -s ../../etc a2; mkdir a3; ln -s ../.. a3/up",
        {"a1", "a2", "a3/up"},
    ),
    "caches": (FIX + "touch x.pyc", {"x.pyc"}),
}


@pytest.mark.parametrize("name", DROPPED)
def test_what_could_bend_the_grading_is_dropped_and_listed(everywhere: Sandboxes, name: str) -> None:
    script, expected = DROPPED[name]
    verdict = everywhere.run(partial(_grade, script=script))
    assert verdict["status"] == "resolved", verdict
    assert expected <= set(verdict["dropped_paths"])
    assert not any(f"/{path}\n" in verdict["patch"] for path in expected)


def test_build_data_beside_an_untouched_runner_section_is_kept(everywhere: Sandboxes) -> None:
    script = FIX + "sed -i 's/^name.*/&\\nversion = \"2\"/' pyproject.toml"
    verdict = everywhere.run(partial(_grade, script=script))
    assert (verdict["status"], verdict["dropped_paths"]) == ("resolved", [])
    assert '+version = "2"' in verdict["patch"]


NOTHING_LEFT = {
    "nothing": "true",
    "undone": FIX + "git checkout -q calc.py",
    "graded test put there": "mkdir -p tests; echo 'import unittest' > tests/test_calc.py",
    "helper weakened": "echo 'def check(left, right): pass' > tests/helper.py",
    "runner replaced": "mkdir unittest; echo 'import os; os._exit(0)' > unittest/__init__.py",
    "only caches": "python3 -c 'import calc'; touch y.pyc",
}


@pytest.mark.parametrize("name", NOTHING_LEFT)
def test_empty_patch(everywhere: Sandboxes, name: str) -> None:
    verdict = everywhere.run(partial(_grade, script=NOTHING_LEFT[name]))
    assert (verdict["status"], verdict["reward"], verdict["tests"]) == ("empty_patch", 0.0, {})
    assert verdict["patch"] == ""
    assert verdict["valid_for_training"]


CHEATS = {
    "wrong": ("sed -i 's/a - b/b - a/' calc.py", "unresolved"),
    "broke another": (FIX + "sed -i 's/a [*] b/a/' calc.py", "unresolved"),
    "syntax error": (code("def ("), "unresolved"),
    "exit 0 at import": (code("import os\nos._exit(0)"), "unresolved"),
    "exit 1 at import": (code("import os\nos._exit(1)"), "unresolved"),
    "sys.exit at import": (code("import sys\nsys.exit(0)"), "unresolved"),
    "exit in a test": ("sed -i 's/return a - b/import os; os._exit(0)/' calc.py", "unresolved"),
    "killed": ("sed -i 's/return a - b/import os; os.kill(os.getpid(), 9)/' calc.py", "unresolved"),
    "everything killed": ("sed -i 's/return a - b/import os; os.kill(-1, 9)/' calc.py", "unresolved"),
    "everything skipped": ("sed -i 's/return a - b/import unittest; raise unittest.SkipTest/' calc.py", "unresolved"),
    "skipped at import": (code("import unittest\nraise unittest.SkipTest"), "unresolved"),
    "atexit": (code("import atexit, os\natexit.register(os._exit, 0)"), "unresolved"),
    "much output": (code("for _ in range(2000): print('x' * 100_000)"), "unresolved"),
    "tests rewritten at import": (code("open('tests/helper.py', 'w').write('check = print')"), "tampered"),
    "tests deleted at import": (FIX + code("import os\nos.unlink('tests/test_calc.py')"), "tampered"),
    "tests never called": (code("import unittest\nunittest.TestCase._callTestMethod = print"), "tampered"),
    "runs always succeed": (
        code("import unittest\nunittest.TestCase.run = lambda self, result: result.addSuccess(self)"),
        "tampered",
    ),
    "reporter patched": (
        code("import sys\nReporter = sys.modules['__main__'].Reporter\n"
             "Reporter.addFailure = lambda self, test, error: self.addSuccess(test)"),
        "tampered",
    ),
    "events forged": (code("open('/testbed.skyenv/events', 'a').write('guess\\tend\\t1\\n')"), "tampered"),
    "events erased": (code("open('/testbed.skyenv/events', 'w').close()\nimport os\nos._exit(0)"), "tampered"),
    "exit status forged": (
        FIX + code("import os\nreal = os._exit\nos._exit = lambda status: real(0)"),
        "tampered",
    ),
    "no work tree": ("cd / && rm -rf /testbed", "patch_rejected"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHEATS)
def test_cheating_does_not_pay(everywhere: Sandboxes, name: str) -> None:
    script, status = CHEATS[name]
    verdict = everywhere.run(partial(_grade, script=script))
    assert (verdict["status"], verdict["reward"]) == (status, 0.0), verdict
    assert verdict["valid_for_training"]


def test_hang_is_a_timeout(everywhere: Sandboxes) -> None:
    verdict = everywhere.run(partial(_grade, script=code("while True: pass"), timeout=1))
    assert (verdict["status"], verdict["reward"]) == ("timeout", 0.0)
    assert verdict["seconds"] < 120


def test_too_many_files(everywhere: Sandboxes) -> None:
    verdict = everywhere.run(partial(_grade, script=FIX + "mkdir many && cd many && touch $(seq 1 3000)"))
    assert verdict["status"] == "patch_too_large"


def test_too_large_a_patch(everywhere: Sandboxes) -> None:
    verdict = everywhere.run(partial(_grade, script=FIX + "head -c 5000000 /dev/urandom > noise"))
    assert (verdict["status"], verdict["patch"]) == ("patch_too_large", "")


def test_a_task_that_cannot_run_is_not_the_policys_fault(everywhere: Sandboxes) -> None:
    verdict = everywhere.run(partial(_grade, script=FIX, fail_to_pass=["tests/absent.py::A::test_b"]))
    assert verdict["status"] == "instance_error"
    assert not verdict["valid_for_training"]


async def _grade(provider: Any, script: str, **changes: Any) -> dict[str, Any]:
    return await grade_script(provider, task(**changes), script)
