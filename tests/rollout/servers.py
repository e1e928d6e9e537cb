"""Inference servers on loopback that speak the vLLM, SGLang and chat dialects over real HTTP.

The model is a deterministic walk over byte ids; what a client may get wrong is checked (400), and faults are set by
the test. Real vLLM and SGLang are integration suites of their own: these servers pin down what we send and accept.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

VLLM_KEYS = {
    "model", "prompt", "request_id", "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "stop_token_ids", "logprobs", "return_token_ids", "skip_special_tokens",
    "spaces_between_special_tokens", "seed",
}  # fmt: skip
SGLANG_KEYS = {
    "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "stop_token_ids", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim",
    "sampling_seed",
}  # fmt: skip


@dataclass
class Server:
    """What it saw, and what it is told to do wrong: a list of answers to give before it works."""

    owner: str = "vllm"
    url: str = ""
    delay: float = 0.0
    faults: list[Response] = field(default_factory=list)
    spoil: Any = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    hung_up: int = 0
    running: int = 0
    weight_version: str = "default"
    ill: bool = False
    ill_after: int | None = None
    cached: int | None = None

    def forget(self) -> None:
        """Work again, as if just started."""
        self.delay, self.spoil, self.hung_up = 0.0, None, 0
        self.ill, self.ill_after, self.cached = False, None, None
        self.weight_version = "default"
        for record in (self.faults, self.bodies, self.headers, self.aborted):
            record.clear()

    def sample(self, prompt: list[int], limit: int, stops: list[int]) -> tuple[list[int], list[float], str]:
        """Ids that follow from the prompt alone."""
        state, ids = sum((place + 1) * token for place, token in enumerate(prompt)) % 9973, []
        while len(ids) < limit:
            state = (state * 137 + 71) % 9973
            ids.append(32 + state % 90)
            if ids[-1] in stops:
                return ids, [-0.5 - token / 1000 for token in ids], "stop"
        return ids, [-0.5 - token / 1000 for token in ids], "length"

    async def busy(self, request: Request) -> Response | None:
        """Take the time, notice a client that hangs up, then the next fault."""
        self.running += 1
        try:
            waited = 0.0
            while waited < self.delay:
                if await request.is_disconnected():
                    self.hung_up += 1
                    return Response(status_code=499)
                await asyncio.sleep(0.01)
                waited += 0.01
        finally:
            self.running -= 1
        return self.faults.pop(0) if self.faults else None

    async def models(self, request: Request) -> Response:
        if self.owner == "none":
            return Response("no such page", 404)
        return JSONResponse({"object": "list", "data": [{"id": "toy", "owned_by": self.owner}]})

    async def completions(self, request: Request) -> Response:
        body = await self.note(request)
        self.ill = self.ill or (self.ill_after is not None and len(self.bodies) > self.ill_after)
        if self.ill:
            return Response("engine is dead", 500)
        if (fault := await self.busy(request)) is not None:
            return fault
        if set(body) - VLLM_KEYS or not all(isinstance(token, int) for token in body["prompt"]):
            return JSONResponse({"error": {"message": f"bad request {sorted(set(body) - VLLM_KEYS)}"}}, 400)
        ids, logprobs, reason = self.sample(body["prompt"], body["max_tokens"], body["stop_token_ids"])
        shown = ids[:-1] if reason == "stop" else ids
        choice = {
            "index": 0,
            "text": bytes(shown).decode(),
            "token_ids": ids,
            "logprobs": {"token_logprobs": logprobs, "tokens": [chr(token) for token in ids]},
            "finish_reason": reason,
            "stop_reason": ids[-1] if reason == "stop" else None,
        }
        answer: dict[str, Any] = {"id": "cmpl-1", "object": "text_completion", "choices": [choice]}
        if self.cached is not None:
            answer["usage"] = {"prompt_tokens_details": {"cached_tokens": self.cached}}
        return JSONResponse(self.spoiled(answer))

    async def health(self, request: Request) -> Response:
        return Response(status_code=503 if self.ill else 200)

    async def generate(self, request: Request) -> Response:
        body = await self.note(request)
        if (fault := await self.busy(request)) is not None:
            return fault
        params = body["sampling_params"]
        if set(params) - SGLANG_KEYS or not body["return_logprob"] or params["top_k"] == 0:
            return JSONResponse({"error": {"message": "bad request"}}, 400)
        ids, logprobs, reason = self.sample(body["input_ids"], params["max_new_tokens"], params["stop_token_ids"])
        answer = {
            "text": bytes(ids).decode(),
            "output_ids": ids,
            "meta_info": {
                "id": body["rid"],
                "finish_reason": {"type": reason},
                "completion_tokens": len(ids),
                "weight_version": self.weight_version,
                "output_token_logprobs": [[value, token, None] for value, token in zip(logprobs, ids, strict=True)],
            },
        }
        return JSONResponse(self.spoiled(answer))

    async def chat(self, request: Request) -> Response:
        body = await self.note(request)
        if (fault := await self.busy(request)) is not None:
            return fault
        text = f"{len(body['messages'])} messages, the last from {body['messages'][-1]['role']}"
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        return JSONResponse(self.spoiled({"choices": [choice]}))

    async def abort(self, request: Request) -> Response:
        self.aborted.append((await request.json())["rid"])
        return Response()

    async def note(self, request: Request) -> dict[str, Any]:
        body: dict[str, Any] = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        return body

    def spoiled(self, answer: Any) -> Any:
        return answer if self.spoil is None else self.spoil(answer)

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/health", self.health),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/generate", self.generate, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/abort_request", self.abort, methods=["POST"]),
            ]
        )


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    """Serve on a free port of loopback until the block ends."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(server.app(), log_level="error", lifespan="off", timeout_graceful_shutdown=1)
        runner = uvicorn.Server(config)
        thread = threading.Thread(target=runner.run, kwargs={"sockets": [listener]})
        server.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.listen(128)
        thread.start()
        try:
            yield server
        finally:
            runner.should_exit = True
            thread.join(100)
