"""Grading: an agent's changes become a patch and a verdict, both made in a clean sandbox the agent never touched.

One path for all work: the kept changes are written as two commits into a git directory that lies outside the checkout
and has neither configuration, hooks, filters nor attributes; their difference is the patch; the patch is applied to a
pristine checkout; graded tests are put over it; the runner runs once. Content is bytes and file names are data all the
way. What the patch cannot touch is decided in `policy`, how tests are observed in `runners`.

Verdict: `{"status", "resolved", "reward", "valid_for_training", "resolution", "tests", "patch", "dropped_paths",
"flags", "seconds", "timings", "digests", "output", "accepted", "fail_to_pass", "pass_to_pass"}`; `tests` maps each
expected id to its outcome, `patch` is text whose bytes are `verdict["patch"].encode("utf-8", "surrogateescape")`.
Failures of the sandbox are a status, never a reward.
"""

from __future__ import annotations

import logging
import os
import shlex
import time
from typing import Any

from anyio import to_thread

from skyenv.core import Sandbox, SandboxProvider
from skyenv.envs.swe.beginnings import ReadySandbox
from skyenv.envs.swe.environment import Environments, TaskFiles
from skyenv.envs.swe.extraction import MAX_CHANGED_BYTES, WorkTree, download_bounded, entries, read_work_tree
from skyenv.envs.swe.gitstream import two_commits
from skyenv.envs.swe.policy import Change, Policy, below
from skyenv.envs.swe.runners import Job, get_runner
from skyenv.envs.swe.sources import Tree, TreeFile, tree_to_tar
from skyenv.envs.swe.tasks import SweTask
from skyenv.envs.swe.verdict import Grade, Status, judge
from skyenv.errors import ConfigError, SandboxError, SandboxPathError

