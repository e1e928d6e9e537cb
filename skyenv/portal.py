"""Asynchronous objects for synchronous callers: one thread with one event loop, and actors that live on it.

An actor is a single task that runs what it is given one after another, so that whatever is entered in one call may be
left in a later one. Whoever makes a portal closes it. If that is forgotten, the end of the main thread closes it:
actors end, what they own is freed, the process exits. Ctrl-C in a waiting caller cancels the call it waits for.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import anyio
from anyio.abc import TaskStatus
from anyio.from_thread import BlockingPortal
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

T = TypeVar("T")
MAIN_THREAD_SECONDS = 0.2


class Portal:
    """A thread with an event loop. `close` ends every actor and the thread; idempotent."""

    def __init__(self) -> None:
        ready: concurrent.futures.Future[BlockingPortal] = concurrent.futures.Future()
        self._thread = threading.Thread(target=anyio.run, args=(self._serve, ready), name="skyenv portal")
        self._thread.start()
        self._portal = ready.result()

    async def _serve(self, ready: concurrent.futures.Future[BlockingPortal]) -> None:
        async with anyio.create_task_group() as group, BlockingPortal() as portal:
            group.start_soon(self._follow_main_thread, portal)
            ready.set_result(portal)
            await portal.sleep_until_stopped()
            group.cancel_scope.cancel()

    async def _follow_main_thread(self, portal: BlockingPortal) -> None:
        """The interpreter ends its main thread first and then waits for threads like this one."""
        while threading.main_thread().is_alive():  # noqa: ASYNC110  nothing announces its end
            await anyio.sleep(MAIN_THREAD_SECONDS)
        await portal.stop(cancel_remaining=True)

    def actor(self, finalise: Callable[[], Awaitable[None]] | None = None) -> Actor:
        """Start an actor; `finalise` runs in its task when it ends, whatever ends it.

        When the end is a cancellation, so is `finalise`: what it frees shields itself, with its own deadline.
        """
        return Actor(self._portal, finalise)

    def enter(self, context: AbstractAsyncContextManager[T]) -> AbstractContextManager[T]:
        """Wrap an asynchronous context manager: it is entered and left in one task on the loop."""
        return self._portal.wrap_async_context_manager(context)

    def close(self) -> None:
        """Cancel what runs, let actors finalise, and end the thread."""
        if self._thread.is_alive():
            try:
                self._portal.start_task_soon(self._portal.stop, True)
            except RuntimeError:  # it has been stopped by another thread
                pass
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Job:
    """One call on its way through an actor; as a context manager it keeps how the call ended."""

    def __init__(self, function: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self.function = function
        self.done = anyio.Event()
        self.value: Any = None
        self.error: Exception | None = anyio.ClosedResourceError()

    async def run(self) -> None:
        try:
            with self:
                self.value = await self.function()
                self.error = None
        finally:
            self.done.set()

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, Exception):
            self.error = error
        return self.error is error


class Actor:
    """A task that runs calls in order. Made by `Portal.actor`; its methods are for other threads.

    Calls are not wrapped in scopes of their own, so that one may leave open what a later one closes. Hence an
    interrupted call ends the actor.
    """

    def __init__(self, portal: BlockingPortal, finalise: Callable[[], Awaitable[None]] | None) -> None:
        self._portal = portal
        self._finalise = finalise
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._task, self._jobs = portal.start_task(self._work, name="skyenv actor")

    @property
    def ended(self) -> bool:
        """Whether it takes no more calls."""
        return self._task.done()

    def submit(self, function: Callable[[], Coroutine[Any, Any, T]]) -> concurrent.futures.Future[T]:
        """Queue a call. The future fails with `anyio.ClosedResourceError` when the actor ends before it is done."""
        return self._portal.start_task_soon(self._pass, function)

    def call(self, function: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a call and wait for it; an interrupt of the wait cancels the actor."""
        future = self.submit(function)
        try:
            return future.result()
        finally:
            if not future.done():
                self.cancel()

    def cancel(self) -> None:
        """Cancel the running call and what is queued, finalise, end; does not wait."""
        self._task.cancel()

    def close(self) -> None:
        """Finish what is queued, finalise, end; idempotent. Raises what `finalise` raised, once."""
        if not self._task.done():
            self._portal.start_task_soon(self._jobs.aclose)
        self._ended.result()

    async def _pass(self, function: Callable[[], Coroutine[Any, Any, T]]) -> T:
        job = _Job(function)
        await self._jobs.send(job)
        await job.done.wait()
        if job.error is not None:
            raise job.error
        return cast(T, job.value)

    async def _work(self, *, task_status: TaskStatus[MemoryObjectSendStream[_Job]]) -> None:
        send: MemoryObjectSendStream[_Job]
        receive: MemoryObjectReceiveStream[_Job]
        send, receive = anyio.create_memory_object_stream[_Job](16)
        task_status.started(send)
        try:
            async for job in receive:
                await job.run()
        finally:
            send.close()
            _refuse_queued(receive)
            try:
                if self._finalise is not None:
                    await self._finalise()
            finally:
                self._ended.set_result(None)


def _refuse_queued(receive: MemoryObjectReceiveStream[_Job]) -> None:
    """Let nobody wait for a call that will not run."""
    while True:
        try:
            receive.receive_nowait().done.set()
        except (anyio.WouldBlock, anyio.EndOfStream):
            break
    receive.close()
