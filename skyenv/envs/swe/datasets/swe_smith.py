"""SWE-smith: a repository that passes its tests, and a patch that breaks it; the reference takes the patch back.

One image serves all rows of a repository; the bug is put in when a sandbox is prepared, so no branch is needed. Files
with failing tests are hidden from the agent, as in the branches of the data set.
"""

from __future__ import annotations

from skyenv.envs.swe.datasets.specs import CONDA
from skyenv.envs.swe.fields import Row
from skyenv.envs.swe.sources import ImageSource
from skyenv.envs.swe.tasks import Environment, PatchText, SourceFiles, SweTask
from skyenv.errors import ConfigError

REPO = "/testbed"
TIMEOUT = 900.0


def matches(row: Row) -> bool:
    """Whether a row has an image and no test patch."""
    return row.has("instance_id", "patch", "image_name") and not row.has("test_patch") and not row.has("install_config")


def parse(row: Row) -> SweTask:
    """Read a row."""
    failing = row.failing("FAIL_TO_PASS")
    passing = tuple(test for test in row.ids("PASS_TO_PASS") if test not in set(failing))
    if odd := [test for test in failing + passing if "::" not in test]:
        raise ConfigError(f"{row.at('FAIL_TO_PASS')}: {odd[0]!r} names no file; SWE-smith writes path::test")
    hidden = tuple(dict.fromkeys(test.split("::")[0] for test in failing))
    files = tuple(dict.fromkeys(test.split("::")[0] for test in failing + passing))
    patch = row.patch("patch")
    return SweTask(
        task_id=row.text("instance_id"),
        problem=row.text("problem_statement"),
        source=ImageSource(REPO),
        tests=SourceFiles(ImageSource(REPO), files),
        fail_to_pass=failing,
        pass_to_pass=passing,
        runner="pytest",
        environment=Environment(image=row.text("image_name"), activate=CONDA),
        reference=PatchText(patch, reverse=True),
        timeout=TIMEOUT,
        repo_path=REPO,
        base=row.base,
        parser="pytest",
        test_files=files,
        hidden=tuple(f"{REPO}/{path}" for path in hidden),
        source_patch=PatchText(patch),
    )
