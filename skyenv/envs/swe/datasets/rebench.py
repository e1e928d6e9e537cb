"""SWE-rebench V1 and its forerunner SWE-bench-extra (both of nebius): SWE-bench's columns and an `install_config`.

SWE-bench-extra has no configuration; its images are built by the fork of SWE-bench that it came with, under the names
that SWE-bench gives them.
"""

from __future__ import annotations

from skyenv.envs.swe.datasets import swebench
from skyenv.envs.swe.datasets.specs import Spec
from skyenv.envs.swe.fields import Row
from skyenv.envs.swe.runners.ids import parser_name
from skyenv.envs.swe.tasks import SweTask


def matches(row: Row) -> bool:
    """Whether a row of SWE-bench's shape brings an installation."""
    return swebench.matches(row) and row.has("install_config")


def parse(row: Row) -> SweTask:
    """Read a row."""
    config = row.structure("install_config")
    image = row.text("docker_image", "image_name", default="") or swebench.image_name(row, "swerebench", "_1776_")
    parser = parser_name(str(config.get("log_parser") or "pytest"), row.at("install_config.log_parser"))
    return swebench.container_task(row, image, test_command(str(config.get("test_cmd") or "pytest"), parser), {})


def test_command(command: str, parser: str) -> Spec:
    """The command of a configuration, which gets the test files at its end."""
    return swebench.command_spec(f"{command} {{files}}", parser)


def matches_extra(row: Row) -> bool:
    """Whether the row has what its makers note about each instance."""
    meta = row.value("meta")
    return swebench.matches(row) and (row.has("license") or (isinstance(meta, dict) and "is_lite" in meta))


def parse_extra(row: Row) -> SweTask:
    """Read a row."""
    return swebench.container_task(row, swebench.image_name(row, "swebench", "_1776_"), Spec(), {})
