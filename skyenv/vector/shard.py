"""One shard of a pipeline: the far side, which runs the groups it is given and says what came of them.

The shard opens its own pipeline (with its own connections to sandboxes and engines) in a task of its own and frees it
in `close`. Invariants: all groups share the stages, so the live cap is the shard's; every group that was submitted
ends with exactly one `End`, after its environments are freed. A shard decides nothing: what is lost with it runs again
elsewhere by the choice of whoever handed it out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import anyio

from skyenv.errors import ConfigError, EnvError, SkyEnvError, boundary
from skyenv.vector.background import Background
from skyenv.vector.lanes import Stages
from skyenv.vector.metrics import Meter
from skyenv.vector.pipeline import RolloutPipeline
from skyenv.vector.progress import Progress
from skyenv.vector.request import Numbering
from skyenv.vector.stopping import FailureThreshold
from skyenv.vector.wire import Beat, End, Lived, Portion, Result, Versioned, Word

OpenPipeline = Callable[[], AbstractAsyncContextManager[RolloutPipeline]]

MOST_AT_ONCE = 64
NEVER = FailureThreshold(share=1.0)


class Shard:
    """The far side of one shard; its methods are what a transport carries. All on one event loop."""

    def __init__(self, open_pipeline: OpenPipeline) -> None:
        self._open_pipeline = open_pipeline
        self._stages: Stages | None = None
        self._meter = Meter()
        self._engine: object = None
        self._opened = anyio.Event()
        self._background = Background(self._serve, "shard")
        self._orders, self._todo = anyio.create_memory_object_stream[Portion](math.inf)
        self._words: list[Word] = []
        self._spoken = anyio.Event()
        self._scopes: dict[int, anyio.CancelScope] = {}
        self._progress: dict[int, Callable[[], Progress]] = {}

    async def open(self) -> int:
        """Open the pipeline; returns how many environments may be alive. Once. Raises what the opening raised."""
        self._background.start()
        await self._opened.wait()
        if self._stages is None:
            raise self._background.error or EnvError("the shard was closed while it was opened")
        return self._stages.live.width

    async def submit(self, portion: Portion) -> None:
        """Run a portion; returns at once."""
        self._scopes[portion.number] = anyio.CancelScope()
        self._orders.send_nowait(portion)

    async def cancel(self, number: int) -> None:
        """Cancel a portion; its `End` comes when it is freed. Of one that is over, nothing."""
        if number in self._scopes:
            self._scopes[number].cancel()

    async def announce(self, version: int) -> None:
        """The engine stamps this policy version from now on, if it is one that is told."""
        if isinstance(self._engine, Versioned):
            self._engine.policy_version = version

    async def step(self) -> dict[str, float]:
        """The numbers of its meter since the last call."""
        return self._meter.step()

    async def take(self, seconds: float) -> list[Word]:
        """What there is to say, at the latest after `seconds`; a `Beat` stands last."""
        if not self._words:
            self._spoken = anyio.Event()
            with anyio.move_on_after(seconds):
                await self._spoken.wait()
        words, self._words = self._words[:MOST_AT_ONCE], self._words[MOST_AT_ONCE:]
        lifelines = tuple(self._meter.take_lifelines())
        lived = [Lived(self._meter.origin, lifelines)] if lifelines else []
        return [*lived, *words, self._beat()]

    async def close(self) -> None:
        """Cancel everything and close the pipeline; idempotent."""
        await self._background.stop()
        self._orders.close()
        self._todo.close()

    async def _serve(self) -> None:
        try:
            with boundary(ConfigError, "factory"):
                context = self._open_pipeline()
            async with context as pipeline:
                stages = pipeline.stages or Stages(pipeline.widths)
                self._engine = pipeline.engine
                self._meter = pipeline.meter or self._meter
                # Too many failures are counted over all shards, where the portions are handed out.
                pipeline = dataclasses.replace(pipeline, stages=stages, meter=self._meter, failures=NEVER)
                self._stages = stages
                self._opened.set()
                async with anyio.create_task_group() as group:
                    async for portion in self._todo:
                        group.start_soon(self._run, pipeline, portion)
        finally:
            self._opened.set()

    async def _run(self, pipeline: RolloutPipeline, portion: Portion) -> None:
        end = End(portion.number)
        try:
            with self._scopes[portion.number]:
                end = await self._roll_out(pipeline, portion)
        finally:
            del self._scopes[portion.number]
            self._progress.pop(portion.number, None)
        self._say(end)

    async def _roll_out(self, pipeline: RolloutPipeline, portion: Portion) -> End:
        numbering = Numbering(portion.group_id, portion.samples)
        try:
            run = pipeline.run_part(portion.task_id, numbering, enough=portion.enough, priority=portion.priority)
            self._progress[portion.number] = lambda: run.progress
            async with run:
                async for trajectory in run:
                    self._say(Result(portion.number, trajectory))
        except SkyEnvError as error:
            return End(portion.number, str(error), isinstance(error, ConfigError))
        return End(portion.number)

    def _say(self, word: Word) -> None:
        self._words.append(word)
        self._spoken.set()

    def _beat(self) -> Beat:
        return Beat(self._meter.numbers(), {number: _counts(progress()) for number, progress in self._progress.items()})


def _counts(now: Progress) -> tuple[int, ...]:
    """In the order of `skyenv.vector.wire.STATES`."""
    return now.init_wait, now.init, now.run_wait, now.run, now.eval_wait, now.eval, now.close
