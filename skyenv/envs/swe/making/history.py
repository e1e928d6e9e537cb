"""Tasks from a repository's history: commits that change code together with tests that were failing before them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from anyio import to_thread

from skyenv.envs.swe.making.candidates import (
    Admission,
    Admitted,
    Candidate,
    Refusal,
    Testing,
    test_files_of,
    test_roots,
)
from skyenv.envs.swe.making.mutating import code_files
from skyenv.envs.swe.sources import GitSource, default_cache, fetch_tree
from skyenv.envs.swe.trees import git
from skyenv.errors import SourceUnavailable

CLONE_SECONDS = 900.0
_TRAILER = re.compile(r"^(Signed-off-by|Co-authored-by|Reviewed-by|Change-Id|Closes|Fixes|Refs?):.*$", re.I | re.M)
_MAX_CODE_FILES = 8


@dataclass(frozen=True, slots=True)
class HistoryPlan:
    """Which repository (`url` may be a local path), how many tasks at most, how many commits to look at.

    Ids in `known` count as made and are not made again.
    """

    name: str
    url: str
    count: int
    commits: int = 200
    branch: str = "HEAD"
    testing: Testing = field(default_factory=Testing)
    known: frozenset[str] = frozenset()

    def task_id(self, commit: str) -> str:
        """The id of the task of a commit."""
        return f"{self.name}-{commit[:12]}"


@dataclass(frozen=True, slots=True)
class Commit:
    """One commit with a single parent: its message, and the paths it changes."""

    commit: str
    parent: str
    message: str
    paths: tuple[str, ...]


async def history_tasks(plan: HistoryPlan, admission: Admission) -> AsyncGenerator[Admitted | Refusal, None]:
    """Rows that passed admission, newest commit first, and refusals of commits that looked like one.

    SourceUnavailable when the repository cannot be cloned.
    """
    made = 0
    for commit in await to_thread.run_sync(partial(read_history, plan.url, plan.branch, plan.commits)):
        if made == plan.count:
            return
        if plan.task_id(commit.commit) in plan.known:
            made += 1
            continue
        result = await _try(plan, commit, admission)
        if result is not None:
            made += not isinstance(result, Refusal)
            yield result


async def _try(plan: HistoryPlan, commit: Commit, admission: Admission) -> Admitted | Refusal | None:
    """None for a commit that does not even look like a fix with tests."""
    tree = await fetch_tree(GitSource(plan.url, commit.commit), base=Path(), cache=default_cache())
    all_tests = test_files_of(tree, plan.testing.tests)
    tests = [path for path in all_tests if path in commit.paths]
    code = [path for path in code_files(tree, all_tests, ()) if path in commit.paths]
    if not tests or not code or len(code) > _MAX_CODE_FILES:
        return None
    old, new = ({"url": plan.url, "commit": name} for name in (commit.parent, commit.commit))
    graded = {"git": {**new, "paths": list(plan.testing.tests or test_roots(tests))}}
    row = plan.testing.row(plan.task_id(commit.commit), {"git": old}, graded)
    row["reference"] = {"git": {**new, "paths": code}}
    candidate = Candidate(row, {"title": _without_trailers(commit.message)})
    return await admission.admit_change(candidate, {"git": new}, tests)


def read_history(url: str, branch: str, commits: int) -> list[Commit]:
    """The last commits of a branch that have one parent, newest first. Blocks; nothing of the clone is kept."""
    with tempfile.TemporaryDirectory(prefix="skyenv-history-") as scratch:
        clone = Path(scratch) / "clone"
        command = ["clone", "--quiet", "--bare", "--no-tags", f"--depth={commits + 1}", "--", _address(url), str(clone)]
        try:
            git(command, Path(scratch), timeout=CLONE_SECONDS)
        except subprocess.CalledProcessError as error:
            detail = error.stderr.decode(errors="replace").strip()[-400:]
            raise SourceUnavailable(f"{url} cannot be cloned: {detail}") from error
        form = "--format=%x01%H%x00%P%x00%B%x00"
        log = git(["log", "--no-merges", f"--max-count={commits}", form, "--name-only", "-z", branch, "--"], clone)
        return list(_parse_log(log))


def _address(url: str) -> str:
    """A shallow clone needs an address; git ignores the depth for plain paths."""
    return url if "://" in url or ("@" in url and ":" in url) else f"file://{Path(url).resolve()}"


def _parse_log(log: bytes) -> Iterator[Commit]:
    for entry in log.decode(errors="surrogateescape").split("\x01")[1:]:
        commit, parents, message, *paths = entry.split("\0")
        if len(parents.split()) == 1:
            names = tuple(path.removeprefix("\n") for path in paths if path.strip())
            yield Commit(commit, parents, message.strip(), names)


def _without_trailers(message: str) -> str:
    return _TRAILER.sub("", message).strip()
