"""The adventure with a costly beginning that siblings can share, and an evaluation that can be opened ahead."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio

from skyenv.core import Beginning, Task
from skyenv.errors import SandboxError
from tests.rollout.adventure import Adventure, Ledger, Plan


@dataclass
class Camp(Ledger):
    """What siblings share, and what was opened ahead: numbers of living snapshots and graders, and how often each."""

    prepared: int = 0
    forked: int = 0
    offered: int = 0
    snapshots: int = 0
    graders: int = 0
    most_graders: int = 0
    opened_ahead: int = 0
    prefetched: list[tuple[tuple[str, ...], int]] = field(default_factory=list)


@dataclass(frozen=True)
class Sharing:
    """Seconds of a preparation and of a fork, and what goes wrong with them."""

    prepare: float = 100.0
    fork: float = 1.0
    can_fork: bool = True
    fork_error: Exception | None = None
    free_error: Exception | None = None
    ahead: float = 5.0
    ahead_error: Exception | None = None


class Camper(Adventure):
    """`begin_with`, `aprepare_evaluation` and `aprefetch`, with a ledger."""

    def __init__(self, camp: Camp, plan: Callable[[str], Plan], sharing: Sharing = Sharing()) -> None:
        super().__init__(camp, plan)
        self._camp, self._sharing = camp, sharing
        self._beginning: Beginning | None = None
        self._grader = False

    def begin_with(self, beginning: Beginning) -> None:
        self._beginning = beginning

    async def areset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        answer = await super().areset(seed=seed, options=options)
        beginning, self._beginning = self._beginning, None
        if beginning is not None and beginning.snapshot is not None and await self._fork(beginning):
            return answer
        await anyio.sleep(self._sharing.prepare)
        self._camp.prepared += 1
        if beginning is not None and beginning.wanted:
            if self._sharing.can_fork:
                self._camp.snapshots += 1
                self._camp.offered += 1
                beginning.offer(f"snapshot {self._camp.offered}", self._free)
            else:
                beginning.decline()
        return answer

    async def _fork(self, beginning: Beginning) -> bool:
        await anyio.sleep(self._sharing.fork)
        if isinstance(self._sharing.fork_error, SandboxError):
            beginning.decline()
            return False
        if self._sharing.fork_error is not None:
            raise self._sharing.fork_error
        assert self._camp.snapshots > 0, "freed too early"
        self._camp.forked += 1
        return True

    async def _free(self) -> None:
        self._camp.snapshots -= 1
        await anyio.sleep(0.1)
        if self._sharing.free_error is not None:
            raise self._sharing.free_error

    async def aprepare_evaluation(self) -> None:
        await anyio.sleep(self._sharing.ahead)
        if self._sharing.ahead_error is not None:
            raise self._sharing.ahead_error
        self._grader = True
        self._camp.opened_ahead += 1
        self._camp.graders += 1
        self._camp.most_graders = max(self._camp.most_graders, self._camp.graders)

    async def aprefetch(self, tasks: Sequence[Task | str], count: int) -> None:
        names = tuple(task if isinstance(task, str) else task.task_id for task in tasks)
        await self._spend(self._planned("prefetch").init, self._planned("prefetch").init_error)
        self._camp.prefetched.append((names, count))

    async def aclose(self) -> None:
        if self._grader:
            self._grader = False
            self._camp.graders -= 1
        await super().aclose()
