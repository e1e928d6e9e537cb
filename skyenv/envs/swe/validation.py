"""Proof that a task is sound: the empty patch leaves its failing tests failing, the reference resolves it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from anyio import to_thread

from skyenv.core import SandboxProvider
from skyenv.envs.swe.environment import Environments
from skyenv.envs.swe.grading import Grade, grade_patch, run_tests
from skyenv.envs.swe.sources import diff_trees, fetch_tree
from skyenv.envs.swe.tasks import PatchFile, PatchText, SweTask
from skyenv.errors import ConfigError


async def reference_patch(task: SweTask, provider: SandboxProvider) -> bytes:
    """Return the known fix as a patch. ConfigError when the task has none or it cannot be read."""
    match task.reference:
        case None:
            raise ConfigError(f"{task.task_id}: reference: is missing; add one to validate the task")
        case PatchText(patch):
            return patch
        case PatchFile(path):
            return await _read_patch(task.base / path, task)
        case after:
            environments = Environments.of(provider)
            files = await environments.files(task)
            tree = await fetch_tree(after.source, base=task.base, cache=environments.cache)
            return await to_thread.run_sync(diff_trees, files.source, tree, after.paths or None)


async def _read_patch(path: Path, task: SweTask) -> bytes:
    try:
        return await to_thread.run_sync(path.read_bytes)
    except OSError as error:
        raise ConfigError(f"{task.task_id}: reference.path: {path}: {error.strerror}") from error


async def validate_task(task: SweTask, provider: SandboxProvider, runs: int = 1) -> dict[str, Any]:
    """Run the tests without a change and with the reference, `runs` times each.

    Returns `{"task_id", "ok", "problems", "runs", "reference_seconds", "empty_seconds"}`; problems name tests and
    causes. Raises SandboxError when no sandbox can be had, ConfigError for a task that cannot even be set up.
    """
    problems: list[str] = []
    empty_seconds, reference_seconds = 0.0, 0.0
    made = 0
    while made < runs and not problems:
        made += 1
        started = time.perf_counter()
        problems += await _check_empty(task, provider)
        middle = time.perf_counter()
        problems += await _check_reference(task, provider)
        empty_seconds = max(empty_seconds, middle - started)
        reference_seconds = max(reference_seconds, time.perf_counter() - middle)
    return {
        "task_id": task.task_id,
        "ok": not problems,
        "problems": problems,
        "runs": made,
        "empty_seconds": round(empty_seconds, 3),
        "reference_seconds": round(reference_seconds, 3),
    }


async def _check_empty(task: SweTask, provider: SandboxProvider) -> list[str]:
    grade = Grade(task)
    await run_tests(grade, (), Environments.of(provider))
    if grade.status not in ("unresolved", "resolved") or not grade.tests:
        return [f"without a change: {_tell(grade)}"]
    problems = [
        f"fails without a change: {test} {grade.tests.get(test, 'missing')}"
        for test in task.pass_to_pass
        if grade.tests.get(test) != "passed"
    ]
    problems += [f"passes without a change: {test}" for test in task.fail_to_pass if grade.tests.get(test) == "passed"]
    return problems


async def _check_reference(task: SweTask, provider: SandboxProvider) -> list[str]:
    verdict = await grade_patch(task, await reference_patch(task, provider), provider)
    if verdict["resolved"]:
        return []
    failing = [f"{test} {outcome}" for test, outcome in verdict["tests"].items() if outcome != "passed"]
    dropped = [f"dropped {path}" for path in verdict["dropped_paths"]]
    return [f"with the reference: {verdict['status']}: {', '.join([*failing, *dropped, *verdict['flags']])}"]


def _tell(grade: Grade) -> str:
    return f"{grade.status} {' '.join(grade.flags)} {grade.output[-500:].strip()}"
