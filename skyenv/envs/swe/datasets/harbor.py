"""Harbor task folders: task.toml, instruction.md, environment/, solution/solve.sh and tests/test.sh.

The image is `docker_image`, or `hb__NAME:DIGEST`, made from environment/Dockerfile (see `skyenv.envs.swe.building`);
a folder with neither is played in the host's system directories. Without a Dockerfile the files of environment/ lie in
the working directory. A task has a network if it says `public`; what no sandbox gives is refused by the field's name.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyenv.envs.swe.building import image_name
from skyenv.envs.swe.fields import Row, mapping, number, repo_path, text
from skyenv.envs.swe.reading import HARBOR
from skyenv.envs.swe.runners.harbor import RUN_TESTS
from skyenv.envs.swe.sources import DirectorySource, ImageSource
from skyenv.envs.swe.tasks import Environment, SolutionScript, SourceFiles, SweTask
from skyenv.errors import ConfigError

MIB = 1 << 20
_WORKDIR = re.compile(r"^\s*WORKDIR\s+(\S+)", re.MULTILINE | re.IGNORECASE)
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([GMK])", re.IGNORECASE)
_UNITS = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}
_ROOT = (None, "root", "0", 0)


def matches(row: Row) -> bool:
    """Whether the row is such a folder."""
    return row.has(HARBOR)


def parse(row: Row) -> SweTask:
    """Read a folder."""
    folder = Path(row.text(HARBOR))
    where, config = row.where, _config(folder, row.where)
    for name in ("instruction.md", "tests/test.sh"):
        if not (folder / name).is_file():
            raise ConfigError(f"{where}: {name}: is missing; add it")
    agent, verifier, environment = (_table(config, name, where) for name in ("agent", "verifier", "environment"))
    _refuse(folder, config, where)
    made = folder / "environment"
    workdir = dockerfile_workdir(made / "Dockerfile")
    variables = _variables(verifier, "verifier", where)
    return SweTask(
        task_id=folder.name,
        problem=(folder / "instruction.md").read_bytes().decode("utf-8"),
        source=ImageSource("/"),
        tests=SourceFiles(DirectorySource("tests")),
        fail_to_pass=("reward",),
        runner="harbor",
        environment=_placed(environment, _made(folder, config), "environment", where, _online(config)),
        reference=_solution(folder, _table(config, "solution", where), where),
        timeout=_seconds(verifier, f"{where}: verifier") or 600.0,
        repo_path=repo_path(environment.get("workdir") or workdir or "/app", f"{where}: environment.workdir"),
        base=folder,
        command=_exports(variables) + RUN_TESTS if variables else "",
        agent_timeout=_seconds(agent, f"{where}: agent"),
        verifier=_verifier(folder, config, where),
        artifacts=_artifacts(config, where),
        files="environment" if made.is_dir() and workdir is None and any(made.iterdir()) else "",
    )


def _config(folder: Path, where: str) -> Mapping[str, Any]:
    try:
        return tomllib.loads((folder / "task.toml").read_bytes().decode("utf-8"))
    except ValueError as error:
        raise ConfigError(f"{where}: not valid TOML: {error}") from error


def _table(config: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    table = config.get(name, {})
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where}: {name}: must be a table")
    return table


def _refuse(folder: Path, config: Mapping[str, Any], where: str) -> None:
    """What a task may ask for and no sandbox gives."""
    agent, verifier, environment = (_table(config, name, where) for name in ("agent", "verifier", "environment"))
    wrong: dict[str, object] = {
        "steps: several steps are": config.get("steps"),
        "environment.os: anything but linux is": str(environment.get("os", "linux")).lower() != "linux",
        "environment.gpus: a GPU is": environment.get("gpus"),
        "environment.tpu: a TPU is": environment.get("tpu"),
        "environment.mcp_servers: a server beside the sandbox is": environment.get("mcp_servers"),
        "environment.healthcheck: a check of a service is": environment.get("healthcheck"),
        "environment/docker-compose.yaml: several containers are": (
            folder / "environment" / "docker-compose.yaml"
        ).exists(),
        "agent.user: a user other than root is": agent.get("user") not in _ROOT,
        "verifier.user: a user other than root is": verifier.get("user") not in _ROOT,
        "verifier.collect: a command in a service is": verifier.get("collect"),
    }
    for what, asked in wrong.items():
        if asked:
            raise ConfigError(f"{where}: {what} not possible in a sandbox")
    modes = {name: _table(config, name, where).get("network_mode") for name in ("environment", "agent", "verifier")}
    for name, mode in modes.items():
        if mode not in (None, "public", "no-network"):
            raise ConfigError(f"{where}: {name}.network_mode: {mode!r} is not possible; use 'public' or 'no-network'")
    if modes["verifier"] == "public" and not _online(config):
        raise ConfigError(f"{where}: verifier.network_mode: 'public' is not possible where the agent has no network")


def _online(config: Mapping[str, Any]) -> bool:
    """Whether the agent has a network."""
    environment = config.get("environment", {})
    legacy = "public" if environment.get("allow_internet") else None
    return (config.get("agent", {}).get("network_mode") or environment.get("network_mode") or legacy) == "public"


def _made(folder: Path, config: Mapping[str, Any]) -> tuple[object, str]:
    """The agent's image, None for a task that needs none, and the folder that it is made from."""
    ready = config.get("environment", {}).get("docker_image")
    return (ready, "") if ready else _built(folder, f"hb__{folder.name}", "environment")


