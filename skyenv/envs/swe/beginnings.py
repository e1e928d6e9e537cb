"""Sandboxes of a task that are cheaper than from scratch: a sibling's fork, and a grader's that is ready in advance.

Both fall back to `Environments.open` when there is nothing to use, so they change what a sandbox costs and never what
is in it. A fork carries files alone: activation and working directory are made anew, as in any other sandbox.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from skyenv.core import Beginning, Sandbox
from skyenv.envs.swe.environment import Environments, enter_directory, start_machine, start_repository
from skyenv.envs.swe.tasks import SweTask
from skyenv.errors import ConfigError, EnvError, SandboxError, SandboxLost, SandboxUnavailable

_log = logging.getLogger(__name__)


@asynccontextmanager
async def agent_sandbox(
    environments: Environments, task: SweTask, beginning: Beginning | None = None
) -> AsyncIterator[Sandbox]:
    """Open an agent's sandbox: the repository with one root commit, the shell standing in it.

    With a `beginning`, the first sibling's is frozen for the others. Raises SandboxError and ConfigError as
    `Environments.open`.
    """
    async with AsyncExitStack() as stack:
        box = None
        if beginning is not None and beginning.snapshot is not None:
            box = await _fork(environments, task, beginning.snapshot, beginning, stack)
        if box is None:
            box = await stack.enter_async_context(environments.open(task))
            if task.whole_machine:
                await start_machine(box, task.repo_path)
            else:
                await start_repository(box, task.repo_path)
            if beginning is not None and beginning.wanted:
                await _offer(environments, box, beginning)
        yield box


async def _fork(
    environments: Environments, task: SweTask, snapshot: str, beginning: Beginning, stack: AsyncExitStack
) -> Sandbox | None:
    """A sandbox from a sibling's snapshot, owned by `stack`; None when it cannot be had."""
    try:
        async with AsyncExitStack() as own:
            box = await own.enter_async_context(environments.open_from(task, snapshot))
            await enter_directory(box, task.repo_path)
            stack.push_async_exit(own.pop_all())
            return box
    except (SandboxError, ConfigError) as error:
        _log.info("%s: cannot start from a sibling's sandbox: %s: %s", task.task_id, type(error).__name__, error)
        if not isinstance(error, SandboxUnavailable):
            beginning.decline()
        return None


async def _offer(environments: Environments, box: Sandbox, beginning: Beginning) -> None:
    """Freeze a prepared sandbox for the siblings, where that can be done. SandboxLost when it is gone."""
    if not environments.forks:
        return beginning.decline()
    try:
        snapshot = await box.snapshot(shell=False)
    except SandboxLost:
        raise
    except (SandboxError, EnvError, ConfigError) as error:
        _log.info("siblings start from scratch each: %s: %s", type(error).__name__, error)
        environments.forks = isinstance(error, SandboxUnavailable)
        return beginning.decline()
    beginning.offer(snapshot, partial(environments.forget, snapshot))


class ReadySandbox:
    """A clean sandbox of a task that is opened before it is needed and given out once; whoever made it closes it."""

    def __init__(self, environments: Environments, task: SweTask) -> None:
        self._environments, self._task = environments, task
        self._box: Sandbox | None = None
        self._stack = AsyncExitStack()

    async def prepare(self) -> None:
        """Open it. Raises SandboxError."""
        async with AsyncExitStack() as stack:
            box = await stack.enter_async_context(self._environments.open(self._task))
            self._box, self._stack = box, stack.pop_all()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Sandbox]:
        """The one that is ready, or a fresh one; it is closed with the block."""
        box, self._box = self._box, None
        if box is None:
            async with self._environments.open(self._task) as box:
                yield box
        else:
            async with self._stack:
                yield box

    async def aclose(self) -> None:
        """Close what nobody took; idempotent."""
        self._box = None
        await self._stack.aclose()
