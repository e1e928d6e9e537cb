"""Rollouts for libraries that ask for one trajectory or group at a time, from many tasks of one event loop, and that
never tell of an end.

Those who roll out at the same time share stages, so widths hold for all of them together, and one provider: the first
opens it, the last closes it, and the next opens a new one. Everything belongs to the event loop it was asked on.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
from anyio.lowlevel import RunVar

import skyenv
from skyenv.adapters.opening import Rollouts
from skyenv.core import Engine, SandboxProvider
from skyenv.errors import ConfigError, EngineError, SandboxUnavailable, did_you_mean
from skyenv.renderer import Tokenizer
from skyenv.types import Completion, FinishReason, SamplingParams, Trajectory, TrajectoryGroup
from skyenv.vector.background import Background
from skyenv.vector.lanes import Stages
from skyenv.vector.request import Numbering


class SharedRollouts:
    """`Rollouts` for one tokenizer on one event loop. Get it by `shared_rollouts`."""

    def __init__(self, rollouts: Rollouts, tokenizer: Tokenizer) -> None:
        self.rollouts, self.tokenizer = rollouts, tokenizer
        self.renderer = rollouts.renderer(tokenizer)
        self.numbers = itertools.count()
        self._tasks = rollouts.load()
        self._by_id = {task.task_id: task for task in self._tasks}
        self._stages = Stages(rollouts.widths)
        self._opened: _Opened | None = None
        self._users = 0

    def check(self, task_id: str) -> None:
        """ConfigError for a task that is not among those of the rollouts."""
        if task_id not in self._by_id:
            hint = did_you_mean(task_id, self._by_id)
            raise ConfigError(f"task {task_id!r} is none of the {len(self._tasks)} of these rollouts{hint}")

    async def play(
        self, task_id: str, engine: Engine, sampling: SamplingParams, numbering: Numbering
    ) -> TrajectoryGroup:
        """These samples of one group, in their order. ConfigError for an unknown task.

        Whatever fails comes back as a trajectory with a failure; leaving by an exception frees what it opened.
        """
        self.check(task_id)
        async with self._provider() as provider:
            pipeline = self.rollouts.pipeline(engine, self.renderer, provider, self._tasks)
            pipeline = replace(pipeline, stages=self._stages, sampling=sampling)
            trajectories: list[Trajectory] = []
            async with pipeline.run_part(self._by_id[task_id], numbering) as run:
                trajectories += [trajectory async for trajectory in run]
        trajectories.sort(key=lambda trajectory: numbering.samples.index(trajectory.sample_index))
        return TrajectoryGroup(task_id, numbering.group_id, trajectories)

    @asynccontextmanager
    async def _provider(self) -> AsyncIterator[SandboxProvider]:
        if self._opened is None:
            self._opened = _Opened(self.rollouts)
        opened = self._opened
        self._users += 1
        try:
            yield await opened.provider()
        finally:
            self._users -= 1
            if not self._users:
                self._opened = None
                await opened.close()


class _Opened:
    """A provider in a task of its own, since whoever opens it is not who closes it."""

    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts = rollouts
        self._ready = anyio.Event()
        self._provider: SandboxProvider | None = None
        self._background = Background(self._hold, "sandboxes")
        self._background.start()

    async def provider(self) -> SandboxProvider:
        """The provider. Raises what kept it from opening."""
        await self._ready.wait()
        if self._provider is None:
            raise self._background.error or SandboxUnavailable("the provider of sandboxes was closed")
        return self._provider

    async def close(self) -> None:
        """Free the provider, also while the caller is being cancelled."""
        await self._background.stop()

    async def _hold(self) -> None:
        try:
            async with skyenv.connect(self._rollouts.sandbox, self._rollouts.token) as provider:
                self._provider = provider
                self._ready.set()
                await anyio.sleep_forever()
        finally:
            self._ready.set()


def sampled(
    whose: str, ids: Sequence[int], logprobs: Sequence[float], reason: str | None, sampling: SamplingParams
) -> Completion:
    """What a library's server answered, without its text; raises EngineError for an answer without exact ids.

    Of the reasons that servers give, aborts alone are told apart; what did not end with a stop id was cut off.
    """
    if reason in ("abort", "aborted"):
        raise EngineError(f"{whose}'s server aborted the generation")
    if not ids:
        raise EngineError(f"{whose}'s server answered no token ids")
    if len(logprobs) != len(ids):
        raise EngineError(f"{whose}'s server answered {len(ids)} token ids but {len(logprobs)} logprobs")
    finish: FinishReason = "stop" if ids[-1] in sampling.stop_token_ids else "length"
    return Completion("", tuple(ids), tuple(logprobs), finish)


def named_task(fields: Mapping[str, Any]) -> str:
    """The task that a row of a data set names: its `task_id`, or the `instance_id` of its `instance`."""
    instance = fields.get("instance")
    named = fields.get("task_id") or (instance.get("instance_id") if isinstance(instance, Mapping) else None)
    if not isinstance(named, str):
        raise ConfigError(
            "data: a row has no column task_id, and no column instance with an instance_id; write the file with"
            " `dataset` of the adapter's module"
        )
    return named


_SHARED: RunVar[list[SharedRollouts]] = RunVar("skyenv shared rollouts")


def shared_rollouts(rollouts: Rollouts, tokenizer: Tokenizer) -> SharedRollouts:
    """Those of this event loop that were made of the same settings, else new ones. ConfigError as `Rollouts` raises."""
    known = _SHARED.get([])
    for shared in known:
        if shared.tokenizer is tokenizer and shared.rollouts == rollouts:
            return shared
    made = SharedRollouts(rollouts, tokenizer)
    _SHARED.set([*known, made])
    return made
