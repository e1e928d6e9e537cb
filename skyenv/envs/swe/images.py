"""A repository that lies in a container image: made pristine once, before any agent sees it.

Gone are every git directory (with it the history, remotes, tags and whatever future there was), and what the task
hides: tests of the fix, copies of its patch, scripts that name it. The image itself is trusted, an agent is not.
"""

from __future__ import annotations

import shlex

from anyio import to_thread

from skyenv.core import Sandbox
from skyenv.envs.swe.extraction import download_bounded, entries
from skyenv.envs.swe.sources import Tree, TreeFile, tree_to_tar
from skyenv.envs.swe.tasks import SweTask
from skyenv.envs.swe.trees import MAX_BYTES
from skyenv.errors import ConfigError, SandboxPathError

STRIP_SECONDS = 300.0
_PLACE = "/.skyenv-source"
_GIT = "GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null git apply --whitespace=nowarn"


async def clean_image(box: Sandbox, task: SweTask) -> tuple[Tree, Tree]:
    """Make the repository in `box` pristine; returns its tree before and after the hidden paths went.

    ConfigError when the image has no such repository or the task's patch does not fit it.
    """
    repo = shlex.quote(task.repo_path)
    stripped = await box.exec(f"(cd {repo} && find . -name .git -prune -exec rm -rf {{}} +)", timeout=STRIP_SECONDS)
    if stripped.exit_code:
        raise ConfigError(f"{task.task_id}: repo_path: the image has no {task.repo_path}: {stripped.output[-300:]}")
    if task.source_patch is not None:
        await box.upload(_PLACE, tree_to_tar({"patch": TreeFile(task.source_patch.patch)}))
        options = "-R" if task.source_patch.reverse else ""
        done = await box.exec(f"(cd {repo} && {_GIT} {options} {_PLACE}/patch)", timeout=120.0)
        await box.exec(f"rm -rf {_PLACE}")
        if done.exit_code:
            raise ConfigError(f"{task.task_id}: patch: does not fit the repository of the image: {done.output[-300:]}")
    whole = await _tree(box, task.repo_path)
    if not task.hidden:
        return whole, whole
    await box.exec(f"rm -rf -- {' '.join(map(shlex.quote, task.hidden))}", timeout=STRIP_SECONDS)
    return whole, await _tree(box, task.repo_path)


async def _tree(box: Sandbox, path: str) -> Tree:
    try:
        archive = await download_bounded(box, path, MAX_BYTES)
    except SandboxPathError as error:
        raise ConfigError(f"the repository {path} of the image cannot be read: {error}") from error
    listed = await to_thread.run_sync(lambda data: list(entries(data)), archive)
    return {path: file for path, file in listed if file is not None}
