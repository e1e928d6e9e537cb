"""An inference server as a process: speaks vLLM's dialect and plays chores step by step, from the conversation alone.

    python -m tests.rollout.soak_engine PORT SECONDS

Each answer takes `SECONDS`. Whichever server is asked says the same, so a trajectory goes on at another one.
"""

from __future__ import annotations

import asyncio
import re
import sys

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from skyenv.types import ToolCall
from tests.rollout.adventure import RENDERER

STEP, STEPS = re.compile(rb"echo step-(\d+) "), re.compile(rb"in (\d+) steps")


def next_text(conversation: bytes) -> str:
    """The call that comes next."""
    done = max((int(number) for number in STEP.findall(conversation)), default=0)
    wanted = STEPS.search(conversation)
    assert wanted is not None, conversation
    if done >= int(wanted[1]):
        return RENDERER.format.render_call(ToolCall("finish", {}))
    command = f"echo step-{done + 1} >> /tmp/work; ls /usr | head -3"
    return RENDERER.format.render_call(ToolCall("execute_bash", {"command": command}))


def app(seconds: float) -> Starlette:
    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "chores", "owned_by": "vllm"}]})

    async def health(request: Request) -> Response:
        return Response()

    async def completions(request: Request) -> Response:
        body = await request.json()
        text = next_text(bytes(token for token in body["prompt"] if token < 256))
        await asyncio.sleep(seconds)
        ids = [*RENDERER.encode(text), RENDERER.stop_token_ids[0]]
        choice = {
            "index": 0,
            "text": text,
            "token_ids": ids,
            "logprobs": {"token_logprobs": [-0.25] * len(ids), "tokens": [str(token) for token in ids]},
            "finish_reason": "stop",
            "stop_reason": ids[-1],
        }
        usage = {"prompt_tokens_details": {"cached_tokens": 0}}
        return JSONResponse({"id": "cmpl-1", "object": "text_completion", "choices": [choice], "usage": usage})

    return Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/health", health),
            Route("/v1/completions", completions, methods=["POST"]),
        ]
    )


if __name__ == "__main__":
    uvicorn.run(app(float(sys.argv[2])), port=int(sys.argv[1]), log_level="error")
