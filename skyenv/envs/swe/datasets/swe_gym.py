"""SWE-Gym (and SWE-Gym Lite): SWE-bench's columns with lists of ids, images under another name."""

from __future__ import annotations

from skyenv.envs.swe.datasets import swebench
from skyenv.envs.swe.datasets.specs import SWE_BENCH, SWE_GYM, Spec
from skyenv.envs.swe.fields import Row
from skyenv.envs.swe.tasks import SweTask


def matches(row: Row) -> bool:
    """Whether the repository is one of SWE-Gym's, or one that neither set is known for and no set-up commit is told."""
    repo = row.value("repo")
    if not swebench.matches(row) or row.has("image") or row.has("docker_image"):
        return False
    return repo in SWE_GYM or (repo not in SWE_BENCH and not row.has("environment_setup_commit"))


def parse(row: Row) -> SweTask:
    """Read a row."""
    spec = SWE_GYM.get(row.text("repo"), Spec())
    return swebench.container_task(row, swebench.image_name(row, "xingyaoww", "_s_"), spec, {})
