"""The set of injected bugs: large, of many packages, admitted, and a few of it fetched and graded for real."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import skyenv
import skyenv.envs.swe
from skyenv.envs.swe.loading import load_tasks
from skyenv.envs.swe.validation import validate_task

FILE = Path(skyenv.envs.swe.__file__).parent / "data" / "mutated.jsonl"
ROWS: list[dict[str, Any]] = [json.loads(line) for line in FILE.read_text("utf-8").splitlines()]


def package(row: dict[str, Any]) -> str:
    return str(row["source"]["edited"]["base"]["pypi"]["name"])


FIRST = {package(row): row["task_id"] for row in reversed(ROWS)}


def test_the_set_is_large_and_admitted() -> None:
    tasks = load_tasks("mutated")
    assert len(tasks) >= 200
    assert len(FIRST) >= 5
    assert [task.task_id for task in tasks] == [row["task_id"] for row in ROWS]
    assert all(task.record is not None for task in tasks)


def test_every_bug_is_a_few_bytes_of_code_and_its_issue_does_not_tell() -> None:
    for row in ROWS:
        edited = row["source"]["edited"]
        telling = {test.split("::")[0] for test in row["fail_to_pass"]}
        assert set(edited["remove"]) == telling
        assert {edit["path"] for edit in edited["edits"]} == set(row["reference"]["edited"]["paths"])
        assert all(edit["old"] != edit["new"] for edit in edited["edits"])
        assert all(edit["old"] not in row["problem"] for edit in edited["edits"] if len(edit["old"]) > 40)


@pytest.mark.network
@pytest.mark.parametrize("task_id", sorted(FIRST.values())[::3])
async def test_the_empty_patch_fails_and_the_reference_resolves(task_id: str) -> None:
    (task,) = [task for task in load_tasks("mutated") if task.task_id == task_id]
    async with skyenv.connect() as client:
        record = await validate_task(task, client)
    assert record["ok"], record
