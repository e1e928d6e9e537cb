"""Repair tasks as data: rows of a file, or one folder a task, read into `SweTask` without fetching anything.

A row is checked in full when it is read and every ConfigError names file, row and field. A task without failing tests
is refused. Nothing here is ever shown to an agent but `problem`.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from skyenv.envs.swe.sources import Source, parse_source
from skyenv.errors import ConfigError, did_you_mean

RunnerName = Literal["unittest", "pytest"]
NAMED_SETS = ("builtin", "pypi")
_DATA = Path(__file__).parent / "data"
_SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True)
class Environment:
    """What a task needs beside its files: the same for all tasks of one project, and prepared once.

    `packages` are requirements put into a virtual environment, `setup` shell commands that run as root before any
    source is there, `env` variables of every session, `image` a container image (None: the host's system
    directories), `python` the interpreter to make the virtual environment with.
    """

    packages: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    image: str | None = None
    python: str | None = None

    @property
    def key(self) -> str:
        """Digest of what makes a prepared sandbox different from another; variables matter to set-up commands only."""
        variables = sorted(self.env.items()) if self.setup else []
        parts = [sorted(self.packages), self.setup, variables, self.image, self.python]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class SourceFiles:
    """Files of a source, placed at their own paths; `paths` (files or directories) cuts it down, empty means all."""

    source: Source
    paths: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PatchText:
    """A patch given in full."""

    patch: bytes


@dataclass(frozen=True, slots=True)
class PatchFile:
    """A patch in a file; a relative path is below the task's `base`."""

    path: str


@dataclass(frozen=True, slots=True)
class Fix:
    """The known fix of a small task as one replacement: `old` occurs once in `path` and becomes `new`."""

    path: str
    old: str
    new: str


Reference = PatchText | PatchFile | SourceFiles
"""The known fix: a patch, or the files of a later release that replace those of the source."""


@dataclass(frozen=True, slots=True, eq=False)
class SweTask:
    """One repository to repair. Compared by identity; `base` is where relative paths of its row start.

    `fix` and `decoys` (wrong replacements for `fix.old`) are there for scripted solvers; no agent is told of them.
    Test ids are `path::Class::method` for both runners, as pytest writes them.
    """

    task_id: str
    problem: str
    source: Source
    tests: SourceFiles
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...] = ()
    runner: RunnerName = "unittest"
    environment: Environment = field(default_factory=Environment)
    reference: Reference | None = None
    level: int = 1
    timeout: float = 60.0
    repo_path: str = "/testbed"
    base: Path = field(default_factory=Path)
    fix: Fix | None = None
    decoys: tuple[str, ...] = ()

    @property
    def expected(self) -> tuple[str, ...]:
        """Ids of all tests that must pass for the task to be resolved."""
        return self.fail_to_pass + self.pass_to_pass


TaskSet = str | Path | Sequence["SweTask | str | Mapping[str, Any]"]
"""A set's name (`builtin`, `pypi`), a file, a folder, or a sequence of tasks, rows and ids of the named sets."""


def load_tasks(tasks: TaskSet) -> list[SweTask]:
    """Read a task set, fetch nothing. ConfigError for a broken row, a doubled id, an unknown name, an empty set."""
    found = list(_load(tasks))
    if not found:
        raise ConfigError(f"tasks: {tasks!r} holds no task")
    seen: set[str] = set()
    for task in found:
        if task.task_id in seen:
            raise ConfigError(f"tasks: task_id {task.task_id!r} occurs twice; ids must be unique within a set")
        seen.add(task.task_id)
    return found


def _load(tasks: TaskSet) -> Iterator[SweTask]:
    if isinstance(tasks, str | Path):
        yield from _named(str(tasks)) if str(tasks) in NAMED_SETS else _read_path(Path(tasks))
        return
    for number, item in enumerate(tasks, 1):
        if isinstance(item, SweTask):
            yield item
        elif isinstance(item, str):
            yield _by_id(item)
        else:
            yield parse_task(item, f"tasks[{number - 1}]", Path.cwd())


@functools.cache
def _named(name: str) -> tuple[SweTask, ...]:
    """The sets that ship with the package never change while it runs."""
    return tuple(_read_path(_DATA / ("builtin" if name == "builtin" else f"{name}.yaml")))


