"""SWE-bench Pro: several languages, repositories at `/app`, a script and a parser of their own for each instance.

Scripts and parsers are not in the rows: they are looked for in `run_scripts/INSTANCE/` beside the file, where the
benchmark's own repository has them, or in the fields `run_script` and `parser_script`.
"""

from __future__ import annotations

import shlex

from skyenv.envs.swe.datasets.swebench import TIMEOUT
from skyenv.envs.swe.fields import Row
from skyenv.envs.swe.runners.script import PARSER, RUN
from skyenv.envs.swe.sources import ImageSource
from skyenv.envs.swe.tasks import Environment, PatchText, SweTask
from skyenv.errors import ConfigError

REPO = "/app"


def matches(row: Row) -> bool:
    """Whether a row names the test files to run or the tag of its image."""
    return row.has("instance_id") and (row.has("selected_test_files_to_run") or row.has("dockerhub_tag"))


def parse(row: Row) -> SweTask:
    """Read a row."""
    failing = row.failing("fail_to_pass")
    files = row.ids("selected_test_files_to_run")
    if not files:
        raise ConfigError(f"{row.at('selected_test_files_to_run')}: names no test file to run")
    parts = [row.text("problem_statement"), row.text("requirements", default=""), row.text("interface", default="")]
    heads = ["", "\n\nRequirements:\n", "\n\nInterface:\n"]
    return SweTask(
        task_id=row.text("instance_id"),
        problem="".join(head + part for head, part in zip(heads, parts, strict=True) if part),
        source=ImageSource(REPO),
        tests=PatchText(row.patch("test_patch")),
        fail_to_pass=failing,
        pass_to_pass=tuple(test for test in row.ids("pass_to_pass") if test not in set(failing)),
        runner="script",
        environment=Environment(image=f"jefzda/sweap-images:{row.text('dockerhub_tag')}"),
        reference=PatchText(row.patch("patch")),
        timeout=TIMEOUT,
        repo_path=REPO,
        base=row.base,
        command=shlex.quote(",".join(files)),
        script={RUN: _script(row, "run_script", RUN), PARSER: _script(row, "parser_script", PARSER)},
    )


def _script(row: Row, field: str, name: str) -> bytes:
    if given := row.text(field, default=""):
        return given.encode()
    file = row.base / "run_scripts" / row.text("instance_id").replace("/", "_") / name
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{row.at(field)}: is missing, and so is {file}; copy the benchmark's run_scripts") from error
