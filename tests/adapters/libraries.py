"""Other training libraries in environments of their own: a module of ours run there, and what it wrote."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIBRARIES = sorted(path.stem for path in (ROOT / ".ci/locks/adapters").glob("*.txt"))
PLAYED = [library for library in LIBRARIES if (ROOT / f"tests/adapters/playing/{library}.py").exists()]
"""Those that train on rows of tokens."""


def python(library: str) -> Path:
    """The interpreter of a library's environment."""
    path = ROOT / ".adapters" / library / "bin/python"
    assert path.exists(), f"no .adapters/{library}: run .ci/venvs"
    return path


def run(library: str, module: str, folder: Path, *words: str) -> Any:
    """`python -m MODULE OUT WORDS...` in a library's environment: the JSON it wrote to OUT, in `folder`."""
    out = folder / "out.json"
    there = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [str(python(library)), "-m", module, str(out), *words]
    done = subprocess.run(command, cwd=ROOT, env=there, capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return json.loads(out.read_text())
