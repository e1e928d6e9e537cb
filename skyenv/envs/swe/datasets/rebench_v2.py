"""SWE-rebench V2: many languages, a test command and the name of a parser in each row, repositories at `/NAME`."""

from __future__ import annotations

from skyenv.envs.swe.datasets import swebench
from skyenv.envs.swe.fields import Row
from skyenv.envs.swe.runners.ids import parser_name
from skyenv.envs.swe.sources import ImageSource
from skyenv.envs.swe.tasks import Environment, PatchText, SweTask
from skyenv.errors import ConfigError


def matches(row: Row) -> bool:
    """Whether a row with an installation names its image and a base image or a language."""
    config = row.value("install_config")
    named = row.has("language") or (isinstance(config, dict) and "base_image_name" in config)
    return row.has("instance_id", "install_config", "image_name") and named


def parse(row: Row) -> SweTask:
    """Read a row."""
    config = row.structure("install_config")
    command = config.get("test_cmd")
    if isinstance(command, list):
        command = "\n".join(map(str, command))
    if not isinstance(command, str) or not command.strip():
        raise ConfigError(f"{row.at('install_config.test_cmd')}: is missing; add it")
    parser = parser_name(str(config.get("log_parser") or "pytest"), row.at("install_config.log_parser"))
    spec = swebench.command_spec(command, parser)
    path = "/" + row.text("repo").rpartition("/")[2]
    failing = row.failing("FAIL_TO_PASS")
    return SweTask(
        task_id=row.text("instance_id"),
        problem=row.text("problem_statement"),
        source=ImageSource(path),
        tests=PatchText(row.patch("test_patch")),
        fail_to_pass=failing,
        pass_to_pass=tuple(test for test in row.ids("PASS_TO_PASS") if test not in set(failing)),
        runner=spec.runner,
        environment=Environment(image=row.text("image_name")),
        reference=PatchText(row.patch("patch")),
        timeout=swebench.TIMEOUT,
        repo_path=path,
        base=row.base,
        command=spec.command,
        parser=spec.parser,
    )