def _by_id(task_id: str) -> SweTask:
    known = [task for name in NAMED_SETS for task in _named(name)]
    for task in known:
        if task.task_id == task_id:
            return task
    hint = did_you_mean(task_id, (task.task_id for task in known))
    raise ConfigError(f"tasks: no task {task_id!r} in the sets {', '.join(NAMED_SETS)}{hint}")


def _read_path(path: Path) -> Iterator[SweTask]:
    if path.is_dir():
        files = sorted(path.glob("*/task.yaml"))
        if not files:
            raise ConfigError(f"tasks: no folder of {path} holds a task.yaml")
        for file in files:
            yield parse_task(_parse_text(file, file.read_text("utf-8")), str(file), file.parent)
    elif path.is_file():
        content = _content(path)
        if isinstance(content, Mapping) and "ids" in content:
            yield from _selection(content, path)
        else:
            for number, row in enumerate(_rows(content, path), 1):
                yield parse_task(row, f"{path}: row {number}", path.parent)
    else:
        known, hint = ", ".join(NAMED_SETS), did_you_mean(str(path), NAMED_SETS)
        raise ConfigError(f"tasks: {str(path)!r} is neither a set ({known}) nor a file or folder{hint}")


def _selection(content: Mapping[str, Any], path: Path) -> Iterator[SweTask]:
    """Tasks of another set by id: `{"tasks": a set's name or path, "ids": [...]}`, further keys are remarks."""
    origin = _text(content.get("tasks"), f"{path}: tasks")
    ids = _texts(content["ids"], f"{path}: ids")
    place = path.parent / origin
    known = {
        task.task_id: task for task in _load(str(place) if place.exists() and origin not in NAMED_SETS else origin)
    }
    for task_id in ids:
        if task_id not in known:
            raise ConfigError(f"{path}: ids: {origin} has no task {task_id!r}{did_you_mean(task_id, known)}")
        yield known[task_id]


def _content(path: Path) -> object:
    text = path.read_text("utf-8")
    if path.suffix == ".jsonl":
        lines = enumerate(text.splitlines(), 1)
        return [_parse_json(line, f"{path}: line {number}") for number, line in lines if line.strip()]
    return _parse_json(text, str(path)) if path.suffix == ".json" else _parse_text(path, text)


def _rows(content: object, path: Path) -> list[object]:
    if not isinstance(content, list):
        raise ConfigError(f"{path}: must be a list of task rows, or a mapping with `tasks` and `ids`")
    return content


def _parse_json(text: str, where: str) -> object:
    try:
        value: object = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where}: not valid JSON: {error}") from error
    return value


