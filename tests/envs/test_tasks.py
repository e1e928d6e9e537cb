"""Task rows: what is read, and that every mistake names its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from envs.repair import row
from skyenv.envs.swe.loading import load_tasks
from skyenv.envs.swe.rows import parse_task
from skyenv.envs.swe.sources import DirectorySource
from skyenv.envs.swe.tasks import Environment, Fix, PatchFile, PatchText, SourceFiles
from skyenv.errors import ConfigError


def test_the_named_sets_load_and_are_told_apart() -> None:
    tasks = load_tasks("builtin")
    assert len(tasks) >= 30
    assert {task.level for task in tasks} >= {1, 2, 3}
    assert load_tasks("builtin") == tasks


@pytest.mark.parametrize("name", ["rows.yaml", "rows.json", "rows.jsonl"])
def test_files_of_rows(tmp_path: Path, name: str) -> None:
    rows = [row(), row("pytest")]
    path = tmp_path / name
    path.write_text(
        "\n\n".join(json.dumps(item) for item in rows)
        if name.endswith("l") and "json" in name
        else (yaml.safe_dump(rows) if name.endswith("yaml") else json.dumps(rows))
    )
    for given in (path, str(path)):
        assert [task.task_id for task in load_tasks(given)] == ["calc-unittest", "calc-pytest"]


def test_folder_of_tasks(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        text = yaml.safe_dump(row(task_id=name, source={"directory": "repo"}, reference={"path": "gold.patch"}))
        (tmp_path / name / "task.yaml").write_text(text)
    first, second = load_tasks(tmp_path)
    assert (first.task_id, second.task_id) == ("a", "b")
    assert (first.source, first.reference, first.base) == (
        DirectorySource("repo"),
        PatchFile("gold.patch"),
        tmp_path / "a",
    )


def test_all_fields() -> None:
    environment = {"packages": ["x==1"], "setup": ["true"], "env": {"A": "b"}, "image": "img", "python": "3.12"}
    release = {"name": "x", "version": "1", "sha256": "0" * 64}
    given = row(
        environment=environment,
        tests={"pypi": {**release, "paths": ["tests"]}},
        reference={"patch": "diff"},
        level=4,
        timeout=90,
        repo_path="/srv/repo",
        fix={"path": "a.py", "old": "x", "new": ""},
        decoys=["y"],
    )
    task = parse_task(given, "row", Path("/base"))
    assert task.environment == Environment(("x==1",), ("true",), {"A": "b"}, "img", "3.12")
    assert isinstance(task.tests, SourceFiles)
    assert task.tests.paths == ("tests",)
    assert task.reference == PatchText(b"diff")
    assert (task.level, task.timeout, task.repo_path, task.base) == (4, 90.0, "/srv/repo", Path("/base"))
    assert (task.fix, task.decoys) == (Fix("a.py", "x", ""), ("y",))
    assert task.expected == task.fail_to_pass + task.pass_to_pass


@pytest.mark.parametrize("text", ['["a::b", "a::c"]', "['a::b', 'a::c']", "('a::b', 'a::c')"])
def test_ids_written_as_text(text: str) -> None:
    task = parse_task(row(fail_to_pass=text, pass_to_pass="[]"), "row", Path())
    assert task.fail_to_pass == ("a::b", "a::c")


def test_environments_are_keyed_by_what_is_in_them() -> None:
    keys = {
        Environment().key,
        Environment(packages=("a==1",)).key,
        Environment(setup=("a==1",)).key,
        Environment(setup=("a==1",), env={"a": "1"}).key,
        Environment(image="a").key,
        Environment(python="3.11").key,
    }
    assert len(keys) == 6
    assert Environment(env={"a": "1"}).key == Environment().key
    assert Environment(packages=("a", "b")).key == Environment(packages=("b", "a")).key


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown field": ({"fail_to_pas": ["x"]}, "fail_to_pas: unknown field; did you mean 'fail_to_pass'"),
    "task id": ({"task_id": "../x"}, "task_id: '../x'"),
    "empty problem": ({"problem": " "}, "problem: must be a text"),
    "source": ({"source": {"zip": "x"}}, "source"),
    "tests": ({"tests": {"files": {"a.py": 1}}}, "tests"),
    "no failing tests": ({"fail_to_pass": []}, "fail_to_pass: is empty"),
    "ids are numbers": ({"fail_to_pass": [1]}, "fail_to_pass: must be a list of texts"),
    "ids are code": ({"fail_to_pass": "__import__('os').getcwd()"}, "fail_to_pass: .* is not a list"),
    "twice": ({"fail_to_pass": ["a", "a"]}, "fail_to_pass: names a test twice"),
    "in both": ({"fail_to_pass": ["a"], "pass_to_pass": ["a"]}, "pass_to_pass: 'a' is in fail_to_pass too"),
    "runner": ({"runner": "nose"}, "runner: 'nose'"),
    "environment field": ({"environment": {"package": []}}, "environment: package: .* did you mean 'packages'"),
    "environment values": ({"environment": {"env": {"A": 1}}}, "environment.env"),
    "setup is text": ({"environment": {"setup": "make"}}, "environment.setup: must be a list"),
    "level": ({"level": 9}, "level: must be a number from 1 to 4"),
    "timeout": ({"timeout": "soon"}, "timeout: must be a number"),
    "relative repo_path": ({"repo_path": "repo"}, "repo_path"),
    "root as repo_path": ({"repo_path": "/"}, "repo_path"),
    "fix": ({"fix": {"path": "a"}}, "fix: old: is missing"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_row_names_file_row_and_field(tmp_path: Path, name: str) -> None:
    changes, message = WRONG[name]
    path = tmp_path / "set.json"
    path.write_text(json.dumps([row(task_id="fine"), row(**changes)]))
    with pytest.raises(ConfigError, match=message) as caught:
        load_tasks(path)
    assert f"{path}: row 2" in str(caught.value)


@pytest.mark.parametrize("missing", ["task_id", "problem", "source", "tests", "fail_to_pass"])
def test_a_missing_field_is_named(missing: str) -> None:
    given = row()
    del given[missing]
    with pytest.raises(ConfigError, match=f"{missing}: is missing"):
        parse_task(given, "row", Path())


def test_wrong_sets(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'builtin'"):
        load_tasks("buildin")
    with pytest.raises(ConfigError, match="occurs twice"):
        load_tasks([row(), row()])
    with pytest.raises(ConfigError, match="holds no task"):
        load_tasks([])
    with pytest.raises(ConfigError, match=r"no task 'queue-orders'.*did you mean 'queue-order'"):
        load_tasks(["queue-orders"])
    with pytest.raises(ConfigError, match=r"holds a task\.yaml"):
        load_tasks(tmp_path)
    for name, text, message in (
        ("a.yaml", "a: [", "not valid YAML"),
        ("a.json", "{", "not valid JSON"),
        ("a.jsonl", "\n{", "line 2"),
        ("b.json", "{}", "must be a list"),
        ("c.json", "[5]", "row 1: must be a mapping"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_tasks(tmp_path / name)


def test_mixed_lists() -> None:
    whole = load_tasks("builtin")
    assert [task.task_id for task in load_tasks([whole[1], "queue-order", row()])] == [
        whole[1].task_id,
        "queue-order",
        "calc-unittest",
    ]
