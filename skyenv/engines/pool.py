"""Several inference servers as one engine: placement by load, sticky for the prefix cache, fail-over in mid-trajectory.

A trajectory stays on the server that holds its prefix as long as that server answers and is not much fuller than the
others; load is counted in tokens (prompt and answer budget) of the requests under way. A request that a server lost is
sent to another one: with ids in and ids out nothing else of a trajectory lives on a server. A server that failed is
asked for its health before it gets work again, with growing pauses, and `EnginePool.admit` has the last word on that.
The pool opens and closes its engines.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import anyio

from skyenv.engines.openai import OpenAIEngine
from skyenv.errors import ConfigError, EngineError, EngineUnavailable, SkyEnvError
from skyenv.types import Completion, Message, SamplingParams

logger = logging.getLogger(__name__)
SESSIONS_KEPT = 100_000
Admit = Callable[[OpenAIEngine], Awaitable[None]]
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0


@dataclass(frozen=True, slots=True)
class ServerStats:
    """One server so far: requests and tokens under way, requests answered and lost, share of prompt tokens cached."""

    url: str
    up: bool
    requests: int
    tokens: int
    answered: int
    lost: int
    cache_hit_rate: float | None


@dataclass(eq=False, slots=True)
class _Server:
    engine: OpenAIEngine
    up: bool = True
    requests: int = 0
    tokens: int = 0
    answered: int = 0
    lost: int = 0
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    pause: float = FIRST_PAUSE
    next_look: float = 0.0
    looking: bool = False
    asking: set[anyio.CancelScope] = field(default_factory=set)

    def stats(self) -> ServerStats:
        rate = (
            self.cached_tokens / self.prompt_tokens if self.cached_tokens is not None and self.prompt_tokens else None
        )
        return ServerStats(self.engine.url, self.up, self.requests, self.tokens, self.answered, self.lost, rate)


class EnginePool:
    """An `Engine` over OpenAI-compatible servers; used inside `async with`, which opens and closes them.

    Servers that are down when it is entered are taken in once they answer; EngineUnavailable when none does.
    `slack` is how much fuller than the least loaded server a trajectory's own may be before it moves, as a share.
    `patience` bounds in seconds how long a request looks for a server that answers. `admit` is awaited before a server
    that was out gets work, with its engine; an EngineError keeps it out. Whoever keeps servers' weights sets it.
    """

    def __init__(self, engines: Sequence[OpenAIEngine], *, slack: float = 0.5, patience: float = 120.0) -> None:
        if not engines:
            raise ConfigError("engines: the pool needs at least one")
        if slack < 0 or patience <= 0:
            raise ConfigError("slack must be at least 0 and patience above 0")
        self._servers = [_Server(engine) for engine in engines]
        self._slack, self._patience = slack, patience
        self._homes: OrderedDict[str, _Server] = OrderedDict()
        self._version = 0
        self.admit: Admit = _admit
        self._open = AsyncExitStack()

    @classmethod
    def at(cls, urls: Sequence[str], model: str = "", *, slack: float = 0.5, patience: float = 120.0) -> EnginePool:
        """A pool of the servers at `urls`; what one of them refuses goes to the next, not to the same one again."""
        return cls([OpenAIEngine(url, model, retry_for=0.0) for url in urls], slack=slack, patience=patience)

    @property
    def engines(self) -> list[OpenAIEngine]:
        """The engines of its servers, in order."""
        return [server.engine for server in self._servers]

    def is_up(self, url: str) -> bool:
        """Whether the server at `url` gets work."""
        return any(server.up for server in self._servers if server.engine.url == url)

    def put_out(self, url: str, error: SkyEnvError) -> None:
        """Give the server at `url` no work until it is well and admitted; what it works on goes to another one."""
        for server in self._servers:
            if server.engine.url == url:
                self._down(server, error)
                for scope in server.asking:
                    scope.cancel()

    @property
    def policy_version(self) -> int:
        """The version that is stamped on completions; setting it sets all servers'."""
        return self._version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self._version = version
        for server in self._servers:
            server.engine.policy_version = version

    @property
    def stats(self) -> list[ServerStats]:
        """What each server did so far."""
        return [server.stats() for server in self._servers]

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            for server in self._servers:
                await stack.enter_async_context(server.engine.opened_later())
            async with anyio.create_task_group() as group:
                for server in self._servers:
                    group.start_soon(self._look, server)
            if not any(server.up for server in self._servers):
                raise EngineUnavailable(f"none of {', '.join(s.engine.url for s in self._servers)} answers")
            self._open = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            await self._open.aclose()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        messages: Sequence[Message] = (),
        session_id: str = "",
    ) -> Completion:
        """One completion, from whichever server answers. Raises EngineError; EngineUnavailable when none does."""
        deadline = anyio.current_time() + self._patience
        while True:
            server = await self._choose(session_id, deadline)
            try:
                return await self._ask(server, prompt_ids, sampling, messages=messages, session_id=session_id)
            except EngineUnavailable as error:
                self._down(server, error)
                if anyio.current_time() >= deadline:
                    raise

    async def _ask(
        self, server: _Server, prompt_ids: Sequence[int], sampling: SamplingParams, **rest: Any
    ) -> Completion:
        tokens = len(prompt_ids) + sampling.max_tokens
        server.requests, server.tokens = server.requests + 1, server.tokens + tokens
        completion = None
        with anyio.CancelScope() as scope:
            server.asking.add(scope)
            try:
                completion = await server.engine.generate(prompt_ids, sampling, **rest)
            finally:
                server.asking.discard(scope)
                server.requests, server.tokens = server.requests - 1, server.tokens - tokens
        if completion is None:
            raise EngineUnavailable(f"{server.engine.url} was put out")
        server.answered += 1
        server.pause = FIRST_PAUSE
        if completion.cached_tokens is not None:
            server.prompt_tokens += len(prompt_ids)
            server.cached_tokens = (server.cached_tokens or 0) + completion.cached_tokens
        return completion

    async def _choose(self, session_id: str, deadline: float) -> _Server:
        """The session's own server or the least loaded one, once any is up."""
        while True:
            await self._look_again()
            up = [server for server in self._servers if server.up]
            if up:
                return self._place(session_id, up)
            if anyio.current_time() >= deadline:
                raise EngineUnavailable(f"none of {len(self._servers)} servers answers")
            next_look = min(server.next_look for server in self._servers)
            await anyio.sleep(
                min(max(0.05, next_look - anyio.current_time()), max(0.05, deadline - anyio.current_time()))
            )

    def _place(self, session_id: str, up: Sequence[_Server]) -> _Server:
        least = min(up, key=lambda server: (server.tokens, server.answered))
        home = self._homes.get(session_id)
        if home is None or not home.up or home.tokens > least.tokens * (1 + self._slack) + self._slack * self._mean():
            home = least
        if session_id:
            self._homes[session_id] = home
            self._homes.move_to_end(session_id)
            while len(self._homes) > SESSIONS_KEPT:
                self._homes.popitem(last=False)
        return home

    def _mean(self) -> float:
        """Tokens under way of the average server."""
        return sum(server.tokens for server in self._servers) / len(self._servers)

    def _down(self, server: _Server, error: SkyEnvError) -> None:
        """No more work until it says that it is well."""
        server.lost += 1
        if server.up:
            logger.warning("%s is out: %s", server.engine.url, error)
        server.up = False
        server.next_look = anyio.current_time() + server.pause
        server.pause = min(2 * server.pause, LONGEST_PAUSE)

    async def _look_again(self) -> None:
        """Ask servers that are out whether they are well, each when its pause is over and by one request at a time."""
        now = anyio.current_time()
        for server in self._servers:
            if not server.up and not server.looking and now >= server.next_look:
                server.next_look = now + server.pause
                await self._look(server)

    async def _look(self, server: _Server) -> None:
        was, server.up = server.up, False
        server.looking = True
        try:
            server.up = await server.engine.healthy() and await self._welcome(server)
        except EngineUnavailable:
            pass
        finally:
            server.looking = False
        if not server.up:
            server.next_look = anyio.current_time() + server.pause
            server.pause = min(2 * server.pause, LONGEST_PAUSE)
        elif not was:
            logger.info("%s is back", server.engine.url)

    async def _welcome(self, server: _Server) -> bool:
        """Ask a server that is well what it is, and whether it may work. EngineError when it is no such server."""
        await server.engine.known()
        try:
            await self.admit(server.engine)
        except EngineError as error:
            logger.warning("%s stays out: %s", server.engine.url, error)
            return False
        return True


async def _admit(engine: OpenAIEngine) -> None:
    """Any server that is well gets work."""
