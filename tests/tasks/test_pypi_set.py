"""The set of real releases: complete, pinned rows that say what they mean; a few of them fetched for real."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import skyenv.envs.swe
from skyenv.envs.swe.loading import load_tasks
from skyenv.envs.swe.sources import diff_trees, fetch_tree, parse_source, select

FILE = Path(skyenv.envs.swe.__file__).parent / "data" / "pypi.yaml"
ROWS: dict[str, dict[str, Any]] = {row["task_id"]: row for row in yaml.safe_load(FILE.read_text("utf-8"))}


def test_the_set_is_large_and_loads() -> None:
    assert len(ROWS) >= 12
    assert len({row["source"]["pypi"]["name"] for row in ROWS.values()}) >= 10
    assert [task.task_id for task in load_tasks("pypi")] == list(ROWS)
    assert "http" not in FILE.read_text("utf-8")


@pytest.mark.parametrize("task_id", ROWS)
def test_row_is_complete_and_pinned(task_id: str) -> None:
    row = ROWS[task_id]
    source, tests, reference = (row[field]["pypi"] for field in ("source", "tests", "reference"))
    assert task_id == f"{tests['name']}-{tests['version']}"
    assert (tests["name"], tests["version"], tests["sha256"]) == (
        source["name"], reference["version"], reference["sha256"],
    )  # fmt: skip
    assert source["version"] != tests["version"]
    assert source["sha256"] != tests["sha256"]
    assert row["runner"] == "pytest"
    assert all(re.fullmatch(r"[a-z]+==[0-9.]+", pin) for pin in row["environment"]["packages"])
    assert row["problem"].count(" ") >= 10
    assert row["fail_to_pass"]
    assert 0 < len(row["pass_to_pass"]) <= 60


@pytest.mark.parametrize("task_id", ROWS)
def test_ids_lie_in_the_tests_and_not_in_the_reference(task_id: str) -> None:
    row = ROWS[task_id]
    ids = row["fail_to_pass"] + row["pass_to_pass"]
    assert len(set(ids)) == len(ids)
    files = {test.split("::")[0] for test in ids}
    tests, reference = row["tests"]["pypi"]["paths"], row["reference"]["pypi"]["paths"]
    assert all(any(file == path or file.startswith(f"{path}/") for path in tests) for file in files)
    assert not any(file == path or file.startswith(f"{path}/") for path in reference for file in files)


@pytest.mark.network
@pytest.mark.parametrize("task_id", list(ROWS)[:: len(ROWS) // 3 + 1])
async def test_real_releases_hold_what_the_row_names(task_id: str, tmp_path: Path) -> None:
    row = ROWS[task_id]
    reference, tests = row["reference"]["pypi"]["paths"], row["tests"]["pypi"]["paths"]
    newer = {field: value for field, value in row["tests"]["pypi"].items() if field != "paths"}
    old = await fetch_tree(parse_source(row["source"], task_id), base=tmp_path, cache=tmp_path)
    new = await fetch_tree(parse_source({"pypi": newer}, task_id), base=tmp_path, cache=tmp_path)
    assert {test.split("::")[0] for test in row["fail_to_pass"]} <= set(select(new, tests))
    assert set(reference) <= set(new)
    for path in reference:
        assert diff_trees(old, new, [path]), path
