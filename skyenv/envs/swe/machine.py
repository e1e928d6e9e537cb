"""Grading of tasks whose work is the whole machine: the verifier runs where the agent worked, once it is done.

Nothing of the agent's runs any more, and what lay where tests and rewards go is removed before the tests come in. A
task may want its verifier in a fresh sandbox instead; then nothing but the artifacts that it names is carried there.
That a reward is missing is the agent's doing if a fresh machine gets one, else the task's.
"""

from __future__ import annotations

import errno
import posixpath
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from anyio import to_thread

from skyenv.core import Sandbox
from skyenv.envs.swe.environment import Environments, start_machine
from skyenv.envs.swe.extraction import download_bounded
from skyenv.envs.swe.runners import Job, get_runner
from skyenv.envs.swe.runners.harbor import ARTIFACTS, LOGS, TESTS
from skyenv.envs.swe.sources import TreeFile, fetch_tree, tree_to_tar
from skyenv.envs.swe.tasks import PatchFile, PatchText, SweTask
from skyenv.envs.swe.verdict import Grade, judge
from skyenv.errors import ConfigError, SandboxPathError

MAX_ARTIFACT_BYTES = 256 << 20
Free = Callable[[], Awaitable[None]]


async def grade_machine(
    task: SweTask, box: Sandbox, environments: Environments, free: Free | None = None
) -> dict[str, Any]:
    """Grade what is in `box`, which cannot be worked in afterwards. Raises SandboxError.

    `free` is awaited as soon as `box` is not needed any more, if that is before the end.
    """
    grade = Grade(task)
    started = time.perf_counter()
    await verify(grade, box, environments, free)
    if grade.status == "instance_error":
        control = Grade(task)
        async with environments.open(task) as fresh:
            await start_machine(fresh, task.repo_path)
            await verify(control, fresh, environments)
        if control.status != "instance_error":
            grade.status = "unresolved"
            grade.flags.append("no_reward")
    grade.seconds = time.perf_counter() - started
    return grade.verdict()


async def verify(grade: Grade, box: Sandbox, environments: Environments, free: Free | None = None) -> None:
    """Run the verifier, on the agent's machine or where the task wants it, and judge what it left."""
    task = grade.task
    await box.kill_processes()
    if task.verifier is None:
        await box.exec(f"rm -rf {TESTS} {LOGS}", timeout=60.0)
        await _run(grade, box, environments, tests=True)
        return
    carried = await _collect(task, box)
    if carried is None:
        grade.status = "patch_too_large"
        return
    if free is not None:
        await free()
    clean = replace(task, environment=task.verifier, verifier=None, files="")
    async with environments.open(clean) as fresh:
        await start_machine(fresh, task.repo_path)
        own = task.verifier.image not in (None, task.environment.image) and await _has_tests(fresh)
        try:
            for path, archive in carried:
                await fresh.upload(path, archive)
        except SandboxPathError as error:
            grade.status, grade.output = "patch_rejected", str(error)
            return
        await _run(grade, fresh, environments, tests=not own)


async def _run(grade: Grade, box: Sandbox, environments: Environments, *, tests: bool) -> None:
    """Bring the `tests` in, unless the image has them, and run the verifier."""
    task = grade.task
    if isinstance(task.tests, PatchText | PatchFile):
        raise ConfigError(f"{task.task_id}: tests: a task that is graded on the whole machine brings files")
    if tests:
        tree = await fetch_tree(task.tests.source, base=task.base, cache=environments.cache)
        await box.upload(TESTS, await to_thread.run_sync(tree_to_tar, tree))
    runner = get_runner(task.runner)
    job = Job(task.repo_path, "", (), (), test_command=task.command, parser=task.parser)
    command = runner.command(job)
    if task.environment.activate:
        command = f"{task.environment.activate}\n{command}"
    started = time.perf_counter()
    result = await box.exec(command, timeout=task.timeout, max_output_bytes=runner.max_output_bytes)
    judge(grade, job, result, await runner.report(job, box, result))
    grade.timings = {"tests": time.perf_counter() - started}


async def _has_tests(box: Sandbox) -> bool:
    """Whether an image of a verifier brought its tests; nothing of the agent's is in `box` yet."""
    try:
        return (await box.stat(f"{TESTS}/test.sh")).kind == "file"
    except SandboxPathError:
        return False


async def _collect(task: SweTask, box: Sandbox) -> list[tuple[str, bytes]] | None:
    """What the artifacts hold, packed, and where to unpack it; None when it is too much. What is not there is left out.

    Nothing runs in `box` any more.
    """
    carried: list[tuple[str, bytes]] = []
    left = MAX_ARTIFACT_BYTES
    for path in (*task.artifacts, ARTIFACTS):
        try:
            place, archive = await _packed(box, path, left)
        except SandboxPathError as error:
            if error.errno in (errno.EFBIG, errno.EOVERFLOW):
                return None
            continue
        left -= len(archive)
        carried.append((place, archive))
    return carried


async def _packed(box: Sandbox, path: str, max_bytes: int) -> tuple[str, bytes]:
    info = await box.stat(path)
    if info.kind == "dir":
        return path, await download_bounded(box, path, max_bytes, frozenset())
    data = await box.read_file(path, max_bytes=max_bytes + 1)
    if len(data) > max_bytes:
        raise SandboxPathError(errno.EFBIG, f"more than {max_bytes} bytes", path)
    mode = 0o755 if info.mode & 0o111 else 0o644
    return posixpath.dirname(path), tree_to_tar({posixpath.basename(path): TreeFile(data, mode)})