MAX_PATCH_BYTES = 4 << 20
_NOT_APPLIED = 3  # exit status of `_PREPARE`; whatever else goes wrong there is 4
GIT_SECONDS = 120.0
NOT_TESTS = (".json", ".png", ".csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".xml", ".toml")
_log = logging.getLogger(__name__)


async def grade_patch(task: SweTask, patch: bytes, provider: SandboxProvider) -> dict[str, Any]:
    """Grade a patch from anywhere: it is applied in a throw-away sandbox, and what comes of it graded like any work.

    Raises SandboxError when the throw-away sandbox fails, ConfigError and `SourceUnavailable` for the task's files.
    """
    return (await try_patch(task, patch, Environments.of(provider))).verdict()


async def try_patch(task: SweTask, patch: bytes, environments: Environments) -> Grade:
    """Grade a patch as `grade_patch` does."""
    if task.whole_machine:
        raise ConfigError(
            f"{task.task_id}: is graded on the machine as the agent leaves it; no patch says what that is"
        )
    started = time.perf_counter()
    grade = Grade(task)
    if not patch.strip():
        grade.status = "empty_patch"
    elif len(patch) > MAX_PATCH_BYTES:
        grade.status = "patch_too_large"
    else:
        async with environments.open(task) as box:
            failure = await apply_patch(box, task, patch)
            if failure is None:
                files = await environments.files(task)
                tree = await read_work_tree(box, task.repo_path, files.source)
        if failure is None:
            return await try_work_tree(task, tree, environments)
        grade.status, grade.output = failure
    grade.seconds = time.perf_counter() - started
    return grade


async def apply_patch(box: Sandbox, task: SweTask, patch: bytes) -> tuple[Status, str] | None:
    """Apply a foreign patch to the pristine checkout in `box`; returns why not, None when it applied."""
    private = _private(task)
    await box.upload(private, tree_to_tar({"foreign.patch": TreeFile(patch)}))
    result = await box.exec(_script(_APPLY_FOREIGN, task, private), timeout=GIT_SECONDS)
    if result.exit_code == 0:
        return None
    escapes = ("invalid path", "beyond a symbolic link", "outside repository", "outside of the repository")
    refused = any(phrase in result.output for phrase in escapes)
    return ("patch_rejected" if refused else "patch_apply_failed"), result.output


async def read_agent(task: SweTask, box: Sandbox, environments: Environments) -> WorkTree:
    """Read what an agent left in `box`; nothing runs in it any more afterwards."""
    files = await environments.files(task)
    return await read_work_tree(box, task.repo_path, files.source)


async def grade_work_tree(
    task: SweTask, tree: WorkTree, environments: Environments, ready: ReadySandbox | None = None
) -> dict[str, Any]:
    """Grade a work tree, in the `ready` sandbox if there is one, which stays its owner's to close.

    A sandbox that fails is replaced once; after that the status is `infra_error`.
    """
    return (await try_work_tree(task, tree, environments, ready)).verdict()


async def try_work_tree(
    task: SweTask, tree: WorkTree, environments: Environments, ready: ReadySandbox | None = None
) -> Grade:
    """Grade a work tree as `grade_work_tree` does."""
    started = time.perf_counter()
    for attempt in (1, 2):
        grade = Grade(task)
        try:
            await _grade(grade, tree, environments, ready)
            break
        except SandboxError as error:
            _log.warning("grading %s, attempt %d: %s: %s", task.task_id, attempt, type(error).__name__, error)
            grade = Grade(task, status="infra_error", flags=[type(error).__name__])
    grade.seconds = time.perf_counter() - started
    return grade


async def _grade(grade: Grade, tree: WorkTree, environments: Environments, ready: ReadySandbox | None) -> None:
    """From a work tree to a status; the empty patch is judged without running anything."""
    task = grade.task
    files = await environments.files(task)
    selection = policy_of(task, files).select(tree.changes)
    grade.dropped = tuple(sorted([*selection.dropped, *tree.specials]))
    grade.flags += [*selection.flags, *(["special_file"] if tree.specials else [])]
    if tree.missing:
        grade.status = "patch_rejected"
        grade.flags.append("no_work_tree")
    elif tree.too_large:
        grade.status = "patch_too_large"
    elif not selection.kept:
        grade.status = "empty_patch"
    else:
        await run_tests(grade, selection.kept, environments, ready)
        if grade.status == "instance_error":
            await _blame(grade, environments)


async def _blame(grade: Grade, environments: Environments) -> None:
    """Whether an instance error is the task's fault: then it shows without the patch too."""
    control = Grade(grade.task)
    await run_tests(control, (), environments)
    if control.status != "instance_error":
        by_flag: dict[str, Status] = {"runner_did_not_start": "tampered", "no_test_ran": "unresolved"}
        grade.status = next((by_flag[flag] for flag in grade.flags if flag in by_flag), "patch_rejected")


async def run_tests(
    grade: Grade, kept: tuple[Change, ...], environments: Environments, ready: ReadySandbox | None = None
) -> None:
    """Make the patch, apply it, put the graded tests over it and run them, all in one clean sandbox.

    Works for no changes too, which is how a task's failing tests are validated.
    """
    task = grade.task
    files = await environments.files(task)
    runner = get_runner(task.runner)
    job = Job(
        repo_path=task.repo_path,
        private=_private(task),
        test_files=_test_files(task, files),
        import_roots=[task.repo_path, *(f"{task.repo_path}/{root}" for root in _relative_roots(task))],
        isolated=not task.environment.packages and task.environment.image is None,
        test_command=task.command,
        parser=task.parser,
        script=task.script,
    )
    if absent := [name for name in job.test_files if name not in files.tests and name not in files.source]:
        grade.status = "instance_error"
        grade.flags.append(f"no_test_file:{absent[0]}")
        return
    started = time.perf_counter()
    async with environments.open(task) if ready is None else ready.open() as box:
        opened = time.perf_counter()
        if not await _prepare(grade, kept, job, files, box):
            return
        prepared = time.perf_counter()
        command = f"cd {shlex.quote(task.repo_path)} && {runner.command(job)}"
        result = await box.exec(command, timeout=task.timeout, max_output_bytes=runner.max_output_bytes)
        judge(grade, job, result, await runner.report(job, box, result))
        ended = time.perf_counter()
        grade.timings = {"start": opened - started, "prepare": prepared - opened, "tests": ended - prepared}
        if grade.status == "resolved" and await tests_changed(box, task, files):
            grade.status = "tampered"
            grade.flags.append("test_files_changed")


async def _prepare(grade: Grade, kept: tuple[Change, ...], job: Job, files: TaskFiles, box: Sandbox) -> bool:
    """Make the patch, apply it and put the graded tests over it; False when that settles the grade."""
    packed = await to_thread.run_sync(tree_to_tar, _private_files(job, grade, kept, files))
    await box.upload(job.private, packed)
    prepared = await box.exec(_script(_PREPARE, grade.task, job.private), timeout=GIT_SECONDS)
    grade.output = prepared.output
    if prepared.exit_code:
        grade.status = "patch_apply_failed" if prepared.exit_code == _NOT_APPLIED else "instance_error"
        return False
    grade.patch = await box.read_file(f"{job.private}/patch", max_bytes=MAX_PATCH_BYTES + 1)
    if len(grade.patch) > MAX_PATCH_BYTES:
        grade.status, grade.patch = "patch_too_large", b""
        return False
    return True


async def tests_changed(box: Sandbox, task: SweTask, files: TaskFiles) -> bool:
    """Whether a test file differs from what was put there: code under test may have written to it before its import."""
    await box.kill_processes()
    policy = policy_of(task, files)
    loose = policy.allowed.difference(files.tests).union(files.removed)
    pristine = {path: file for path, file in {**files.source, **files.tests}.items() if path not in loose}
    for root in policy.test_roots():
        expected = {path: file.data for path, file in pristine.items() if below(path, root)}
        if not expected:
            continue
        try:
            if root in expected:
                size = len(expected[root])
                found = {root: await box.read_file(f"{task.repo_path}/{root}", max_bytes=size + 1)}
            else:
                archive = await download_bounded(box, f"{task.repo_path}/{root}", MAX_CHANGED_BYTES)
                listed = await to_thread.run_sync(lambda archive: list(entries(archive)), archive)
                found = {f"{root}/{path}": file.data for path, file in listed if file is not None}
        except SandboxPathError:
            return True
        if any(found.get(path) != data for path, data in expected.items()):
            return True
    return False


def policy_of(task: SweTask, files: TaskFiles) -> Policy:
    """What the agent of a task may change."""
    allowed = frozenset(task.record.allow) if task.record is not None else frozenset()
    graded = {**files.tests, **dict.fromkeys(files.removed, TreeFile(b""))}
    return Policy(files.source, graded, get_runner(task.runner).modules, _relative_roots(task), allowed)


def _private(task: SweTask) -> str:
    """A directory beside the checkout, the same for every run; secrets are in its files, not in its name."""
    return f"{task.repo_path}.skyenv"


def _relative_roots(task: SweTask) -> tuple[str, ...]:
    """Directories of the checkout that the task's `PYTHONPATH` names, relative to it."""
    top = task.repo_path + "/"
    entries = task.environment.env.get("PYTHONPATH", "").split(":")
    return tuple(entry.removeprefix(top) for entry in entries if entry.startswith(top))


def _test_files(task: SweTask, files: TaskFiles) -> list[str]:
    """What to run: what the task says, the files of exact ids in their order, or all graded files that hold tests."""
    if task.test_files:
        return list(task.test_files)
    if not task.parser and all("::" in test for test in task.expected):
        return list(dict.fromkeys(test.split("::")[0] for test in task.expected))
    return [path for path in files.tests if not path.lower().endswith(NOT_TESTS)]


def _private_files(job: Job, grade: Grade, kept: tuple[Change, ...], files: TaskFiles) -> Tree:
    runner = get_runner(grade.task.runner)
    ours = {
        **{f"tests/{path}": data for path, data in runner.checkout_files(job).items()},
        **runner.private_files(job),
        "attributes": b"* !text -filter !eol -ident -working-tree-encoding !diff !merge\n",
        "stream": two_commits(kept),
        "removed": b"".join(os.fsencode(path) + b"\0" for path in files.removed),
    }
    overlay = {f"tests/{path}": file for path, file in files.tests.items()}
    return {**overlay, **{path: TreeFile(data) for path, data in ours.items()}}


def _script(template: str, task: SweTask, private: str) -> str:
    """A script in a subshell, so that the session that runs the tests inherits nothing of it."""
    return f"(W={shlex.quote(private)}; R={shlex.quote(task.repo_path)}\n{_TRUSTED_GIT}{template})"


_TRUSTED_GIT = """export GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null GIT_ATTR_NOSYSTEM=1 GIT_TEMPLATE_DIR=
export LC_ALL=C GIT_DIR="$W/git" GIT_WORK_TREE="$R"
git -c init.defaultBranch=main init -q && mkdir -p "$W/git/info" || exit 4
"""

_PREPARE = """mv "$W/attributes" "$W/git/info/attributes" && git fast-import --quiet < "$W/stream" || exit 4
git diff-tree -r -p --binary --full-index --no-renames --no-ext-diff --no-textconv --no-color \
refs/heads/old refs/heads/new > "$W/patch" || exit 4
cd "$R" || exit 4
[ ! -s "$W/patch" ] || git apply --whitespace=nowarn "$W/patch" || exit 3
xargs -0 -r rm -rf -- < "$W/removed" && rm "$W/removed" || exit 4
[ ! -d "$W/tests" ] || cp -RP "$W/tests/." "$R/" && rm -rf "$W/tests" "$W/stream" "$W/git" || exit 4
"""

_APPLY_FOREIGN = """cd "$R" && git apply --whitespace=nowarn "$W/foreign.patch" && exit 0
git add -A -f . && git apply --3way --whitespace=nowarn "$W/foreign.patch"
"""
