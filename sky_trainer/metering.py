"""Where the numbers of a run's pipeline go: files of its directory, TensorBoard, Prometheus.

A `Metering` belongs to the event loop of the pipeline whose meter it holds. What it writes beside a training run is its
timeline; a training run's numbers are recorded with the step's own. `rollout` and `eval` record them by themselves.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from anyio import to_thread
from anyio.from_thread import BlockingPortal

from sky_trainer.sections.metrics import MetricsConfig
from skyenv.vector.metrics import Meter
from skyenv.vector.timeline import TimelineFile

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from skyenv.vector.sharded import ShardedPipeline

METRICS, TIMELINE, BOARD = "metrics.jsonl", "timeline.jsonl", "tensorboard"
EVERY = 10.0


class Metering:
    """A meter and its files in `folder` (None: none); open it before the first run.

    `workers`, where others roll out, have meters of their own, whose numbers and timelines are told instead.
    `rows`: also append the numbers to metrics.jsonl, at most every 10 seconds and at the end, `step` being how many
    trajectories are done. `board`: and to TensorBoard.
    """

    def __init__(
        self,
        folder: Path | None,
        config: MetricsConfig | None = None,
        *,
        workers: ShardedPipeline | None = None,
        rows: bool = False,
        board: bool = False,
    ) -> None:
        self._config = config or MetricsConfig()
        self._folder, self._rows = folder, rows and folder is not None
        self.meter = Meter(
            engine_slots=self._config.engine_slots, timeline=folder is not None and self._config.timeline
        )
        self._told: Meter | ShardedPipeline = self.meter if workers is None else workers
        self.port: int | None = None
        self._timeline = TimelineFile(folder / TIMELINE) if folder is not None else None
        self._with_board = board
        self._board: SummaryWriter | None = None
        self._written = 0.0

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Serve to Prometheus if asked, and write what is left at the end. ConfigError for a port that is taken."""
        self._written = anyio.current_time()
        if self._with_board and self._folder is not None:
            self._board = await to_thread.run_sync(_board, self._folder)
        try:
            async with self._served():
                yield
        finally:
            with anyio.CancelScope(shield=True):
                await self._write(last=True)
                if self._board is not None:
                    await to_thread.run_sync(self._board.close)

    @asynccontextmanager
    async def _served(self) -> AsyncIterator[None]:
        """The listener, whose threads ask this loop; so it is opened and closed in another one."""
        if self._config.prometheus_port is None:
            yield
            return
        from skyenv.vector.prometheus import served

        async with BlockingPortal() as portal:
            server = served(partial(portal.call, self._told.numbers), self._config.prometheus_port)
            self.port = await to_thread.run_sync(server.__enter__)
            try:
                yield
            finally:
                with anyio.CancelScope(shield=True):
                    await to_thread.run_sync(server.__exit__, None, None, None)

    async def trajectory_ended(self) -> None:
        """Write what is new."""
        await self._write(last=False)

    async def step(self) -> dict[str, float]:
        """The numbers since the last call; what is new of the timeline is written."""
        await self._write(last=False)
        return self._told.step() if isinstance(self._told, Meter) else await self._told.step()

    async def _write(self, *, last: bool) -> None:
        lifelines = self._told.take_lifelines()
        numbers: Mapping[str, float] = {}
        now = anyio.current_time()
        if self._rows and (last or now - self._written >= EVERY):
            self._written, numbers = now, self.meter.numbers()
        if lifelines or numbers:
            await to_thread.run_sync(self._append, lifelines, numbers)

    def _append(self, lifelines: list[Any], numbers: Mapping[str, float]) -> None:
        assert self._folder is not None
        if lifelines and self._timeline is not None:
            self._timeline.append(lifelines, self._told.origin)
        if not numbers:
            return
        step = int(numbers["trajectories/done"])
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **dict(sorted(numbers.items()))}) + "\n")
        if self._board is not None:
            for name, value in numbers.items():
                self._board.add_scalar(name, value, step)


def _board(folder: Path) -> SummaryWriter:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder / BOARD))
