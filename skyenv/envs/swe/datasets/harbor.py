"""Harbor task folders: task.toml, instruction.md, environment/, solution/solve.sh and tests/test.sh.

The image is `docker_image`, or the one that Harbor builds from the folder's Dockerfile under the name `hb__NAME`.
Tasks that let the agent onto a network are refused: sandboxes have none.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyenv.envs.swe.fields import Row, number, repo_path
from skyenv.envs.swe.reading import HARBOR
from skyenv.envs.swe.sources import DirectorySource, ImageSource
from skyenv.envs.swe.tasks import Environment, SolutionScript, SourceFiles, SweTask
from skyenv.errors import ConfigError

MIB = 1 << 20
_WORKDIR = re.compile(r"^\s*WORKDIR\s+(\S+)", re.MULTILINE | re.IGNORECASE)


def matches(row: Row) -> bool:
    """Whether the row is such a folder."""
    return row.has(HARBOR)


def parse(row: Row) -> SweTask:
    """Read a folder."""
    folder = Path(row.text(HARBOR))
    config = _config(folder, row)
    environment, verifier = _table(config, "environment", row), _table(config, "verifier", row)
    for name in ("instruction.md", "tests/test.sh"):
        if not (folder / name).is_file():
            raise ConfigError(f"{row.where}: {name}: is missing; add it")
    if (mode := environment.get("network_mode", "no-network")) != "no-network" or environment.get("allow_internet"):
        raise ConfigError(f"{row.where}: environment.network_mode: {mode!r} is not possible; sandboxes have no network")
    image, workdir = environment.get("docker_image"), dockerfile_workdir(folder / "environment" / "Dockerfile")
    if image is None and workdir is None:
        raise ConfigError(f"{row.where}: environment.docker_image: is missing, and there is no environment/Dockerfile")
    return SweTask(
        task_id=folder.name,
        problem=(folder / "instruction.md").read_bytes().decode("utf-8"),
        source=ImageSource("/"),
        tests=SourceFiles(DirectorySource("tests")),
        fail_to_pass=("reward",),
        runner="harbor",
        environment=Environment(
            image=str(image or f"hb__{folder.name}".lower()),
            env={str(name): str(value) for name, value in (environment.get("env") or {}).items()},
            limits=_limits(environment, row),
        ),
        reference=SolutionScript("solution") if (folder / "solution" / "solve.sh").is_file() else None,
        timeout=number(verifier.get("timeout_sec", 600.0), f"{row.where}: verifier.timeout_sec", 1, 86400),
        repo_path=repo_path(environment.get("workdir") or workdir or "/app", f"{row.where}: environment.workdir"),
        base=folder,
    )


def _config(folder: Path, row: Row) -> Mapping[str, Any]:
    try:
        return tomllib.loads((folder / "task.toml").read_bytes().decode("utf-8"))
    except ValueError as error:
        raise ConfigError(f"{row.where}: not valid TOML: {error}") from error


def _table(config: Mapping[str, Any], name: str, row: Row) -> Mapping[str, Any]:
    table = config.get(name, {})
    if not isinstance(table, Mapping):
        raise ConfigError(f"{row.where}: {name}: must be a table")
    return table


def _limits(environment: Mapping[str, Any], row: Row) -> dict[str, float]:
    limits: dict[str, float] = {}
    if (memory := environment.get("memory_mb")) is not None:
        limits["memory_bytes"] = int(number(memory, f"{row.where}: environment.memory_mb", 32, 1 << 22)) * MIB
    if (cpus := environment.get("cpus")) is not None:
        limits["cpus"] = number(cpus, f"{row.where}: environment.cpus", 0.01, 4096)
    return limits


def dockerfile_workdir(file: Path) -> str | None:
    """The last working directory of a Dockerfile, "/app" when it sets none, None when there is no such file."""
    if not file.is_file():
        return None
    found = _WORKDIR.findall(file.read_bytes().decode("utf-8", "replace"))
    return str(found[-1]).rstrip("/") or "/app" if found else "/app"
