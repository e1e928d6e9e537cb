"""One row of every public data set, in its shape but with content of our own: a calculator whose `add` subtracts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

GOLD = """\
diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a + b
"""
TEST_PATCH = """\
diff --git a/tests/test_calc.py b/tests/test_calc.py
new file mode 100644
--- /dev/null
+++ b/tests/test_calc.py
@@ -0,0 +1,7 @@
+import calc
+
+def test_add():
+    assert calc.add(2, 3) == 5
+
+def test_zero():
+    assert calc.add(0, 0) == 0
"""
TEST_CODE = "".join(line[1:] + "\n" for line in TEST_PATCH.splitlines()[5:])
FAILING, PASSING = "tests/test_calc.py::test_add", "tests/test_calc.py::test_zero"
COMMIT = "0123456789abcdef0123456789abcdef01234567"

CLASSIC: dict[str, Any] = {
    "repo": "acme/calc",
    "instance_id": "acme__calc-7",
    "base_commit": COMMIT,
    "patch": GOLD,
    "test_patch": TEST_PATCH,
    "problem_statement": "add(2, 3) gives -1\r\nwith Windows line ends",
    "hints_text": "look at calc.py",
    "created_at": "2024-01-02T03:04:05Z",
    "version": "1.0",
    "FAIL_TO_PASS": json.dumps([FAILING]),
    "PASS_TO_PASS": json.dumps([PASSING]),
    "environment_setup_commit": COMMIT,
}
EVAL_SCRIPT = """\
#!/bin/bash
set -uxo pipefail
source /opt/miniconda3/bin/activate testbed
export LANG=C.UTF-8
cd /testbed
git apply -v - <<'EOF_1'
...
EOF_1
: '>>>>> Start Test Output'
pytest -rA tests/test_calc.py
: '>>>>> End Test Output'
git checkout HEAD tests/test_calc.py
"""


def without(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}


SWE_BENCH_5 = {
    **CLASSIC,
    "FAIL_TO_PASS": [FAILING],
    "PASS_TO_PASS": [PASSING],
    "image": "swebench/sweb.eval.x86_64.acme_1776_calc-7:latest",
    "eval_script": EVAL_SCRIPT,
    "log_parser": "pytest",
    "eval_type": "pass_and_fail",
    "image_assets": {},
}
SWE_GYM = {
    **without(CLASSIC, "environment_setup_commit", "hints_text"),
    "repo": "getmoto/moto",
    "instance_id": "getmoto__moto-7",
    "FAIL_TO_PASS": [FAILING],
    "PASS_TO_PASS": [PASSING],
}
EXTRA = {
    **CLASSIC,
    "FAIL_TO_PASS": [FAILING],
    "PASS_TO_PASS": [PASSING],
    "version": 1,
    "license": "mit",
    "meta": {"failed_lite_validators": [], "has_test_patch": True, "is_lite": True},
}
REBENCH = {
    **EXTRA,
    "version": "1.0",
    "install_config": {
        "python": "3.9",
        "packages": "requirements.txt",
        "install": "pip install -e .",
        "test_cmd": "pytest --no-header -rA --tb=line",
        "log_parser": "parse_log_pytest",
    },
    "requirements": "",
    "environment": "",
    "docker_image": "swerebench/sweb.eval.x86_64.acme_1776_calc-7",
}
REBENCH_V2 = {
    "base_commit": COMMIT,
    "created_at": 1609298073000,
    "instance_id": "acme__calc-9",
    "meta": {},
    "patch": GOLD,
    "pr_description": "Add adds",
    "problem_statement": "add subtracts",
    "repo": "acme/calc",
    "test_patch": TEST_PATCH,
    "language": "go",
    "interface": "",
    "FAIL_TO_PASS": ["TestAdd"],
    "PASS_TO_PASS": ["TestZero"],
    "install_config": {
        "base_image_name": "go_1",
        "docker_specs": {"go_version": "1.21"},
        "install": ["go mod download"],
        "test_cmd": ["cd pkg", "go test -v ./..."],
        "log_parser": "parse_log_gotest",
    },
    "image_name": "docker.io/swerebenchv2/acme-calc:9-0123456",
}
SMITH_BUG = """\
diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a + b
+    return a - b
"""
SWE_SMITH = {
    "instance_id": "acme__calc.01234567.lm_rewrite__abc",
    "patch": SMITH_BUG,
    "FAIL_TO_PASS": [FAILING],
    "PASS_TO_PASS": [PASSING],
    "image_name": "swebench/swesmith.x86_64.acme_1776_calc.01234567",
    "repo": "swesmith/acme__calc.01234567",
    "problem_statement": "add is wrong",
}
R2E_GYM = {
    "repo_name": "calc",
    "docker_image": "example/calc_final:" + COMMIT,
    "commit_hash": COMMIT,
    "parsed_commit_content": json.dumps(
        {
            "file_diffs": [
                {
                    "header": {"file": {"path": "calc.py"}},
                    "old_file_content": "def add(a, b):\n    return a - b\n",
                    "new_file_content": "def add(a, b):\n    return a + b\n",
                },
                {"header": {"file": {"path": "tests/test_calc.py"}}, "new_file_content": TEST_CODE},
            ]
        }
    ),
    "execution_result_content": json.dumps(
        {
            "test_file_names": ["test_1.py"],
            "test_file_codes": [TEST_CODE + "\ndef test_broken():\n    assert 0\n"],
            "old_commit_res_stdout": "=== short test summary info ===\nPASSED r2e_tests/test_1.py::test_zero\n"
            "FAILED r2e_tests/test_1.py::test_add - assert -1 == 5\n"
            "FAILED r2e_tests/test_1.py::test_broken - assert 0\n",
        }
    ),
    "expected_output_json": json.dumps({"test_add": "PASSED", "test_zero": "PASSED", "\x1b[1mtest_broken": "FAILED"}),
    "problem_statement": "add subtracts",
    "modified_files": ["calc.py"],
}
_OUTCOMES = {"run": "PASS", "test": "FAIL", "fix": "PASS"}
MULTI_SWE = {
    "org": "Acme",
    "repo": "calc",
    "number": 7,
    "state": "closed",
    "title": "Add adds",
    "body": "Fixes #6",
    "base": {"label": "acme:main", "ref": "main", "sha": COMMIT},
    "resolved_issues": [{"number": 6, "title": "add subtracts", "body": "see title"}],
    "fix_patch": GOLD,
    "test_patch": TEST_PATCH,
    "fixed_tests": {"TestAdd": _OUTCOMES, "TestNew": _OUTCOMES},
    "p2p_tests": {"TestZero": _OUTCOMES},
    "f2p_tests": {"TestAdd": _OUTCOMES},
    "s2p_tests": {},
    "n2p_tests": {"TestNew": _OUTCOMES},
    "run_result": {},
    "test_patch_result": {},
    "fix_patch_result": {},
}
PRO = {
    "repo": "acme/calc",
    "instance_id": "instance_acme__calc-" + COMMIT,
    "base_commit": COMMIT,
    "patch": GOLD,
    "test_patch": TEST_PATCH,
    "problem_statement": "add subtracts",
    "requirements": "- add must add",
    "interface": "No new interfaces",
    "repo_language": "python",
    "fail_to_pass": repr([FAILING]),
    "pass_to_pass": repr([PASSING]),
    "before_repo_set_cmd": f"git reset --hard {COMMIT}\ngit checkout {COMMIT} -- tests/test_calc.py",
    "selected_test_files_to_run": '["tests/test_calc.py"]',
    "dockerhub_tag": f"acme.calc-acme__calc-{COMMIT}",
    "run_script": 'python3 -m pytest -v "$1"\n',
    "parser_script": "print('see tests/envs')\n",
}
ROWS: dict[str, dict[str, Any]] = {
    "swe-bench": CLASSIC,
    "swe-bench 5": SWE_BENCH_5,
    "swe-gym": SWE_GYM,
    "swe-bench-extra": EXTRA,
    "swe-rebench": REBENCH,
    "swe-rebench-v2": REBENCH_V2,
    "swe-smith": SWE_SMITH,
    "r2e-gym": R2E_GYM,
    "multi-swe-bench": MULTI_SWE,
    "swe-bench-pro": PRO,
}


def write_harbor(folder: Path, **files: str | None) -> Path:
    """A Harbor task; `files` replace its own, None leaves one out (a double underscore stands for a slash)."""
    content: dict[str, str | None] = {
        "task.toml": 'schema_version = "1.0"\n[metadata]\nauthor = "us"\n[verifier]\ntimeout_sec = 90.0\n[agent]\n'
        'timeout_sec = 600.0\n[environment]\ndocker_image = "acme/greet:1"\nmemory_mb = 512\ncpus = 1\n',
        "instruction.md": "Write hello into greeting.txt\n",
        "environment__Dockerfile": "FROM debian\nWORKDIR /srv/greet\n",
        "solution__solve.sh": "echo hello > greeting.txt\n",
        "tests__test.sh": "grep -qx hello greeting.txt && echo 1 > /logs/verifier/reward.txt || "
        "echo 0 > /logs/verifier/reward.txt\n",
        **files,
    }
    _write(folder, content)
    return folder


def write_terminal_bench(folder: Path, **files: str | None) -> Path:
    content: dict[str, str | None] = {
        "task.yaml": "instruction: Write hello into greeting.txt\nparser_name: pytest\nmax_agent_timeout_sec: 360\n"
        "max_test_timeout_sec: 60\ndifficulty: easy\n",
        "run-tests.sh": 'echo "it\'s run"\nPATH=/opt/env/bin:$PATH pytest -rA $TEST_DIR/test_outputs.py\n',
        "solution.sh": "echo hello > greeting.txt\n",
        "Dockerfile": "FROM debian\n",
        "docker-compose.yaml": "services: {client: {build: .}}\n",
        "tests__test_outputs.py": "def test_greeting():\n    assert open('/app/greeting.txt').read() == 'hello\\n'\n",
        **files,
    }
    _write(folder, content)
    return folder


def write_swebench_repository(folder: Path, **files: str | None) -> Path:
    """A task repository of SWE-bench 5."""
    task = {name: SWE_BENCH_5[name] for name in ("repo", "base_commit", "image", "log_parser", "eval_type", "version")}
    content: dict[str, str | None] = {
        "sweb.yaml": "name: ours\n",
        "tasks__acme__calc-7__task.yaml": json.dumps({"instance_id": "acme__calc-7", **task}),
        "tasks__acme__calc-7__tests.json": json.dumps({"FAIL_TO_PASS": [FAILING], "PASS_TO_PASS": [PASSING]}),
        "tasks__acme__calc-7__problem_statement.md": "add subtracts\n",
        "tasks__acme__calc-7__gold.patch": GOLD,
        "tasks__acme__calc-7__test.patch": TEST_PATCH,
        "tasks__acme__calc-7__eval.sh": EVAL_SCRIPT,
        **files,
    }
    for name, text in content.items():
        if text is not None:
            place = folder / name.replace("acme__calc-7", "acme@calc-7").replace("__", "/").replace("@", "__")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
    return folder


def _write(folder: Path, files: dict[str, str | None]) -> None:
    for name, text in files.items():
        if text is not None:
            place = folder / name.replace("__", "/")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
