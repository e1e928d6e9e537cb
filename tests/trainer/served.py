"""Engines of our own served in this process: the real application, control and files, with the network cut at will."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx

from sky_trainer.engines import HFEngine
from sky_trainer.serving import ServedEngine
from sky_trainer.sync.delivery import Server
from skyenv.engines.openai import OpenAIEngine
from skyenv.engines.pool import EnginePool
from skyenv.engines.sglang import SGLangControl


class Cable(httpx.AsyncBaseTransport):
    """The way to one application. `cut`: nothing gets through; `cut_at`: it is cut when this path is asked for."""

    def __init__(self, app: Any) -> None:
        self._inner = httpx.ASGITransport(app)
        self.cut, self.cut_at = False, ""
        self.asked: list[str] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.url.path)
        self.cut = self.cut or request.url.path == self.cut_at
        if self.cut:
            raise httpx.ConnectError("the cable is cut", request=request)
        return await self._inner.handle_async_request(request)


class Rack:
    """Servers, each with a copy of the policy, and the pool over them."""

    def __init__(self, pool: EnginePool, servers: list[Server], cables: list[Cable], models: list[Any]) -> None:
        self.pool, self.servers, self.cables, self.models = pool, servers, cables, models


@asynccontextmanager
async def rack(models: Sequence[Any], tokenizer: Any) -> AsyncIterator[Rack]:
    """One server a model, each over a copy of it."""
    async with AsyncExitStack() as stack:
        held, cables, engines = [copy.deepcopy(model).eval() for model in models], [], []
        for number, model in enumerate(held):
            engine = await stack.enter_async_context(HFEngine(model, tokenizer.decode, [tokenizer.eos_token_id]))
            cables.append(Cable(ServedEngine(engine, model, "policy").app()))
            engines.append(OpenAIEngine(f"http://server{number}", retry_for=0.0, transport=cables[-1]))
        pool = await stack.enter_async_context(EnginePool(engines))
        servers = []
        for engine, cable in zip(engines, cables, strict=True):
            control = SGLangControl(engine, transport=cable)
            servers.append(Server(engine, await stack.enter_async_context(control)))
        yield Rack(pool, servers, cables, held)