def _parse_text(path: Path, text: str) -> object:
    try:
        value: object = yaml.load(text, Loader=_SafeLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    return value


_FIELDS = (
    "task_id", "problem", "source", "environment", "runner", "tests", "fail_to_pass", "pass_to_pass",
    "reference", "level", "timeout", "repo_path", "fix", "decoys",
)  # fmt: skip


def parse_task(row: object, where: str, base: Path) -> SweTask:
    """Read one row; `where` names file and row in every ConfigError, relative paths are below `base`."""
    fields = _mapping(row, where, _FIELDS, required=("task_id", "problem", "source", "tests", "fail_to_pass"))
    task_id = _matching(fields["task_id"], f"{where}: task_id", r"[A-Za-z0-9][A-Za-z0-9._-]*", "letters, digits, . _ -")
    at = f"{where} ({task_id})"
    failing = _ids(fields["fail_to_pass"], f"{at}: fail_to_pass")
    if not failing:
        raise ConfigError(f"{at}: fail_to_pass: is empty; name at least one test that the fix must turn")
    passing = _ids(fields.get("pass_to_pass", []), f"{at}: pass_to_pass")
    if both := set(failing) & set(passing):
        raise ConfigError(f"{at}: pass_to_pass: {min(both)!r} is in fail_to_pass too")
    runner = fields.get("runner", "unittest")
    if runner not in ("unittest", "pytest"):
        raise ConfigError(f"{at}: runner: {runner!r} is not one of unittest, pytest")
    return SweTask(
        task_id=task_id,
        problem=_text(fields["problem"], f"{at}: problem"),
        source=parse_source(fields["source"], f"{at}: source"),
        tests=_parse_files(fields["tests"], f"{at}: tests"),
        fail_to_pass=failing,
        pass_to_pass=passing,
        runner=runner,
        environment=_parse_environment(fields.get("environment", {}), f"{at}: environment"),
        reference=_parse_reference(fields["reference"], f"{at}: reference") if "reference" in fields else None,
        level=int(_number(fields.get("level", 1), f"{at}: level", 1, 4)),
        timeout=_number(fields.get("timeout", 60.0), f"{at}: timeout", 0.1, 7200),
        repo_path=_repo_path(fields.get("repo_path", "/testbed"), f"{at}: repo_path"),
        base=base,
        fix=_parse_fix(fields["fix"], f"{at}: fix") if "fix" in fields else None,
        decoys=_texts(fields.get("decoys", []), f"{at}: decoys"),
    )


def _parse_environment(value: object, where: str) -> Environment:
    fields = _mapping(value, where, ("packages", "setup", "env", "image", "python"))
    env = fields.get("env", {})
    if not isinstance(env, Mapping) or not all(isinstance(k, str) and isinstance(v, str) for k, v in env.items()):
        raise ConfigError(f"{where}.env: must map names to strings; quote the values")
    image, python = fields.get("image"), fields.get("python")
    return Environment(
        packages=_texts(fields.get("packages", []), f"{where}.packages"),
        setup=_texts(fields.get("setup", []), f"{where}.setup"),
        env=dict(env),
        image=None if image is None else _text(image, f"{where}.image"),
        python=None if python is None else _text(python, f"{where}.python"),
    )


def _parse_files(value: object, where: str) -> SourceFiles:
    """Read a source whose `pypi`, `git` and `edited` kinds take a further key `paths`."""
    if isinstance(value, Mapping) and len(value) == 1:
        kind, detail = next(iter(value.items()))
        if isinstance(detail, Mapping) and kind != "files" and "paths" in detail:
            paths = _texts(detail["paths"], f"{where}.{kind}.paths")
            rest = {name: item for name, item in detail.items() if name != "paths"}
            return SourceFiles(parse_source({kind: rest}, where), paths)
    return SourceFiles(parse_source(value, where))


def _parse_reference(value: object, where: str) -> Reference:
    if isinstance(value, Mapping) and len(value) == 1:
        kind, detail = next(iter(value.items()))
        if kind == "patch":
            return PatchText(_text(detail, f"{where}.patch").encode())
        if kind == "path":
            return PatchFile(_text(detail, f"{where}.path"))
    return _parse_files(value, where)


def _parse_fix(value: object, where: str) -> Fix:
    fields = _mapping(value, where, ("path", "old", "new"), required=("path", "old", "new"))
    path, old = (_text(fields[name], f"{where}.{name}") for name in ("path", "old"))
    return Fix(path, old, str(fields["new"]))


def _mapping(value: object, where: str, known: Sequence[str], required: Sequence[str] = ()) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: must be a mapping with the keys {', '.join(known)}")
    for name in value:
        if name not in known:
            raise ConfigError(f"{where}: {name}: unknown field{did_you_mean(str(name), known)}")
    for name in required:
        if name not in value:
            raise ConfigError(f"{where}: {name}: is missing; add it")
    return value


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{where}: must be a text that is not empty")
    return value


def _texts(value: object, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) and item.strip() for item in value):
        raise ConfigError(f"{where}: must be a list of texts; quote them")
    return tuple(value)


def _matching(value: object, where: str, pattern: str, what: str) -> str:
    if not isinstance(value, str) or not re.fullmatch(pattern, value):
        raise ConfigError(f"{where}: {value!r} may only hold {what}")
    return value


def _ids(value: object, where: str) -> tuple[str, ...]:
    """Read test ids: a list, or one written as a JSON or Python string, as public data sets have it."""
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError) as error:
            raise ConfigError(f"{where}: {str(value)[:60]!r} is not a list of test ids") from error
    ids = _texts(list(value) if isinstance(value, tuple) else value, where)
    if len(set(ids)) != len(ids):
        raise ConfigError(f"{where}: names a test twice")
    return ids


def _number(value: object, where: str, low: float, high: float) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{where}: must be a number from {low} to {high}")
    return float(value)


def _repo_path(value: object, where: str) -> str:
    path = _text(value, where)
    if not path.startswith("/") or posixpath.normpath(path) != path or path.count("/") == len(path):
        raise ConfigError(f"{where}: {path!r} is not an absolute, normalised path below /")
    return path
