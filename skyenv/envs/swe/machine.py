"""Grading of tasks whose work is the whole machine: the verifier runs where the agent worked, once it is done.

Nothing of the agent's runs any more, and what lay where tests and rewards go is removed before the tests come in. That
a reward is missing is the agent's doing if a fresh machine gets one, else the task's.
"""

from __future__ import annotations

import time
from typing import Any

from anyio import to_thread

from skyenv.core import Sandbox
from skyenv.envs.swe.environment import Environments
from skyenv.envs.swe.runners import Job, get_runner
from skyenv.envs.swe.runners.harbor import LOGS, TESTS
from skyenv.envs.swe.sources import fetch_tree, tree_to_tar
from skyenv.envs.swe.tasks import PatchFile, PatchText, SweTask
from skyenv.envs.swe.verdict import Grade, judge
from skyenv.errors import ConfigError


async def grade_machine(task: SweTask, box: Sandbox, environments: Environments) -> dict[str, Any]:
    """Grade what is in `box`, which cannot be worked in afterwards. Raises SandboxError."""
    grade = Grade(task)
    started = time.perf_counter()
    await verify(grade, box, environments)
    if grade.status == "instance_error":
        control = Grade(task)
        async with environments.open(task) as fresh:
            await verify(control, fresh, environments)
        if control.status != "instance_error":
            grade.status = "unresolved"
            grade.flags.append("no_reward")
    grade.seconds = time.perf_counter() - started
    return grade.verdict()


async def verify(grade: Grade, box: Sandbox, environments: Environments) -> None:
    """Bring the tests in, run the verifier and judge what it left."""
    task = grade.task
    if isinstance(task.tests, PatchText | PatchFile):
        raise ConfigError(f"{task.task_id}: tests: a task that is graded on the whole machine brings files")
    tests = await fetch_tree(task.tests.source, base=task.base, cache=environments.cache)
    packed = await to_thread.run_sync(tree_to_tar, tests)
    await box.kill_processes()
    await box.exec(f"rm -rf {TESTS} {LOGS}", timeout=60.0)
    await box.upload(TESTS, packed)
    runner = get_runner(task.runner)
    job = Job(task.repo_path, "", (), (), test_command=task.command, parser=task.parser)
    command = runner.command(job)
    if task.environment.activate:
        command = f"{task.environment.activate}\n{command}"
    started = time.perf_counter()
    result = await box.exec(command, timeout=task.timeout, max_output_bytes=runner.max_output_bytes)
    judge(grade, job, result, await runner.report(job, box, result))
    grade.timings = {"tests": time.perf_counter() - started}
