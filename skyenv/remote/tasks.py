"""A task group for background work whose body's own exception comes out as itself, not wrapped in a group."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup


@asynccontextmanager
async def background_tasks() -> AsyncIterator[TaskGroup]:
    """A task group that is cancelled when the block ends. A single failure is raised bare."""
    try:
        async with anyio.create_task_group() as group:
            try:
                yield group
            finally:
                group.cancel_scope.cancel()
    except BaseExceptionGroup as failures:
        if len(failures.exceptions) == 1:
            raise failures.exceptions[0] from None
        raise
