"""From an idea of a task to a row that passed admission: which tests it turns, and proof that it is sound.

Every maker hands over the same thing, a `Candidate`; `Admission` runs the tests without and with the known fix, keeps
the tests that the fix turns and those that hold in both, writes the row, and validates it as any other row. Whatever is
refused comes back as a `Refusal` with the reason; only infrastructure raises.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyenv.core import SandboxProvider
from skyenv.envs.swe.environment import Environments
from skyenv.envs.swe.grading import run_tests
from skyenv.envs.swe.rows import parse_task
from skyenv.envs.swe.sources import Tree
from skyenv.envs.swe.tasks import Record, SweTask
from skyenv.envs.swe.validation import validate_task
from skyenv.envs.swe.verdict import Grade
from skyenv.errors import ConfigError

Row = dict[str, Any]
WriteProblem = Callable[["Candidate", "Symptoms"], Awaitable[str]]
MAX_KEPT_TESTS = 40
MAX_BROKEN_SHARE = 0.5
_FLAKINESS_RUNS = 2


@dataclass(frozen=True, slots=True)
class Testing:
    """How a project's tests run. `tests` are directories or files of it (empty: found by convention).

    `environment` and `runner` are as in a task row, `timeout` in seconds for one run.
    """

    tests: tuple[str, ...] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    runner: str = "pytest"
    timeout: float = 120.0

    def row(self, task_id: str, source: Mapping[str, Any], tests: Mapping[str, Any], level: int = 3) -> Row:
        """A row without problem, test ids and reference; `source` and `tests` as in a task row."""
        return {
            "task_id": task_id,
            "level": level,
            "source": dict(source),
            "tests": dict(tests),
            "runner": self.runner,
            "environment": dict(self.environment),
            "timeout": self.timeout,
        }


@dataclass(frozen=True, slots=True)
class Candidate:
    """An idea of a task. `row` lacks problem and test ids; `facts` are what the maker knows, for the problem text."""

    row: Row
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Symptoms:
    """What goes wrong without the fix: the tests that fail, and what the runner printed of them."""

    failing: tuple[str, ...]
    output: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """A candidate that is no task, and why."""

    task_id: str
    reason: str


class Admitted(dict[str, Any]):
    """A row that passed admission, and the record of it."""

    def __init__(self, row: Row, record: Record) -> None:
        super().__init__(row)
        self.record = record


@dataclass(frozen=True, slots=True)
class Observation:
    """Outcome by test id of one run, and what was printed. `problem` when the run says nothing about tests."""

    outcomes: Mapping[str, str]
    output: str
    problem: str = ""

    @property
    def passed(self) -> frozenset[str]:
        """Ids of the tests that passed."""
        return frozenset(test for test, outcome in self.outcomes.items() if outcome == "passed")


def probe(row: Row, test_files: Sequence[str], base: Path) -> SweTask:
    """The task of a row whose test ids are not known yet: it runs all of `test_files`."""
    ids = [f"{file}::_" for file in test_files]
    return parse_task({**row, "problem": "to be written", "fail_to_pass": ids}, "candidate", base)


async def observe(task: SweTask, provider: SandboxProvider) -> Observation:
    """Run the files of a probe without any change. Raises SandboxError, ConfigError and `SourceUnavailable`."""
    grade = Grade(task)
    await run_tests(grade, (), Environments.of(provider))
    sound = grade.status in ("unresolved", "resolved") and bool(grade.tests)
    return Observation(grade.tests, grade.output, "" if sound else f"{grade.status} {' '.join(grade.flags)}".strip())


async def steady_passes(task: SweTask, provider: SandboxProvider) -> frozenset[str]:
    """The tests of a probe that pass each time. ConfigError when they cannot be run at all."""
    passed: frozenset[str] | None = None
    for _run in range(_FLAKINESS_RUNS):
        seen = await observe(task, provider)
        if seen.problem:
            raise ConfigError(f"{task.task_id}: the tests cannot be run: {seen.problem}: {seen.output[-800:].strip()}")
        passed = seen.passed if passed is None else passed & seen.passed
    return passed or frozenset()


def split(before: Observation, after: frozenset[str]) -> tuple[tuple[str, ...], tuple[str, ...]] | str:
    """Tests that the fix turns and tests of the same files that hold without and with it, or why there are none."""
    if before.problem:
        return f"without the fix the tests do not run: {before.problem}"
    turned = tuple(sorted(after - before.passed))
    if not turned:
        return "no test tells it from the fixed code"
    missing = [test for test in turned if test not in before.outcomes]
    if len(missing) > MAX_BROKEN_SHARE * len(after):
        return f"{len(missing)} of {len(after)} tests are not even collected without the fix"
    files = {test.split("::")[0] for test in turned}
    return turned, tuple(sorted(test for test in before.passed & after if test.split("::")[0] in files))


def sample(tests: Sequence[str], seed: str) -> list[str]:
    """At most `MAX_KEPT_TESTS` of them, the same for the same seed."""
    chosen = random.Random(seed).sample(list(tests), min(MAX_KEPT_TESTS, len(tests)))
    return sorted(chosen)


@dataclass(frozen=True, slots=True)
class Admission:
    """In whose sandboxes candidates are tried, who writes their issue texts, and how often each patch runs."""

    provider: SandboxProvider
    write_problem: WriteProblem
    runs: int = 1

    async def admit(
        self, candidate: Candidate, before: Observation, after: frozenset[str], base: Path
    ) -> Admitted | Refusal:
        """The finished row of a candidate that turned out sound, or why it is refused."""
        task_id = candidate.row["task_id"]
        tests = split(before, after)
        if isinstance(tests, str):
            return Refusal(task_id, tests)
        turned, held = tests
        row = {
            **candidate.row,
            "problem": await self.write_problem(candidate, Symptoms(turned, before.output)),
            "fail_to_pass": list(turned),
            "pass_to_pass": sample(held, task_id),
        }
        try:
            found = await validate_task(parse_task(row, "candidate", base), self.provider, runs=self.runs)
        except ConfigError as error:
            return Refusal(task_id, str(error))
        return Admitted(row, found["record"]) if found["ok"] else Refusal(task_id, "; ".join(found["problems"])[:500])

    async def admit_change(
        self, candidate: Candidate, fixed_source: Mapping[str, Any], test_files: Sequence[str]
    ) -> Admitted | Refusal:
        """`admit` for a change from one source to another: both are run, the fixed one more than once."""
        base, row = Path(), candidate.row
        try:
            after = await steady_passes(probe({**row, "source": fixed_source}, test_files, base), self.provider)
        except ConfigError as error:
            return Refusal(row["task_id"], str(error))
        before = await observe(probe(row, test_files, base), self.provider)
        return await self.admit(candidate, before, after, base)


def test_files_of(tree: Tree, roots: Sequence[str]) -> list[str]:
    """Python test files below `roots` (all of the tree when empty), by pytest's naming rule."""
    found = []
    for path in sorted(tree):
        name = path.rpartition("/")[2]
        inside = not roots or any(path == root or path.startswith(f"{root}/") for root in roots)
        if inside and ((name.startswith("test_") and name.endswith(".py")) or name.endswith("_test.py")):
            found.append(path)
    return found


def test_roots(test_files: Sequence[str]) -> list[str]:
    """What to put over a checkout so that the tests run: directories named after tests, or the files themselves."""
    roots = set()
    for path in test_files:
        parts = path.split("/")
        depth = next((n for n, part in enumerate(parts[:-1], 1) if part in ("test", "tests", "testing")), len(parts))
        roots.add("/".join(parts[:depth]))
    return sorted(roots)
