"""R2E-Gym: one image a commit, tests in full and an expected status for every test.

Which tests the fix has to turn is read from the recorded run before it. Tests that are expected not to pass have to
come out as they did. The image's copies of the tests and of the script that runs them are hidden from the agent.
"""

from __future__ import annotations

import re

from skyenv.envs.swe.fields import Row
from skyenv.envs.swe.runners import merge
from skyenv.envs.swe.runners.ids import NORMALISERS
from skyenv.envs.swe.runners.logs import parse_log
from skyenv.envs.swe.sources import FilesSource, ImageSource
from skyenv.envs.swe.tasks import Environment, SourceFiles, SweTask
from skyenv.errors import ConfigError

REPO, TESTS = "/testbed", "r2e_tests"
TIMEOUT = 900.0
COMMAND = ".venv/bin/python -W ignore -m pytest {files}"
HIDDEN = (
    "/r2e_tests",
    "/root/r2e_tests",
    f"{REPO}/{TESTS}",
    "/run_tests.sh",
    "/root/run_tests.sh",
    f"{REPO}/run_tests.sh",
)
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_OUTCOMES = {"PASSED": "passed", "FAILED": "failed", "ERROR": "error", "SKIPPED": "skipped", "XFAIL": "xfailed"}


def matches(row: Row) -> bool:
    """Whether a row has an image and the expected outcome of its tests."""
    return row.has("docker_image", "expected_output_json")


def parse(row: Row) -> SweTask:
    """Read a row."""
    execution = row.structure("execution_result_content")
    expected = _expected(row)
    before = _before(execution)
    passing = [test for test, outcome in expected.items() if outcome == "passed"]
    failing = tuple(test for test in passing if before.get(test, "missing") != "passed")
    if not failing:
        raise ConfigError(f"{row.at('expected_output_json')}: names no failing test: all passed before the fix too")
    others = {test: outcome for test, outcome in expected.items() if outcome != "passed"}
    tests = _tests(row, execution)
    return SweTask(
        task_id=row.text("instance_id", "docker_image"),
        problem=row.text("problem_statement"),
        source=ImageSource(REPO),
        tests=SourceFiles(FilesSource(tests)),
        fail_to_pass=failing,
        pass_to_pass=(*(test for test in passing if test not in set(failing)), *others),
        runner="pytest",
        environment=Environment(image=row.text("docker_image")),
        reference=_reference(row),
        timeout=TIMEOUT,
        repo_path=REPO,
        base=row.base,
        command=COMMAND,
        parser="r2e",
        test_files=tuple(path for path in tests if path.endswith(".py") and not path.endswith("__init__.py")),
        accept=others,
        hidden=HIDDEN,
    )


def _expected(row: Row) -> dict[str, str]:
    found = {}
    for test, word in row.structure("expected_output_json").items():
        if word not in _OUTCOMES:
            raise ConfigError(f"{row.at('expected_output_json')}: {test!r} has the unknown outcome {word!r}")
        name = _ANSI.sub("", test).split(" - ")[0]
        if name:
            found[name] = _OUTCOMES[word]
    return found


def _before(execution: object) -> dict[str, str]:
    log = execution.get("old_commit_res_stdout") if isinstance(execution, dict) else None
    return merge((NORMALISERS["r2e"](test), outcome) for test, outcome in parse_log("pytest", str(log or "")))


def _tests(row: Row, execution: object) -> dict[str, bytes]:
    names, codes = ([], []) if not isinstance(execution, dict) else (
        execution.get("test_file_names"), execution.get("test_file_codes"),
    )  # fmt: skip
    at = row.at("execution_result_content.test_file_codes")
    if not isinstance(names, list) or not isinstance(codes, list) or not names or len(names) != len(codes):
        raise ConfigError(f"{at}: must be a list of texts, one for each of test_file_names")
    if not all(isinstance(item, str) for item in [*names, *codes]):
        raise ConfigError(f"{at}: must be a list of texts, one for each of test_file_names")
    return {f"{TESTS}/{name.rpartition('/')[2]}": code.encode() for name, code in zip(names, codes, strict=True)}


def _reference(row: Row) -> SourceFiles | None:
    """The files after the commit, tests left out; None when the row does not hold them in full."""
    if row.value("parsed_commit_content") is None:
        return None
    files = {}
    for diff in row.structure("parsed_commit_content").get("file_diffs") or ():
        path = (((diff.get("header") or {}).get("file")) or {}).get("path") or ""
        content = diff.get("new_file_content")
        if isinstance(content, str) and content and path.endswith(".py") and not _is_test(path):
            files[path] = content.encode()
    return SourceFiles(FilesSource(files), tuple(files)) if files else None


def _is_test(path: str) -> bool:
    parts = path.split("/")
    return any(part in ("test", "tests") for part in parts) or parts[-1].startswith("test_")
