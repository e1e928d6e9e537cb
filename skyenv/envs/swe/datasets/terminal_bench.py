"""Folders of the first terminal-bench: task.yaml, run-tests.sh, tests/, solution.sh and a Dockerfile.

All tests that the log shows have to pass. The image is made from the folder itself, `tb__NAME:DIGEST`.
"""

from __future__ import annotations

from pathlib import Path

from skyenv.envs.swe.building import image_name
from skyenv.envs.swe.datasets.harbor import dockerfile_workdir
from skyenv.envs.swe.fields import Row, number
from skyenv.envs.swe.reading import TERMINAL_BENCH
from skyenv.envs.swe.runners.ids import parser_name
from skyenv.envs.swe.sources import DirectorySource, ImageSource
from skyenv.envs.swe.tasks import Environment, SolutionScript, SourceFiles, SweTask
from skyenv.errors import ConfigError


def matches(row: Row) -> bool:
    """Whether the row is such a folder."""
    return row.has(TERMINAL_BENCH)


def parse(row: Row) -> SweTask:
    """Read a folder."""
    folder = Path(row.text(TERMINAL_BENCH))
    runner = folder / "run-tests.sh"
    for name in ("run-tests.sh", "tests"):
        if not (folder / name).exists():
            raise ConfigError(f"{row.where}: {name}: is missing; add it")
    image = image_name(f"tb__{folder.name}", folder)
    seconds, time = row.value("max_test_timeout_sec"), row.value("max_agent_timeout_sec")
    return SweTask(
        task_id=folder.name,
        problem=row.text("instruction"),
        source=ImageSource("/"),
        tests=SourceFiles(DirectorySource("tests")),
        fail_to_pass=("reward",),
        runner="harbor",
        environment=Environment(image=image, context="" if image is None else "."),
        reference=SolutionScript(".", "solution.sh", place="/oracle") if (folder / "solution.sh").is_file() else None,
        timeout=number(60.0 if seconds is None else seconds, row.at("max_test_timeout_sec"), 1, 86400),
        repo_path=dockerfile_workdir(folder / "Dockerfile") or "/app",
        base=folder,
        command=f"bash -c {_quoted(runner.read_bytes().decode('utf-8'))}",
        agent_timeout=None if time is None else number(time, row.at("max_agent_timeout_sec"), 1, 7 * 86400),
        parser=parser_name(row.text("parser_name", default="pytest"), row.at("parser_name")),
    )


def _quoted(script: str) -> str:
    return "'" + script.replace("'", "'\\''") + "'"
