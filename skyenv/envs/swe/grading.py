"""Grading: an agent's changes become a patch and a verdict, both made in a clean sandbox the agent never touched.

One path for all work: the kept changes are written as two commits into a git directory that lies outside the checkout
and has neither configuration, hooks, filters nor attributes; their difference is the patch; the patch is applied to a
pristine checkout; graded tests are put over it; the runner runs once. Content is bytes and file names are data all the
way. What the patch cannot touch is decided in `policy`, how tests are observed in `runners`.

Verdict: `{"status", "resolved", "reward", "valid_for_training", "tests", "patch", "dropped_paths", "flags", "seconds",
"fail_to_pass", "pass_to_pass"}`; `tests` maps each expected id to its outcome, `patch` is text whose bytes are
`verdict["patch"].encode("utf-8", "surrogateescape")`. Failures of the sandbox are a status, never a reward.
"""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from anyio import to_thread

from skyenv.core import Sandbox, SandboxProvider
from skyenv.envs.swe.environment import Environments, TaskFiles
from skyenv.envs.swe.extraction import MAX_CHANGED_BYTES, WorkTree, download_bounded, entries, read_work_tree
from skyenv.envs.swe.gitstream import two_commits
from skyenv.envs.swe.policy import Change, Policy, below
from skyenv.envs.swe.runners import Job, Report, get_runner, parse_events
from skyenv.envs.swe.sources import Tree, TreeFile, tree_to_tar
from skyenv.envs.swe.tasks import SweTask
from skyenv.errors import SandboxError, SandboxPathError
from skyenv.types import ExecResult

Status = Literal[
    "resolved", "unresolved", "empty_patch", "patch_apply_failed", "patch_rejected", "patch_too_large", "tampered",
    "timeout", "oom", "instance_error", "infra_error",
]  # fmt: skip
INVALID = frozenset({"instance_error", "infra_error"})
MAX_PATCH_BYTES = 4 << 20
MAX_EVENT_BYTES = 16 << 20
MAX_OUTPUT_BYTES = 64 << 10
_NOT_APPLIED = 3  # exit status of `_PREPARE`; whatever else goes wrong there is 4
GIT_SECONDS = 120.0
_SHOWN_PATHS = 200
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Grade:
    """A verdict in the making; `output` is what the tests printed, head and tail."""

    task: SweTask
    status: Status = "unresolved"
    patch: bytes = b""
    tests: Mapping[str, str] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    flags: list[str] = field(default_factory=list)
    seconds: float = 0.0
    output: str = ""

    def verdict(self) -> dict[str, Any]:
        """The grade as plain data."""
        resolved = self.status == "resolved"
        return {
            "status": self.status,
            "resolved": resolved,
            "reward": float(resolved),
            "valid_for_training": self.status not in INVALID,
            "tests": {test: self.tests.get(test, "missing") for test in self.task.expected} if self.tests else {},
            "patch": self.patch.decode("utf-8", "surrogateescape"),
            "dropped_paths": list(self.dropped[:_SHOWN_PATHS]),
            "flags": list(self.flags),
            "seconds": round(self.seconds, 4),
            "fail_to_pass": list(self.task.fail_to_pass),
            "pass_to_pass": list(self.task.pass_to_pass),
        }


async def grade_patch(task: SweTask, patch: bytes, provider: SandboxProvider) -> dict[str, Any]:
    """Grade a patch from anywhere: it is applied in a throw-away sandbox, and what comes of it graded like any work.

    Raises SandboxError when the throw-away sandbox fails, ConfigError and `SourceUnavailable` for the task's files.
    """
    environments = Environments.of(provider)
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
            return await grade_work_tree(task, tree, environments)
        grade.status, grade.output = failure
    grade.seconds = time.perf_counter() - started
    return grade.verdict()


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


async def grade_work_tree(task: SweTask, tree: WorkTree, environments: Environments) -> dict[str, Any]:
    """Grade a work tree. A sandbox that fails is replaced once; after that the status is `infra_error`."""
    started = time.perf_counter()
    for attempt in (1, 2):
        grade = Grade(task)
        try:
            await _grade(grade, tree, environments)
            break
        except SandboxError as error:
            _log.warning("grading %s, attempt %d: %s: %s", task.task_id, attempt, type(error).__name__, error)
            grade = Grade(task, status="infra_error", flags=[type(error).__name__])
    grade.seconds = time.perf_counter() - started
    return grade.verdict()


async def _grade(grade: Grade, tree: WorkTree, environments: Environments) -> None:
    """From a work tree to a status; the empty patch is judged without running anything."""
    task = grade.task
    files = await environments.files(task)
    runner = get_runner(task.runner)
    policy = Policy(files.source, files.tests, runner.modules, _relative_roots(task))
    selection = policy.select(tree.changes)
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
        await run_tests(grade, selection.kept, environments)
        if grade.status == "instance_error":
            await _blame(grade, environments)


async def _blame(grade: Grade, environments: Environments) -> None:
    """Whether an instance error is the task's fault: then it shows without the patch too."""
    control = Grade(grade.task)
    await run_tests(control, (), environments)
    if control.status != "instance_error":
        grade.status = "tampered" if "runner_did_not_start" in grade.flags else "patch_rejected"


