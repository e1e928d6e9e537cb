"""The built-in set: complete rows, and every task fails as it is, passes with its fix, and with no decoy."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from direct import run_tests

import skyenv.envs.swe
from skyenv.envs.swe.sources import Tree, TreeFile, diff_trees
from skyenv.envs.swe.trees import git, read_directory

ROOT = Path(skyenv.envs.swe.__file__).parent / "data" / "builtin"
FOLDERS = sorted(path for path in ROOT.iterdir() if path.is_dir())
ROWS: dict[str, dict[str, Any]] = {f.name: yaml.safe_load((f / "task.yaml").read_text("utf-8")) for f in FOLDERS}
WITH_FIX = [name for name, row in ROWS.items() if "fix" in row]


def tree(name: str, part: str) -> dict[str, TreeFile]:
    return dict(read_directory(ROOT / name / part, name))


def replaced(files: Tree, path: str, old: str, new: str) -> Tree:
    text = files[path].data.decode()
    assert text.splitlines().count(old) == 1
    return {**files, path: TreeFile(text.replace(old, new).encode(), files[path].mode)}


def patched(name: str, files: Tree, root: Path) -> Tree:
    root.mkdir()
    for path, file in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(file.data)
    git(["apply", str(ROOT / name / "gold.patch")], root)
    return read_directory(root, name)


def outcomes(name: str, files: Tree, root: Path) -> dict[str, float]:
    root.mkdir()
    tests = {path: file.data for path, file in tree(name, "hidden").items()}
    return run_tests({path: file.data for path, file in files.items()}, tests, root)


def test_the_set_is_large_and_graded_by_difficulty() -> None:
    levels = Counter(row["level"] for row in ROWS.values())
    assert len(ROWS) >= 30
    assert levels[1] >= 14
    assert set(levels) == {1, 2, 3, 4}


@pytest.mark.parametrize("name", ROWS)
def test_row_is_complete(name: str) -> None:
    row = ROWS[name]
    assert row["task_id"] == name
    assert row["source"] == {"directory": "repo"}
    assert row["tests"] == {"directory": "hidden"}
    assert row["reference"] == {"path": "gold.patch"}
    assert row["runner"] == "unittest"
    assert len(row["fail_to_pass"]) >= 2
    assert len(row["pass_to_pass"]) >= 2
    assert not set(row["fail_to_pass"]) & set(row["pass_to_pass"])
    assert len(row["problem"].split()) >= 8
    assert all(re.fullmatch(r"tests/\w+\.py::\w+::test_\w+", i) for i in row["fail_to_pass"] + row["pass_to_pass"])


@pytest.mark.parametrize("name", ROWS)
def test_files_are_plain_and_hidden_tests_stay_hidden(name: str) -> None:
    repo, hidden = tree(name, "repo"), tree(name, "hidden")
    assert not set(repo) & set(hidden)
    for path, file in {**repo, **hidden}.items():
        assert file.mode == 0o644
        if path.endswith(".py"):
            ast.parse(file.data, path, feature_version=(3, 9))
    if ROWS[name]["level"] == 1:
        assert len(repo) == 1
        assert all(8 <= file.data.count(b"\n") <= 25 for file in repo.values())
        assert len(ROWS[name]["problem"]) <= 160


@pytest.mark.parametrize("name", ROWS)
def test_fails_before_and_passes_after_the_reference(name: str, tmp_path: Path) -> None:
    row, repo = ROWS[name], tree(name, "repo")
    before = outcomes(name, repo, tmp_path / "before")
    after = outcomes(name, patched(name, repo, tmp_path / "patched"), tmp_path / "after")
    assert after.pop("seconds") < 0.5
    assert set(after) == {*row["fail_to_pass"], *row["pass_to_pass"]}
    assert all(after.values())
    assert {test for test in after if before.get(test)} == set(row["pass_to_pass"])


@pytest.mark.parametrize("name", [name for name in ROWS if (ROOT / name / "repo" / "tests").is_dir()])
def test_the_repository_passes_its_own_tests(name: str, tmp_path: Path) -> None:
    files = {path: file.data for path, file in tree(name, "repo").items()}
    found = run_tests(files, {path: data for path, data in files.items() if path.startswith("tests/")}, tmp_path)
    assert found.pop("seconds") < 0.5
    assert found
    assert all(found.values())


def test_level_one_has_a_one_line_fix() -> None:
    assert set(WITH_FIX) == {name for name, row in ROWS.items() if row["level"] == 1}


@pytest.mark.parametrize("name", WITH_FIX)
def test_the_fix_is_the_reference_and_no_decoy_resolves(name: str, tmp_path: Path) -> None:
    row, repo = ROWS[name], tree(name, "repo")
    fix, decoys = row["fix"], row["decoys"]
    assert diff_trees(repo, replaced(repo, **fix)) == (ROOT / name / "gold.patch").read_bytes()
    assert len({fix["old"], fix["new"], *decoys}) == len(decoys) + 2
    assert len(decoys) in (2, 3)
    for number, decoy in enumerate(decoys):
        found = outcomes(name, replaced(repo, fix["path"], fix["old"], decoy), tmp_path / str(number))
        assert not all(found.get(test) for test in row["fail_to_pass"] + row["pass_to_pass"]), decoy