def _built(folder: Path, stem: str, context: str) -> tuple[str | None, str]:
    image = image_name(stem, folder / context)
    return image, "" if image is None else context


def _placed(table: Mapping[str, Any], made: tuple[object, str], name: str, where: str, online: bool) -> Environment:
    image, context = made
    return Environment(
        image=None if image is None else text(image, f"{where}: {name}.docker_image"),
        env=_variables(table, name, where),
        limits=_limits(table, f"{where}: {name}"),
        network=online,
        context=context,
    )


def _verifier(folder: Path, config: Mapping[str, Any], where: str) -> Environment | None:
    """The verifier's own environment, None where it runs on the agent's machine."""
    table = _table(config, "verifier", where)
    own = table.get("environment")
    mode = table.get("environment_mode") or ("shared" if own is None else "separate")
    if mode not in ("shared", "separate") or (mode == "shared" and own is not None):
        raise ConfigError(f"{where}: verifier.environment_mode: {mode!r} is not possible here; choose 'separate'")
    if mode == "shared":
        return None
    own = _table(table, "environment", f"{where}: verifier")
    made: tuple[object, str] = own.get("docker_image"), ""
    if not made[0]:
        made = _built(folder, f"hb__{folder.name}__verifier", "tests")
    if not made[0]:
        made = _made(folder, config)
    settings = own or _table(config, "environment", where)
    return _placed(settings, made, "verifier.environment", where, _online(config))


def _artifacts(config: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Absolute paths that are carried to a separate verifier."""
    found = config.get("artifacts", [])
    if not isinstance(found, list):
        raise ConfigError(f"{where}: artifacts: must be a list of paths")
    paths = []
    for index, item in enumerate(found):
        at = f"{where}: artifacts[{index}]"
        fields = {"source": item} if isinstance(item, str) else mapping(
            item, at, ("source", "destination", "exclude", "service"), required=("source",)
        )  # fmt: skip
        for name, usual in (("service", (None, "main")), ("exclude", (None, []))):
            if fields.get(name) not in usual:
                raise ConfigError(f"{at}.{name}: is not possible in a sandbox")
        paths.append(repo_path(text(fields["source"], f"{at}.source").rstrip("/"), f"{at}.source"))
    return tuple(paths)


def _solution(folder: Path, table: Mapping[str, Any], where: str) -> SolutionScript | None:
    if not (folder / "solution" / "solve.sh").is_file():
        return None
    return SolutionScript("solution", env=_variables(table, "solution", where))


def _variables(table: Mapping[str, Any], name: str, where: str) -> dict[str, str]:
    """The table's `env`. Variables of the host are not handed into sandboxes: `${NAME:-default}` is its default."""
    found = table.get("env", {})
    if not isinstance(found, Mapping):
        raise ConfigError(f"{where}: {name}.env: must be a table")

    def default(match: re.Match[str]) -> str:
        if match[2] is None:
            raise ConfigError(f"{where}: {name}.env: ${{{match[1]}}} would take it from the host; write the value")
        return match[2]

    return {str(key): _VARIABLE.sub(default, str(value)) for key, value in found.items()}


def _exports(variables: Mapping[str, str]) -> str:
    return "".join(f"export {name}={shlex.quote(value)} && " for name, value in variables.items())


def _seconds(table: Mapping[str, Any], where: str) -> float | None:
    value = table.get("timeout_sec")
    return None if value is None else number(value, f"{where}.timeout_sec", 1, 7 * 86400)


def _limits(environment: Mapping[str, Any], where: str) -> dict[str, float]:
    limits: dict[str, float] = {}
    memory = environment.get("memory_mb")
    if memory is None and (size := environment.get("memory")) is not None:
        found = _SIZE.fullmatch(str(size))
        memory = float(found[1]) * _UNITS[found[2].upper()] if found else size
    if memory is not None:
        limits["memory_bytes"] = int(number(memory, f"{where}.memory_mb", 32, 1 << 22)) * MIB
    if (cpus := environment.get("cpus")) is not None:
        limits["cpus"] = number(cpus, f"{where}.cpus", 0.01, 4096)
    return limits


def dockerfile_workdir(file: Path) -> str | None:
    """The last working directory of a Dockerfile, "/app" when it sets none, None when there is no such file."""
    if not file.is_file():
        return None
    found = _WORKDIR.findall(file.read_bytes().decode("utf-8", "replace"))
    return str(found[-1]).rstrip("/") or "/app" if found else "/app"
