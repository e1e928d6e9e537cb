"""Admission: proof that a task is sound, and the record of it that grading uses and training asks for.

Without a change the failing tests fail and the others pass; with the reference all come out as they have to, every
time. A test to keep that comes out differently from run to run is left out, a failing test that does so ends it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from anyio import to_thread

from skyenv.core import SandboxProvider
from skyenv.envs.swe.environment import Environments, start_machine
from skyenv.envs.swe.grading import run_tests, try_patch
from skyenv.envs.swe.machine import verify
from skyenv.envs.swe.patches import read_patch, reversed_patch
from skyenv.envs.swe.sources import DirectorySource, diff_trees, fetch_tree, tree_to_tar
from skyenv.envs.swe.tasks import PatchFile, PatchText, Record, SolutionScript, SweTask
from skyenv.envs.swe.verdict import Grade
from skyenv.errors import ConfigError

SOLUTION_SECONDS = 900.0
_NETWORK = re.compile(
    r"Temporary failure in name resolution|Name or service not known|Network is unreachable|Could not resolve host"
    r"|Max retries exceeded|getaddrinfo|ConnectionRefusedError|ECONNREFUSED|ENOTFOUND|no such host"
)
_ACCEPTABLE = {"xfailed", "skipped"}
_EMPTY = "without a change"


@dataclass(slots=True)
class _Findings:
    """What the runs of one task came to, in their order."""

    empty: list[Grade] = field(default_factory=list)
    reference: list[Grade] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


async def reference_patch(task: SweTask, provider: SandboxProvider) -> bytes:
    """Return the known fix as a patch. ConfigError when the task has none or it cannot be read."""
    match task.reference:
        case None:
            raise ConfigError(f"{task.task_id}: reference: is missing; add one to validate the task")
        case PatchText(patch, reverse=True):
            files = await Environments.of(provider).files(task)
            return await to_thread.run_sync(reversed_patch, files.source, patch, f"{task.task_id}: reference")
        case PatchText(patch):
            return patch
        case PatchFile() as file:
            return await read_patch(file, task, "reference")
        case SolutionScript():
            raise ConfigError(f"{task.task_id}: reference: is a script, and no patch says what it does")
        case after:
            environments = Environments.of(provider)
            files = await environments.files(task)
            tree = await fetch_tree(after.source, base=task.base, cache=environments.cache)
            return await to_thread.run_sync(diff_trees, files.source, tree, after.paths or None)


async def validate_task(task: SweTask, provider: SandboxProvider, runs: int = 1) -> dict[str, Any]:
    """Run the tests without a change and with the reference, `runs` times each.

    Returns `{"task_id", "ok", "problems", "runs", "reference_seconds", "empty_seconds", "record"}`; problems name tests
    and causes, `record` is a `Record` when there are none. Raises SandboxError when no sandbox can be had, ConfigError
    for a task that cannot even be set up.
    """
    environments = Environments.of(provider)
    found = _Findings()
    allow: tuple[str, ...] = ()
    first: Grade | None = None
    if not task.whole_machine:
        patch = await reference_patch(task, provider)
        first = await try_patch(task, patch, environments)
        allow = await _allowance(task, first, environments)
    for number in range(runs):
        if task.whole_machine:
            found.empty.append(await _play(task, environments, solve=False))
            found.reference.append(await _play(task, environments, solve=True))
        else:
            empty = Grade(task)
            await run_tests(empty, (), environments)
            found.empty.append(empty)
            again = number > 0 or bool(allow) or first is None
            graded = await try_patch(_allowing(task, allow), patch, environments) if again else first
            assert graded is not None
            found.reference.append(graded)
        if _broken(task, found):
            break
    record = _record(task, found, allow)
    return {
        "task_id": task.task_id,
        "ok": not found.problems,
        "problems": found.problems,
        "runs": len(found.reference),
        "empty_seconds": round(max(_seconds(grade) for grade in found.empty), 3),
        "reference_seconds": round(max(_seconds(grade) for grade in found.reference), 3),
        "record": record if not found.problems else None,
    }


async def _allowance(task: SweTask, grade: Grade, environments: Environments) -> tuple[str, ...]:
    """Protected paths that the reference changes, if it did not resolve the task without them."""
    if grade.status == "resolved" or not grade.dropped:
        return ()
    files = await environments.files(task)
    return tuple(path for path in grade.dropped if path not in files.tests)


def _allowing(task: SweTask, allow: tuple[str, ...]) -> SweTask:
    return task.admitted(Record(task.task_id, task.digest, 0, task.timeout, allow=allow)) if allow else task


async def _play(task: SweTask, environments: Environments, *, solve: bool) -> Grade:
    """Grade a fresh machine, or one on which the solution ran."""
    grade = Grade(task)
    async with environments.open(task) as box:
        await start_machine(box, task.repo_path)
        if solve:
            if not isinstance(task.reference, SolutionScript):
                raise ConfigError(f"{task.task_id}: reference: is missing; add a solution script to validate the task")
            solution = DirectorySource(task.reference.directory)
            tree = await fetch_tree(solution, base=task.base, cache=environments.cache)
            await box.upload(task.reference.place, await to_thread.run_sync(tree_to_tar, tree))
            result = await box.exec(_solve(task.reference), timeout=task.agent_timeout or SOLUTION_SECONDS)
            grade.output = result.output
        await verify(grade, box, environments)
    return grade


def _solve(solution: SolutionScript) -> str:
    exports = "".join(f"export {name}={shlex.quote(value)}; " for name, value in solution.env.items())
    return f"({exports}bash {shlex.quote(f'{solution.place}/{solution.script}')})"


def _seconds(grade: Grade) -> float:
    return grade.timings.get("tests", 0.0)


def _broken(task: SweTask, found: _Findings) -> bool:
    """Whether the latest pair of runs shows a fault that no further run would undo."""
    found.problems = _faults(found.empty[-1], _EMPTY) + _faults(found.reference[-1], "with the reference")
    if task.whole_machine and not found.problems:
        if found.empty[-1].status == "resolved":
            found.problems.append("passes without a change: the verifier gives the full reward")
        if found.reference[-1].status != "resolved":
            found.problems.append(f"with the solution: {_tell(found.reference[-1])}")
    return bool(found.problems)


def _faults(grade: Grade, when: str) -> list[str]:
    """Why a run says nothing about the tests."""
    odd = [flag for flag in grade.flags if flag in ("tests_did_not_finish", "canary", "test_files_changed")]
    if "no_test_ran" in grade.flags and when == _EMPTY:
        return []  # what does not compile without the change has no tests either
    if grade.status in ("unresolved", "resolved") and not odd:
        return []
    network = " (it asks for a network)" if _NETWORK.search(grade.output) else ""
    return [f"{when}: {_tell(grade)}{network}"]


def _tell(grade: Grade) -> str:
    return f"{grade.status} {' '.join(grade.flags)} {grade.output[-500:].strip()}"


def _record(task: SweTask, found: _Findings, allow: tuple[str, ...]) -> Record:
    """Weigh the tests one by one; what is wrong with them goes to the problems."""
    last = found.reference[-1]
    accept: dict[str, str] = {}
    flaky: list[str] = []
    if not found.problems and not task.whole_machine:
        for test in task.expected:
            _weigh(test, task, found, accept, flaky)
        statuses = {grade.exit_status for grade in found.reference}
        if "exit_status" in last.flags and len(statuses) > 1:
            found.problems.append(f"the exit status differs from run to run: {sorted(map(str, statuses))}")
    return Record(
        task_id=task.task_id,
        digest=task.digest,
        runs=len(found.reference),
        seconds=round(max(_seconds(grade) for grade in (*found.reference, *found.empty)), 3),
        exit_status=last.exit_status,
        accept=accept,
        flaky=tuple(flaky),
        allow=allow,
        network=any(_NETWORK.search(grade.output) is not None for grade in (*found.empty, *found.reference)),
    )


def _weigh(test: str, task: SweTask, found: _Findings, accept: dict[str, str], flaky: list[str]) -> None:
    before = _outcomes(test, found.empty)
    after = _outcomes(test, found.reference)
    must_turn = test in frozenset(task.fail_to_pass)
    nothing_ran = "no_test_ran" in found.empty[-1].flags
    if must_turn and "passed" in before:
        found.problems.append(f"passes without a change: {test}")
    elif len(set(after)) > 1 or (not must_turn and len(set(before)) > 1):
        if must_turn:
            found.problems.append(f"flaky: {test} {' '.join(sorted({*before, *after}))}")
        else:
            flaky.append(test)
    elif not _good(test, task, after[0], accept, must_turn=must_turn):
        dropped = "".join(f", dropped {path}" for path in found.reference[-1].dropped)
        found.problems.append(f"with the reference: {test} {after[0]}{dropped}{_network(found.reference)}")
    elif must_turn and accept.get(test) in before:
        found.problems.append(f"does not turn: {test} {before[0]}")
    elif not must_turn and not nothing_ran and before[0] not in ("passed", accept.get(test), task.accept.get(test)):
        found.problems.append(f"fails without a change: {test} {before[0]}")


def _outcomes(test: str, grades: Sequence[Grade]) -> list[str]:
    return [grade.expected.get(test, "missing") for grade in grades]


def _good(test: str, task: SweTask, outcome: str, accept: dict[str, str], *, must_turn: bool) -> bool:
    """Whether the outcome with the reference will do; one that stands for "passed" is noted."""
    if outcome in ("passed", task.accept.get(test)):
        return True
    if outcome in _ACCEPTABLE and not (must_turn and outcome == "skipped"):
        accept[test] = outcome
        return True
    return False


def _network(grades: Sequence[Grade]) -> str:
    return " (it asks for a network)" if any(_NETWORK.search(grade.output) for grade in grades) else ""


def summary(records: Sequence[Mapping[str, Any]], refused: Sequence[str]) -> dict[str, Any]:
    """What a validation came to: how many tasks there were, were admitted and refused, and why."""
    admitted = [record for record in records if record["ok"]]
    return {
        "tasks": len(records) + len(refused),
        "admitted": len(admitted),
        "refused": len(records) - len(admitted) + len(refused),
        "problems": {record["task_id"]: record["problems"] for record in records if not record["ok"]},
        "rows": list(refused),
    }
