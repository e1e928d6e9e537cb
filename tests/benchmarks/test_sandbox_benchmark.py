"""The benchmark of sandboxes says at its end what it found, and what it could not find and why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "benchmarks" / "sandbox.py"
HEADLINES = {"exec_vs_swerex", "create_vs_docker", "group_fork_vs_one", "live_sandboxes", "tax_hours_per_million"}


@pytest.mark.slow
def test_it_ends_with_one_object(tmp_path: Path) -> None:
    parts = ("exec", "density")
    few = ("--times", "20", "--sandboxes", "3")
    command = [sys.executable, str(SCRIPT), "--json", "--only", *parts, *few, "--swerex", str(tmp_path / "none")]
    environment = {key: value for key, value in os.environ.items() if key != "DOCKER_HOST"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.splitlines()[-1])
    assert found.keys() >= HEADLINES
    for name in HEADLINES:
        assert (found[name] is None) == bool(found.get(f"{name}_reason")), name
    assert found["live_sandboxes"] == 3
    assert "was not run" in found["tax_hours_per_million_reason"]
    assert "--install-swerex" in found["exec_vs_swerex_reason"]
    assert found["exec local ms"]["n"] == 50
    assert found["seed"] == 42
