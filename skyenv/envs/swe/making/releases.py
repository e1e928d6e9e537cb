"""Tasks from two releases of a package: the older code, and the newer release's tests and fixes as the answer."""

from __future__ import annotations

import difflib
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
from skyenv.envs.swe.sdists import sdist_digest
from skyenv.envs.swe.sources import PypiSource, Tree, default_cache, fetch_tree
from skyenv.errors import ConfigError

_CHANGE_LOGS = ("changelog", "changes", "history", "news", "releases")
_MAX_CHANGES = 1500


@dataclass(frozen=True, slots=True)
class ReleasePair:
    """Two releases of a package of the index, and how the newer one's tests run."""

    name: str
    old: str
    new: str
    testing: Testing = field(default_factory=Testing)

    @property
    def task_id(self) -> str:
        """The id of its task."""
        return f"{self.name}-{self.new}"


async def release_task(pair: ReleasePair, admission: Admission) -> Admitted | Refusal:
    """The row of a pair that passed admission, or why it is refused. ConfigError for a release that is not there."""
    testing, task_id = pair.testing, pair.task_id
    old, old_tree = await _release(pair.name, pair.old)
    new, new_tree = await _release(pair.name, pair.new)
    tests = test_files_of(new_tree, testing.tests)
    if not tests:
        raise ConfigError(f"tests: {pair.name} {pair.new} ships no test files there; pass --tests")
    changed = changed_code(old_tree, new_tree, tests)
    if not changed:
        return Refusal(task_id, "no Python file of the package differs between the two releases")
    row = testing.row(task_id, {"pypi": old}, {"pypi": {**new, "paths": list(testing.tests or test_roots(tests))}})
    row["reference"] = {"pypi": {**new, "paths": changed}}
    facts = {
        "title": f"`{pair.name}` {pair.old} does not behave as it should.",
        "changes": change_log(old_tree, new_tree),
    }
    return await admission.admit_change(Candidate(row, facts), {"pypi": new}, tests)


async def _release(name: str, version: str) -> tuple[dict[str, str], Tree]:
    digest = await to_thread.run_sync(partial(sdist_digest, name, version))
    tree = await fetch_tree(PypiSource(name, version, digest), base=Path(), cache=default_cache())
    return {"name": name, "version": version, "sha256": digest}, tree


def changed_code(old: Tree, new: Tree, tests: list[str]) -> list[str]:
    """Python files of the newer release's own code that are new or different there."""
    return [path for path, data in code_files(new, tests, ()).items() if path not in old or old[path].data != data]


def change_log(old: Tree, new: Tree) -> str:
    """What the newer release's change log says that the older one's did not; empty when there is none."""
    for path in sorted(new):
        name = path.rpartition("/")[2].lower()
        if name.partition(".")[0] in _CHANGE_LOGS and "/" not in path:
            before = old[path].data.decode(errors="replace").splitlines() if path in old else []
            after = new[path].data.decode(errors="replace").splitlines()
            added = [line[2:] for line in difflib.ndiff(before, after) if line.startswith("+ ")]
            return "\n".join(added).strip()[:_MAX_CHANGES]
    return ""
