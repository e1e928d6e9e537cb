"""Virtual environments for programs whose requirements do not fit the trainer's, made with uv or pip."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from sky_trainer.versions import SERVERS, read_environment, server_mismatches
from skyenv.errors import ConfigError

INSTALLED = "installed.txt"


def environment_of(server: str, path: Path, install: Sequence[str], *, on_gpus: bool) -> str:
    """What stands at `path`, from which servers of this kind are started; nothing is installed and nothing imported.

    Raises ConfigError when it is missing and there is nothing to make it from, or when servers are to run on GPUs and
    its packages, CUDA and this machine's driver do not fit each other.
    """
    python, note = path / "bin" / "python", path / INSTALLED
    wanted = "".join(f"{line}\n" for line in install)
    if not python.exists() or (install and not (note.is_file() and note.read_text(encoding="utf-8") == wanted)):
        if not install:
            raise ConfigError(_missing(python))
        return f"environment {path}, to be made of {', '.join(install)}"
    there = read_environment(path)
    found = [f"{name} {there.versions[name]}" for name in SERVERS if name in there.versions]
    if not any(name.startswith(server) for name in found):
        raise ConfigError(f"launch.environment: {path} holds no {server}; install it there, or name another")
    wrong = server_mismatches(there, path) if on_gpus else []
    if wrong:
        raise ConfigError(f"launch.environment: {path}: " + "; ".join(f"{what}: {fix}" for what, fix in wrong))
    return f"{', '.join(found)} in {path}"


def _missing(python: Path) -> str:
    return (
        f"launch.environment: there is no {python}; make that environment, or list its requirements in launch.install"
    )


def ensure_environment(path: Path, install: Sequence[str], installer: Literal["uv", "pip"]) -> Path:
    """The interpreter of the environment at `path`; made, or made anew when `install` has changed since it was made.

    An environment that was not made here is taken as it is, unless there is something to install. Blocks for minutes
    when it installs. Raises ConfigError with the installer's last words.
    """
    python, note, wanted = path / "bin" / "python", path / INSTALLED, "".join(f"{line}\n" for line in install)
    if python.exists() and (not install or (note.is_file() and note.read_text(encoding="utf-8") == wanted)):
        return python
    if not install:
        raise ConfigError(_missing(python))
    if path.exists() and not note.exists() and any(path.iterdir()):
        raise ConfigError(f"launch.environment: {path} was not made by launch.install; name another directory")
    shutil.rmtree(path, ignore_errors=True)
    for command in _commands(path, python, install, installer):
        done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if done.returncode:
            last = "\n".join((done.stdout + done.stderr).splitlines()[-10:])
            raise ConfigError(f"launch.install: `{' '.join(command[:4])} ...` failed:\n{last}")
    note.write_text(wanted, encoding="utf-8")
    return python


def _commands(path: Path, python: Path, install: Sequence[str], installer: Literal["uv", "pip"]) -> list[list[str]]:
    if installer == "pip":
        return [
            [sys.executable, "-m", "venv", str(path)],
            [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *install],
        ]
    beside = Path(sys.executable).parent / "uv"
    uv = str(beside) if beside.exists() else shutil.which("uv")
    if uv is None:
        raise ConfigError("launch.installer is uv, which is not installed; pip install uv, or set it to pip")
    return [
        [uv, "venv", "--quiet", "--python", sys.executable, str(path)],
        [uv, "pip", "install", "--quiet", "--python", str(python), *install],
    ]
