"""Every code block of README.md and of docs is run: Python blocks as scripts, command lines as commands.

What needs servers of its own, or a GPU, is marked `py` or `console` and only shown.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXT = "\n".join(path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))])
FILES = re.compile(r"^<!-- write [^\n]*-->\n```\w+\n.*?^```", re.DOTALL | re.MULTILINE)  # tested where they are used
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", FILES.sub("", TEXT), re.DOTALL | re.MULTILINE)
PYTHON = [text for language, text in BLOCKS if language == "python"]
COMMANDS = [line.split("#")[0].strip() for language, text in BLOCKS if language == "bash" for line in text.splitlines()]
OURS = [line for line in COMMANDS if line.startswith(("skyenv ", "sky_trainer "))]

# What keeps a long command short here; it still runs the same path.
SHORT = {
    "sky_trainer train": ["--steps", "1", "--warm_start.steps", "2"],
    "sky_trainer eval": ["--limit", "4"],
    "skyenv tasks validate": ["--id", "fahrenheit-offset"],
}

SERVERS = ("skyenv serve", "skyenv gateway")  # tests/cli and tests/remote/test_gateway_processes.py run them


def test_the_two_commands_stand_first() -> None:
    assert BLOCKS[0][0] == "bash"
    assert [line.split("#")[0].strip() for line in BLOCKS[0][1].splitlines()] == ["make demo", "make test"]


def test_the_first_script_has_twelve_lines() -> None:
    assert len(PYTHON[0].splitlines()) <= 12


@pytest.mark.parametrize("script", PYTHON, ids=range(len(PYTHON)))
def test_python_block(script: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(script)
    result = subprocess.run(
        [sys.executable, path], cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


@pytest.mark.parametrize("line", [line for line in OURS if not line.startswith(SERVERS)])
def test_command(line: str, tmp_path: Path) -> None:
    extra = next((options for prefix, options in SHORT.items() if line.startswith(prefix)), [])
    program, *arguments = [*shlex.split(line), *extra]
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    command = [Path(sys.executable).parent / program, *arguments]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr
