"""Task rows in skyenv's own form, read into `SweTask` without fetching anything.

A row is checked in full when it is read and every ConfigError names file, row and field. A task without failing tests
is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from skyenv.envs.swe.fields import ids, mapping, matching, number, repo_path, text, texts
from skyenv.envs.swe.runners import OUTCOMES
from skyenv.envs.swe.runners.ids import parser_name
from skyenv.envs.swe.sources import parse_source
from skyenv.envs.swe.tasks import (
    Environment,
    Fix,
    PatchFile,
    PatchText,
    Reference,
    RunnerName,
    SourceFiles,
    SweTask,
    Tests,
)
from skyenv.errors import ConfigError

LIMITS = ("memory_bytes", "pids", "cpus", "file_bytes", "disk_bytes", "tmpfs_bytes")
_FIELDS = (
    "task_id", "problem", "source", "environment", "runner", "tests", "fail_to_pass", "pass_to_pass",
    "reference", "level", "timeout", "repo_path", "fix", "decoys", "command", "parser", "test_files", "accept",
    "hidden",
)  # fmt: skip
RUNNERS: tuple[RunnerName, ...] = ("unittest", "pytest", "django", "sympy", "command")


def parse_task(row: object, where: str, base: Path) -> SweTask:
    """Read one row; `where` names file and row in every ConfigError, relative paths are below `base`."""
    fields = mapping(row, where, _FIELDS, required=("task_id", "problem", "source", "tests", "fail_to_pass"))
    task_id = matching(fields["task_id"], f"{where}: task_id", r"[A-Za-z0-9][A-Za-z0-9._-]*", "letters, digits, . _ -")
    at = f"{where} ({task_id})"
    failing = ids(fields["fail_to_pass"], f"{at}: fail_to_pass")
    if not failing:
        raise ConfigError(f"{at}: fail_to_pass: is empty; name at least one test that the fix must turn")
    passing = ids(fields.get("pass_to_pass", []), f"{at}: pass_to_pass")
    if both := set(failing) & set(passing):
        raise ConfigError(f"{at}: pass_to_pass: {min(both)!r} is in fail_to_pass too")
    runner = fields.get("runner", "unittest")
    if runner not in RUNNERS:
        raise ConfigError(f"{at}: runner: {runner!r} is not one of {', '.join(RUNNERS)}")
    command = str(fields.get("command", ""))
    if runner == "command" and not command.strip():
        raise ConfigError(f"{at}: command: is missing; the runner `command` needs one")
    return SweTask(
        task_id=task_id,
        problem=text(fields["problem"], f"{at}: problem"),
        source=parse_source(fields["source"], f"{at}: source"),
        tests=_parse_tests(fields["tests"], f"{at}: tests"),
        fail_to_pass=failing,
        pass_to_pass=passing,
        runner=runner,
        environment=_parse_environment(fields.get("environment", {}), f"{at}: environment"),
        reference=_parse_reference(fields["reference"], f"{at}: reference") if "reference" in fields else None,
        level=int(number(fields.get("level", 1), f"{at}: level", 1, 4)),
        timeout=number(fields.get("timeout", 60.0), f"{at}: timeout", 0.1, 7200),
        repo_path=repo_path(fields.get("repo_path", "/testbed"), f"{at}: repo_path"),
        base=base,
        fix=_parse_fix(fields["fix"], f"{at}: fix") if "fix" in fields else None,
        decoys=texts(fields.get("decoys", []), f"{at}: decoys"),
        command=command,
        parser=parser_name(str(fields.get("parser", "")), f"{at}: parser"),
        test_files=texts(fields.get("test_files", []), f"{at}: test_files"),
        accept=_parse_accept(fields.get("accept", {}), f"{at}: accept"),
        hidden=texts(fields.get("hidden", []), f"{at}: hidden"),
    )


def _parse_environment(value: object, where: str) -> Environment:
    fields = mapping(value, where, ("packages", "setup", "env", "image", "python", "activate", "limits"))
    env = fields.get("env", {})
    if not isinstance(env, Mapping) or not all(isinstance(k, str) and isinstance(v, str) for k, v in env.items()):
        raise ConfigError(f"{where}.env: must map names to strings; quote the values")
    image, python = fields.get("image"), fields.get("python")
    return Environment(
        packages=texts(fields.get("packages", []), f"{where}.packages"),
        setup=texts(fields.get("setup", []), f"{where}.setup"),
        env=dict(env),
        image=None if image is None else text(image, f"{where}.image"),
        python=None if python is None else text(python, f"{where}.python"),
        activate=str(fields.get("activate", "")),
        limits=_parse_limits(fields.get("limits", {}), f"{where}.limits"),
    )


def _parse_limits(value: object, where: str) -> Mapping[str, float]:
    fields = mapping(value, where, LIMITS)
    found = {name: number(value, f"{where}.{name}", 0, 2**50) for name, value in fields.items()}
    return {name: value if name == "cpus" else int(value) for name, value in found.items()}


def _parse_accept(value: object, where: str) -> Mapping[str, str]:
    known = sorted({*OUTCOMES, "missing"})
    if not isinstance(value, Mapping) or any(outcome not in known for outcome in value.values()):
        raise ConfigError(f"{where}: must map test ids to one of {', '.join(known)}")
    return {str(test): str(outcome) for test, outcome in value.items()}


def _parse_files(value: object, where: str) -> SourceFiles:
    """Read a source whose `pypi`, `git` and `edited` kinds take a further key `paths`."""
    if isinstance(value, Mapping) and len(value) == 1:
        kind, detail = next(iter(value.items()))
        if isinstance(detail, Mapping) and kind != "files" and "paths" in detail:
            paths = texts(detail["paths"], f"{where}.{kind}.paths")
            rest = {name: item for name, item in detail.items() if name != "paths"}
            return SourceFiles(parse_source({kind: rest}, where), paths)
    return SourceFiles(parse_source(value, where))


def _parse_tests(value: object, where: str) -> Tests:
    if isinstance(value, Mapping) and set(value) <= {"patch", "path"} and len(value) == 1:
        patch = _parse_reference(value, where)
        assert isinstance(patch, PatchText | PatchFile)
        return patch
    return _parse_files(value, where)


def _parse_reference(value: object, where: str) -> Reference:
    if isinstance(value, Mapping) and len(value) == 1:
        kind, detail = next(iter(value.items()))
        if kind == "patch":
            return PatchText(text(detail, f"{where}.patch").encode())
        if kind == "path":
            return PatchFile(text(detail, f"{where}.path"))
    return _parse_files(value, where)


def _parse_fix(value: object, where: str) -> Fix:
    fields = mapping(value, where, ("path", "old", "new"), required=("path", "old", "new"))
    path, old = (text(fields[name], f"{where}.{name}") for name in ("path", "old"))
    return Fix(path, old, str(fields["new"]))