async def run_tests(grade: Grade, kept: tuple[Change, ...], environments: Environments) -> None:
    """Make the patch, apply it, put the graded tests over it and run them, all in one clean sandbox.

    Works for no changes too, which is how a task's failing tests are validated.
    """
    task = grade.task
    files = await environments.files(task)
    if absent := [name for name in _test_files(task) if name not in files.tests and name not in files.source]:
        grade.status = "instance_error"
        grade.flags.append(f"no_test_file:{absent[0]}")
        return
    job = Job(
        repo_path=task.repo_path,
        private=_private(task),
        test_files=_test_files(task),
        import_roots=[task.repo_path, *(f"{task.repo_path}/{root}" for root in _relative_roots(task))],
        isolated=not task.environment.packages and task.environment.image is None,
    )
    async with environments.open(task) as box:
        private = await to_thread.run_sync(tree_to_tar, _private_files(job, grade, kept, files.tests))
        await box.upload(job.private, private)
        prepared = await box.exec(_script(_PREPARE, task, job.private), timeout=GIT_SECONDS)
        grade.output = prepared.output
        if prepared.exit_code:
            grade.status = "patch_apply_failed" if prepared.exit_code == _NOT_APPLIED else "instance_error"
            return
        grade.patch = await box.read_file(f"{job.private}/patch", max_bytes=MAX_PATCH_BYTES + 1)
        if len(grade.patch) > MAX_PATCH_BYTES:
            grade.status, grade.patch = "patch_too_large", b""
            return
        command = f"cd {shlex.quote(task.repo_path)} && {get_runner(task.runner).command(job)}"
        result = await box.exec(command, timeout=task.timeout, max_output_bytes=MAX_OUTPUT_BYTES)
        _judge(grade, job, result, await _read_events(box, job))
        if grade.status == "resolved" and await tests_changed(box, task, files):
            grade.status = "tampered"
            grade.flags.append("test_files_changed")


async def tests_changed(box: Sandbox, task: SweTask, files: TaskFiles) -> bool:
    """Whether a test file differs from what was put there: code under test may have written to it before its import."""
    await box.kill_processes()
    policy = Policy(files.source, files.tests, frozenset())
    for root in policy.test_roots():
        expected = {path: file.data for path, file in {**files.source, **files.tests}.items() if below(path, root)}
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


async def _read_events(box: Sandbox, job: Job) -> Report:
    try:
        events = await box.read_file(f"{job.private}/events", max_bytes=MAX_EVENT_BYTES)
    except SandboxPathError:
        events = b""
    return await to_thread.run_sync(parse_events, events, job.nonce)


def _judge(grade: Grade, job: Job, result: ExecResult, report: Report) -> None:
    """The rules, in order: limits first, then whether the runner can be believed, then the tests."""
    grade.output = result.output
    grade.tests = {test: outcome for test, outcome in report.outcomes.items() if not job.canary.owns(test)}
    if result.timed_out:
        grade.status = "timeout"
    elif result.oom:
        grade.status = "oom"
    elif report.forged:
        grade.status = "tampered"
        grade.flags.append("forged_events")
    elif not report.started:
        grade.status = "instance_error"
        grade.flags.append("runner_did_not_start")
    elif report.exit_status is None or report.exit_status > 1:
        grade.flags.append("tests_did_not_finish")
    elif not job.canary.sings(report.outcomes) or report.exit_status != 1:
        grade.status = "tampered"
        grade.flags.append("canary")
    elif result.exit_code != report.exit_status:
        grade.status = "tampered" if result.exit_code == 0 else "unresolved"
        grade.flags.append("exit_status")
    elif all(grade.tests.get(test) == "passed" for test in grade.task.expected):
        grade.status = "resolved"


def _private(task: SweTask) -> str:
    """A directory beside the checkout, the same for every run; secrets are in its files, not in its name."""
    return f"{task.repo_path}.skyenv"


def _relative_roots(task: SweTask) -> tuple[str, ...]:
    """Directories of the checkout that the task's `PYTHONPATH` names, relative to it."""
    top = task.repo_path + "/"
    entries = task.environment.env.get("PYTHONPATH", "").split(":")
    return tuple(entry.removeprefix(top) for entry in entries if entry.startswith(top))


def _test_files(task: SweTask) -> list[str]:
    """The files of the expected tests, in the order in which they are first named."""
    return list(dict.fromkeys(test.split("::")[0] for test in task.expected))


def _private_files(job: Job, grade: Grade, kept: tuple[Change, ...], tests: Tree) -> Tree:
    runner = get_runner(grade.task.runner)
    ours = {
        **{f"tests/{path}": data for path, data in runner.checkout_files(job).items()},
        **runner.private_files(job),
        "attributes": b"* !text -filter !eol -ident -working-tree-encoding !diff !merge\n",
        "stream": two_commits(kept),
    }
    overlay = {f"tests/{path}": file for path, file in tests.items()}
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
[ ! -d "$W/tests" ] || cp -RP "$W/tests/." "$R/" && rm -rf "$W/tests" "$W/stream" "$W/git" || exit 4
"""

_APPLY_FOREIGN = """cd "$R" && git apply --whitespace=nowarn "$W/foreign.patch" && exit 0
git add -A -f . && git apply --3way --whitespace=nowarn "$W/foreign.patch"
"""
