"""Which changes of an agent count: what could bend the grading, or merely fell out of a run, is dropped.

Dropped paths stay as the pristine source has them: test roots and graded test files, files that configure or extend
the test runner, files that Python runs at start-up, modules that would take the place of the runner's or the standard
library's, caches, and paths that no patch may carry. The rest is kept; whether it is any good is for the tests to say.
"""

from __future__ import annotations

import configparser
import os
import posixpath
import stat
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from skyenv.envs.swe.sources import Tree, TreeFile
from skyenv.envs.swe.trees import CACHE_NAMES

_CACHE_SUFFIXES = (".pyc", ".pyo")
_TEST_ROOTS = frozenset({"test", "tests", "testing", "unittests"})
_RUNNER_FILES = frozenset({"conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini"})
_START_UP = frozenset({"sitecustomize.py", "usercustomize.py"})
_INSTALLED = (".pth", ".egg-link")
_METADATA = (".dist-info", ".egg-info")
_MODULES = (".py", ".pyc", ".so")
_IMPORT_ROOTS = ("", "src", "lib")


@dataclass(frozen=True, slots=True)
class Change:
    """One path that differs; `old` None when it was added, `new` None when it was deleted."""

    path: str
    old: TreeFile | None
    new: TreeFile | None


@dataclass(frozen=True, slots=True)
class Selection:
    """What is left of the agent's changes, and what was dropped and why."""

    kept: tuple[Change, ...]
    dropped: tuple[str, ...]
    flags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules for one task: its pristine files, its graded test files and the modules of its runner.

    `import_roots` are directories of the checkout that stand on the module search path; `allowed` are paths that count
    although they are protected, because the task cannot be solved otherwise; graded test files are not among them.
    """

    base: Tree
    tests: Tree
    runner_modules: frozenset[str]
    import_roots: tuple[str, ...] = ()
    allowed: frozenset[str] = frozenset()

    def select(self, changes: Iterable[Change]) -> Selection:
        """Part the changes; flags name the kinds of dropped paths other than caches."""
        kept, dropped, flags = [], [], set()
        roots = self.test_roots()
        for change in changes:
            reason = self._reason(change, roots)
            if reason is None:
                kept.append(change)
            else:
                dropped.append(change.path)
                flags.add(reason)
        return Selection(tuple(kept), tuple(dropped), tuple(sorted(flags - {"cache"})))

    def test_roots(self) -> frozenset[str]:
        """For each graded file the highest directory above it that is one for tests, else the file itself."""
        roots = set()
        for path in self.tests:
            parts = path.split("/")
            named = [number for number, part in enumerate(parts[:-1]) if part in _TEST_ROOTS]
            roots.add("/".join(parts[: named[0] + 1]) if named else path)
        return frozenset(roots)

    def _reason(self, change: Change, test_roots: frozenset[str]) -> str | None:
        path, parts = change.path, change.path.split("/")
        if unsafe(path, change.new):
            return "unsafe_path"
        if is_cache(path):
            return "cache"
        if path in self.allowed and path not in self.tests:
            return None
        if any(below(path, root) or below(root, path) for root in test_roots):
            return "test_file"
        if parts[-1] in _RUNNER_FILES or (parts[-1] in ("pyproject.toml", "setup.cfg") and _changes_runner(change)):
            return "runner_config"
        if parts[-1] in _START_UP or parts[-1].endswith(_INSTALLED):
            return "start_up_file"
        if any(part.endswith(_METADATA) for part in parts):
            return "package_metadata"
        return "shadowing_module" if self._shadows(path) else None

    def _shadows(self, path: str) -> bool:
        """Whether `path` adds a module that would be imported in place of the runner's or the standard library's.

        Modules that the project has already are its own.
        """
        for root in {*_IMPORT_ROOTS, *self.import_roots}:
            if root and not path.startswith(root + "/"):
                continue
            first, *rest = path.removeprefix(root).lstrip("/").split("/")
            is_package = len(rest) == 1 and rest[0].startswith("__init__.")
            if (
                path.endswith(_MODULES)
                and (not rest or is_package)
                and first.split(".")[0] in self.runner_modules | sys.stdlib_module_names
            ):
                own = posixpath.join(root, first)
                return not any(below(known, own) for known in self.base)
        return False


def is_cache(path: str) -> bool:
    """Whether a path is what running the project leaves behind."""
    return path.endswith(_CACHE_SUFFIXES) or any(part in CACHE_NAMES for part in path.split("/"))


def unsafe(path: str, file: TreeFile | None) -> bool:
    """Whether no patch may carry this: parts named like git's own, links that leave the tree or may do so."""
    parts = path.split("/")
    if any(part in ("", ".", "..") or part.lower() in (".git", "git~1") for part in parts):
        return True
    if file is None or not stat.S_ISLNK(file.mode):
        return False
    target = os.fsdecode(file.data)
    resolved = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    return target.startswith("/") or resolved.split("/")[0] == ".." or parts[-1] in (".gitmodules", ".gitattributes")


def below(path: str, root: str) -> bool:
    """Whether `path` is `root` or lies in it."""
    return path == root or path.startswith(root + "/")


def _changes_runner(change: Change) -> bool:
    """Whether a file that also holds build data differs in a section of the test runner, or cannot be read."""
    read = _pyproject if change.path.endswith(".toml") else _setup_cfg
    try:
        return read(change.old) != read(change.new)
    except (ValueError, configparser.Error, RecursionError):
        return True


def _pyproject(file: TreeFile | None) -> object:
    if file is None:
        return None
    tool: Any = tomllib.loads(file.data.decode()).get("tool")
    return tool.get("pytest") if isinstance(tool, Mapping) else None


def _setup_cfg(file: TreeFile | None) -> object:
    if file is None:
        return None
    parser = configparser.RawConfigParser(strict=False)
    parser.read_string(file.data.decode())
    return {name: dict(parser[name]) for name in parser.sections() if "pytest" in name} or None
