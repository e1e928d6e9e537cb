"""inspect-ai's own evaluations and its own checks of a provider, on sandboxes of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.adapters.libraries import run

pytestmark = [pytest.mark.adapter, pytest.mark.timeout(1800)]
AS_ROOT = {  # a sandbox's only user is root, whom permissions do not stop
    "test_read_file_not_allowed",
    "test_write_text_file_without_permissions",
    "test_write_binary_file_without_permissions",
    "test_exec_as_user",
}


def result(what: str, folder: Path) -> Any:
    return run("inspect", "tests.adapters.playing.inspect_eval", folder, what)


def test_adapter_an_evaluation_runs_in_our_sandboxes(tmp_path: Path) -> None:
    """Files of a sample, two calls of a tool, the scorer's look into the sandbox; the next sample has a fresh one."""
    log = result("eval", tmp_path)
    assert (log["status"], log["scores"]) == ("success", [[1], [0]]), log["error"]
    (first, second), (third,) = log["tools"]
    assert (first, second) == ("/workspace\n3\n0\n", "")
    assert "report.txt: No such file" in third
    assert "a\n" in third
    assert third.endswith("sales.csv\n")
    assert log["found"]
    assert log["logged"]["type"] == "skyenv"
    assert "token" not in log["logged"]["config"]


def test_adapter_inspects_own_checks_hold(tmp_path: Path) -> None:
    found = result("checks", tmp_path)
    assert int(found.pop("checked")) >= 44
    assert set(found) == AS_ROOT, {name: why for name, why in found.items() if name not in AS_ROOT}


def test_adapter_names_what_is_wrong_and_ends_what_is_cancelled(tmp_path: Path) -> None:
    wrong, unreachable, left = result("mistakes", tmp_path)
    assert wrong == "ConfigError: spec has no key 'memory'; did you mean 'memory_bytes'?"
    assert unreachable.startswith("SandboxUnavailable: cannot reach http://127.0.0.1:9")
    assert left == "none"
