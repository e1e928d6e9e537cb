"""Shards as Ray actors: one asynchronous actor each, wherever the cluster has room. Needs `pip install skyenv[ray]`.

Only bytes cross: JSON both ways (see `skyenv.vector.wire`), the pipeline as an import path with its options. Actors
are never restarted by Ray and their calls never repeated: what happens to a lost shard's groups is decided in one
place, `skyenv.vector.dispatch`. An actor ends with the block that started it, and Ray ends it when the driver dies.
Everything here needs asyncio and an initialised Ray; whoever called `ray.init` shuts it down.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast

import anyio

from skyenv.errors import ConfigError, ShardLost, SkyEnvError
from skyenv.plugins import load
from skyenv.vector.progress import OnEvent
from skyenv.vector.shard import Shard
from skyenv.vector.sharded import ShardedPipeline, ShardLink, ShardRules, StartShard
from skyenv.vector.wire import PipelineSpec, Portion, Word, read_words, write_words

T = TypeVar("T")
CLOSE_TIMEOUT = 90.0
KILL_TIMEOUT = 30.0


def ray_pipeline(
    spec: PipelineSpec,
    rules: ShardRules | None = None,
    actor: Mapping[str, Any] | None = None,
    on_event: OnEvent | None = None,
) -> ShardedPipeline:
    """A pipeline whose shards are Ray actors.

    `actor` are options of Ray's actors: num_cpus, resources, scheduling_strategy, runtime_env (with uv or pip), ...
    Without a scheduling strategy they are spread over the nodes. Raises ConfigError without Ray or a running cluster.
    """
    return ShardedPipeline(ray_shards(spec, actor or {}), rules, on_event)


def ray_shards(spec: PipelineSpec, actor: Mapping[str, Any]) -> StartShard:
    """How `ShardedPipeline` starts a shard as an actor."""
    ray = _ray()
    if not ray.is_initialized():
        raise ConfigError("Ray is not initialised; call ray.init(...) first, with the address of the cluster")
    data = spec.to_bytes()
    options = {"scheduling_strategy": "SPREAD", "num_cpus": 1, **actor, "max_restarts": 0, "max_task_retries": 0}

    @asynccontextmanager
    async def start(index: int) -> AsyncIterator[ShardLink]:
        create = ray.remote(RayShard).options(max_concurrency=1000, **options).remote
        handle = await anyio.to_thread.run_sync(create, data)
        lost = False
        try:
            yield RayLink(handle)
        except ShardLost:
            lost = True
            raise
        finally:
            with anyio.CancelScope(shield=True):
                await _end(handle, lost)

    return start


async def _end(handle: Any, lost: bool) -> None:
    """Close the shard if it can still hear, then end its process; a cluster that does not answer is not waited for."""
    if not lost:
        try:
            with anyio.move_on_after(CLOSE_TIMEOUT):
                await _answer(handle.close.remote())
        except ShardLost:
            pass
    with anyio.move_on_after(KILL_TIMEOUT):
        await anyio.to_thread.run_sync(_ray().kill, handle, abandon_on_cancel=True)


class RayLink:
    """The near end: `skyenv.vector.sharded.ShardLink` over an actor's handle."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def open(self) -> int:
        """Open the pipeline in the actor. ConfigError when it says that its configuration is wrong."""
        answer = await _answer(self._handle.open.remote())
        if isinstance(answer, int):
            return answer
        kind, message = answer
        raise ConfigError(message) if kind == ConfigError.__name__ else ShardLost(f"{kind}: {message}")

    async def submit(self, portion: Portion) -> None:
        """Hand over a portion."""
        await _answer(self._handle.submit.remote(portion.to_bytes()))

    async def cancel(self, number: int) -> None:
        """Cancel a portion."""
        await _answer(self._handle.cancel.remote(number))

    async def announce(self, version: int) -> None:
        """Say which policy version the engine samples from."""
        await _answer(self._handle.announce.remote(version))

    async def step(self) -> Mapping[str, float]:
        """The shard's numbers since the last call."""
        numbers: Mapping[str, float] = await _answer(self._handle.step.remote())
        return numbers

    async def take(self, seconds: float) -> Sequence[Word]:
        """What the shard has to say."""
        words = await _answer(self._handle.take.remote(seconds))
        return await anyio.to_thread.run_sync(read_words, words)


class RayShard:
    """The actor: a `Shard` behind bytes."""

    def __init__(self, spec: bytes) -> None:
        self._spec = PipelineSpec.from_bytes(spec)
        self._shard = Shard(self._open_pipeline)

    def _open_pipeline(self) -> Any:
        return load("factory", self._spec.factory)(self._spec.options)

    async def open(self) -> int | tuple[str, str]:
        """How many environments may be alive, or the kind and the message of what went wrong."""
        try:
            return await self._shard.open()
        except SkyEnvError as error:
            return type(error).__name__, str(error)

    async def submit(self, portion: bytes) -> None:
        """See `Shard.submit`."""
        await self._shard.submit(Portion.from_bytes(portion))

    async def cancel(self, number: int) -> None:
        """See `Shard.cancel`."""
        await self._shard.cancel(number)

    async def announce(self, version: int) -> None:
        """See `Shard.announce`."""
        await self._shard.announce(version)

    async def step(self) -> dict[str, float]:
        """See `Shard.step`."""
        return await self._shard.step()

    async def take(self, seconds: float) -> list[bytes]:
        """See `Shard.take`."""
        words = await self._shard.take(seconds)
        return await anyio.to_thread.run_sync(write_words, words)

    async def close(self) -> None:
        """See `Shard.close`."""
        await self._shard.close()


async def _answer(reference: Awaitable[T]) -> T:
    """What an actor answers; ShardLost when it cannot."""
    try:
        return await reference
    except _ray().exceptions.RayError as error:
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise ShardLost(f"{type(error).__name__}: {first[0]}") from error


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ConfigError("sharding over Ray needs the extra: pip install 'skyenv[ray]'") from error
    return cast("Any", ray)
