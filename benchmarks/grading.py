"""What a verdict costs beside the tests themselves: seconds from the end of an episode to its verdict.

The baseline in the same minute: the same test files in a live sandbox that has the fixed code and the tests in place,
nothing but the runner's own command. `overhead` is the difference of the two, task by task. Then many gradings at once.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
from _measure import parse, report, spread

import skyenv
from skyenv.core import SandboxProvider
from skyenv.envs.swe.environment import Environments, start_repository
from skyenv.envs.swe.grading import apply_patch, grade_work_tree, read_agent
from skyenv.envs.swe.loading import load_tasks
from skyenv.envs.swe.sources import tree_to_tar
from skyenv.envs.swe.tasks import SweTask
from skyenv.envs.swe.validation import reference_patch


async def tests_alone(task: SweTask, patch: bytes, provider: SandboxProvider) -> float:
    """Seconds of the test files' run with the plain runner."""
    environments = Environments.of(provider)
    files = await environments.files(task)
    names = " ".join(shlex.quote(name) for name in dict.fromkeys(test.split("::")[0] for test in task.expected))
    command = f"pytest -q {names}" if task.runner == "pytest" else f"python3 -m unittest -q {names}"
    async with environments.open(task) as box:
        await apply_patch(box, task, patch)
        await box.upload(task.repo_path, tree_to_tar(files.tests))
        start = time.perf_counter()
        result = await box.exec(f"cd {task.repo_path} && {command}", timeout=task.timeout)
        seconds = time.perf_counter() - start
    if result.exit_code:
        sys.exit(f"{task.task_id}: the baseline run failed: {result.output[-400:]}")
    return seconds


async def graded(task: SweTask, patch: bytes, provider: SandboxProvider) -> float:
    """Seconds from the end of an episode in a live sandbox to its verdict."""
    environments = Environments.of(provider)
    async with environments.open(task) as box:
        await start_repository(box, task.repo_path)
        await apply_patch(box, task, patch)
        start = time.perf_counter()
        tree = await read_agent(task, box, environments)
        verdict = await grade_work_tree(task, tree, environments)
        seconds = time.perf_counter() - start
    if not verdict["resolved"]:
        sys.exit(f"{task.task_id}: graded {json.dumps(verdict)[:400]}")
    return seconds


async def one_by_one(
    tasks: Sequence[SweTask], patches: Mapping[str, bytes], provider: SandboxProvider
) -> dict[str, Any]:
    """Each task: its tests alone, then graded."""
    alone, whole = [], []
    for task in tasks:
        alone.append(await tests_alone(task, patches[task.task_id], provider))
        whole.append(await graded(task, patches[task.task_id], provider))
    overhead = [b - a for a, b in zip(alone, whole, strict=True)]
    return {"tests_alone": spread(alone), "finish_to_verdict": spread(whole), "overhead": spread(overhead)}


async def at_once(
    tasks: Sequence[SweTask], patches: Mapping[str, bytes], provider: SandboxProvider, count: int
) -> dict[str, Any]:
    """`count` gradings at the same time; wall seconds of all."""
    seconds: list[float] = []

    async def one(task: SweTask) -> None:
        seconds.append(await graded(task, patches[task.task_id], provider))

    start = time.perf_counter()
    async with anyio.create_task_group() as group:
        for number in range(count):
            group.start_soon(one, tasks[number % len(tasks)])
    wall = time.perf_counter() - start
    return {"at_once": count, "at_once_wall_seconds": wall, "verdicts_per_second": count / wall}


async def measure(source: str, limit: int, count: int) -> dict[str, Any]:
    """All figures; sandboxes of this process."""
    tasks = load_tasks(source)[:limit]
    async with skyenv.connect() as provider:
        patches = {task.task_id: await reference_patch(task, provider) for task in tasks}
        await graded(tasks[0], patches[tasks[0].task_id], provider)
        results = await one_by_one(tasks, patches, provider)
        results |= await at_once(tasks, patches, provider, count)
    return results


if __name__ == "__main__":
    options = parse(__doc__ or "", tasks=24, at_once=64)
    report(anyio.run(measure, "builtin", options.tasks, options.at_once), options.json)
