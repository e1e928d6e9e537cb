"""Bounded admission to the stages of a pipeline: who may go in, in which order, and how wide a stage is now.

A `Lane` admits by rank (evaluation before training, older groups before younger ones, so siblings finish together) and
can be widened or narrowed while in use. `Stages` are the lanes that one or several runs share; nothing here starts a
task, holds a lock or knows what a slot is used for. All of it belongs to one event loop.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import anyio
import anyio.lowlevel

from skyenv.errors import ConfigError

Stage = Literal["init", "run", "eval"]
STAGES: tuple[Stage, ...] = ("init", "run", "eval")
Rank = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StageWidths:
    """How many trajectories a stage serves at once, and how many environments may be alive (None: the sum).

    With `most_init` or `most_eval` that stage follows the load between its own width and this bound: init widens while
    the run stage has free slots and nothing to fill them, eval widens while finished trajectories wait for it. Up to
    `ahead` of the oldest trajectories have what their evaluation needs opened while they still run, where the
    environment can; a sandbox of such a kind is alive beside those that `live` counts.
    """

    init: int = 8
    run: int = 32
    eval: int = 8
    live: int | None = None
    most_init: int | None = None
    most_eval: int | None = None
    ahead: int = 0

    def __post_init__(self) -> None:
        if self.ahead < 0:
            raise ConfigError(f"widths.ahead: at least 0, not {self.ahead}")
        if min(self.init, self.run, self.eval, 1 if self.live is None else self.live) < 1:
            raise ConfigError(f"widths: each must be at least 1, not {self}")
        for name, least, most in (("most_init", self.init, self.most_init), ("most_eval", self.eval, self.most_eval)):
            if most is not None and most < least:
                raise ConfigError(f"widths.{name}: {most} is less than the stage's own width {least}")

    @property
    def most_live(self) -> int:
        """The cap on living environments."""
        return self.live or (self.most_init or self.init) + self.run + (self.most_eval or self.eval)


class Lane:
    """Slots that are handed out by rank, lowest first, then first come first served."""

    def __init__(self, width: int) -> None:
        self.busy = 0
        self._width = width
        self._waiters: list[tuple[Rank, int, anyio.Event]] = []
        self._numbers = itertools.count()

    @property
    def width(self) -> int:
        """How many slots there are; fewer than are taken means that the next ones to come back are not given out."""
        return self._width

    @width.setter
    def width(self, width: int) -> None:
        self._width = width
        self._admit()

    @property
    def waiting(self) -> int:
        """How many are waiting for a slot."""
        return len(self._waiters)

    async def acquire(self, rank: Rank = ()) -> None:
        """Wait for a slot; whoever got it calls `release`. Cancellation leaves the queue and takes no slot."""
        if self.busy < self._width and not self.waiting:
            self.busy += 1
            await anyio.lowlevel.cancel_shielded_checkpoint()
            return
        granted = anyio.Event()
        entry = (rank, next(self._numbers), granted)
        heapq.heappush(self._waiters, entry)
        taken = False
        try:
            await granted.wait()
            taken = True
        finally:
            if not taken:
                self._leave(entry)

    def _leave(self, entry: tuple[Rank, int, anyio.Event]) -> None:
        """Cancelled: out of the queue, or the slot that just came is for the next one."""
        if entry[2].is_set():
            self.release()
        else:
            self._waiters.remove(entry)
            heapq.heapify(self._waiters)

    def release(self) -> None:
        """Give a slot back."""
        self.busy -= 1
        self._admit()

    @asynccontextmanager
    async def slot(self, rank: Rank = ()) -> AsyncIterator[None]:
        """A slot for the block."""
        await self.acquire(rank)
        try:
            yield
        finally:
            self.release()

    def _admit(self) -> None:
        while self._waiters and self.busy < self._width:
            self.busy += 1
            heapq.heappop(self._waiters)[2].set()


class Stages:
    """The lanes of a pipeline. Runs that share one object share its widths and overtake each other by priority."""

    def __init__(self, widths: StageWidths) -> None:
        self.widths = widths
        self.lanes = MappingProxyType({stage: Lane(width) for stage, width in _widths(widths).items()})
        self.live = Lane(widths.most_live)
        self.ahead = Lane(widths.ahead)

    def follow(self) -> None:
        """Widen or narrow init and eval by one where the load asks for it; called at every change of state."""
        widths, (init, run, evaluation) = self.widths, (self.lanes[stage] for stage in STAGES)
        starving = run.busy + run.waiting < run.width
        if widths.most_init is not None:
            if starving and init.waiting and init.width < widths.most_init:
                init.width += 1
            elif run.waiting > run.width // 4 and init.width > widths.init:
                init.width -= 1
        if widths.most_eval is not None:
            if evaluation.waiting and evaluation.width < widths.most_eval:
                evaluation.width += 1
            elif evaluation.busy < evaluation.width - 1 and evaluation.width > widths.eval:
                evaluation.width -= 1


def _widths(widths: StageWidths) -> dict[Stage, int]:
    return {"init": widths.init, "run": widths.run, "eval": widths.eval}
