"""One run in the hands of its consumer, whoever rolls out: in this process or over shards.

The generator knows the rolling and never the `TrajectoryRun`: when a consumer breaks, the run's last reference goes and
the event loop closes the generator, which stops the rolling.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from types import AsyncGeneratorType, TracebackType
from typing import Protocol, Self

from anyio.streams.memory import MemoryObjectReceiveStream

from skyenv.errors import SkyEnvError
from skyenv.types import Trajectory
from skyenv.vector.progress import Progress


class Rolling(Protocol):
    """What makes the trajectories of one run."""

    @property
    def error(self) -> SkyEnvError | None:
        """What ended it before its end."""
        ...

    @property
    def progress(self) -> Progress:
        """Where everything stands."""
        ...

    @property
    def numbers(self) -> dict[str, float]:
        """What it did so far, by the names of `skyenv.vector.metrics`."""
        ...

    def start(self) -> MemoryObjectReceiveStream[Trajectory]:
        """Begin; what comes back can be read from the stream, which ends with the run."""
        ...

    def taken(self) -> None:
        """The consumer took a trajectory; it may have been waited for."""
        ...

    async def stop(self) -> None:
        """Cancel what is under way and wait until it is freed; idempotent, and harmless before `start`."""
        ...


class TrajectoryRun:
    """One run of a pipeline: an asynchronous iterator of trajectories, and a context manager that stops it."""

    def __init__(self, rolling: Rolling) -> None:
        self._rolling = rolling
        self._stream = _trajectories(rolling)

    @property
    def progress(self) -> Progress:
        """Where everything stands now; over shards, as they last said."""
        return self._rolling.progress

    @property
    def numbers(self) -> dict[str, float]:
        """What it did so far, by the names of `skyenv.vector.metrics`.

        Of all runs that share its meter; over shards, merged as `skyenv.vector.merged` says.
        """
        return self._rolling.numbers

    def __aiter__(self) -> AsyncIterator[Trajectory]:
        return self._stream

    async def __anext__(self) -> Trajectory:
        return await anext(self._stream)

    async def aclose(self) -> None:
        """Stop what is under way and free its environments; idempotent, callable from any task."""
        await self._rolling.stop()
        if isinstance(self._stream, AsyncGeneratorType) and not self._stream.ag_running:
            await self._stream.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


async def _trajectories(rolling: Rolling) -> AsyncGenerator[Trajectory, None]:
    with rolling.start() as results:
        try:
            async for trajectory in results:
                rolling.taken()
                yield trajectory
        finally:
            await rolling.stop()
    if rolling.error is not None:
        raise rolling.error
