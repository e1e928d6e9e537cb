"""The shared policy through our generator, asked as SkyRL's trainer asks, and what its own text environment does.

What stands for SkyRL's inference servers is an HTTP server on this machine that its own client asks.
"""

from __future__ import annotations

import asyncio
import json
import sys
import typing
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # SkyRL's own models need Python 3.12 for nothing but this

import aiohttp.web  # noqa: E402
from skyrl.backends.skyrl_train.inference_servers.engine_utils import get_vllm_sampling_params  # noqa: E402
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient  # noqa: E402
from skyrl.train.config import SamplingParams as AskedSampling  # noqa: E402
from skyrl.train.generators.base import GeneratorOutput  # noqa: E402
from skyrl.train.generators.utils import prepare_generator_input  # noqa: E402

from skyenv.adapters.skyrl import SkyEnvGenerator, dataset  # noqa: E402
from skyenv.types import Message, SamplingParams  # noqa: E402
from tests.adapters import policies  # noqa: E402

SAMPLES = 2
MODEL = "policy"


class Server:
    """Answers what the shared policy says; siblings whose number is among `broken` are told that it failed."""

    def __init__(self, tokenizer: Any, broken: tuple[int, ...] = (), silent: bool = False) -> None:
        self.asked: list[dict[str, Any]] = []
        self.finished: list[str] = []
        self._tokenizer, self._broken, self._silent = tokenizer, broken, silent
        self._policy = policies.HalfRight(policies.renderer(tokenizer))

    async def generate(self, request: aiohttp.web.Request) -> aiohttp.web.Response:
        body, session = await request.json(), request.headers["X-Session-ID"]
        params, ids = body["sampling_params"], body["token_ids"]
        self.asked.append({"session": session, "model": body["model"], **params})
        if int(session.rpartition("#")[2].split(".")[1]) in self._broken:
            return aiohttp.web.json_response({"error": {"message": "broken", "code": 400}}, status=400)
        if self._silent:
            await asyncio.Future()
        turns = self._tokenizer.decode(ids).count("<|im_start|>assistant") - 1
        said = await self._policy.generate(
            ids,
            SamplingParams(max_tokens=params["max_tokens"], stop_token_ids=tuple(params["stop_token_ids"])),
            messages=[Message("assistant", "")] * turns,
            session_id=session,
        )
        content = [{"token": "", "logprob": logprob} for logprob in said.logprobs]
        choice = {"token_ids": said.token_ids, "finish_reason": "stop", "logprobs": {"content": content}}
        return aiohttp.web.json_response({"choices": [choice]})

    async def detokenize(self, request: aiohttp.web.Request) -> aiohttp.web.Response:
        return aiohttp.web.json_response({"prompt": self._tokenizer.decode((await request.json())["tokens"])})

    async def finish(self, request: aiohttp.web.Request) -> aiohttp.web.Response:
        self.finished.append(request.query["session_id"])
        return aiohttp.web.json_response({})


@asynccontextmanager
async def client_of(server: Server) -> AsyncIterator[RemoteInferenceClient]:
    """SkyRL's client of a server on this machine."""
    app = aiohttp.web.Application()
    app.router.add_post("/inference/v1/generate", server.generate)
    app.router.add_post("/detokenize", server.detokenize)
    app.router.add_post("/finish_session", server.finish)
    runner = aiohttp.web.AppRunner(app)
    await runner.setup()
    site = aiohttp.web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    client = RemoteInferenceClient(proxy_url=url, server_urls=[url], model_name=MODEL, data_parallel_size=1)
    try:
        yield client
    finally:
        await client.teardown()
        await runner.cleanup()


def asked(samples: int = SAMPLES, phase: Any = "train") -> tuple[Any, list[str]]:
    """What SkyRL's trainer makes of the rows of our data set."""
    prompts = []
    for number, row in enumerate(dataset(policies.ROLLOUTS)):
        extras = {name: value for name, value in row.items() if name not in ("prompt", "env_class")}
        prompts.append(
            {"prompt": row["prompt"], "env_class": row["env_class"], "env_extras": extras, "uid": str(number)}
        )
    sampling = get_vllm_sampling_params(AskedSampling(max_generate_length=2048, logprobs=1))
    return prepare_generator_input(prompts, samples, sampling, "skyenv", phase, 0)


def rows(output: GeneratorOutput, uids: list[str]) -> list[dict[str, Any]]:
    """The rows of an output."""
    names = [task.task_id for task in policies.ROLLOUTS.load()]
    columns = ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs", "rewards")
    return [
        {
            "task_id": names[int(uid)],
            **dict(zip(("prompt_ids", "completion_ids", "loss_mask", "logprobs", "reward"), values, strict=True)),
        }
        for uid, *values in zip(uids, *(output[column] for column in columns), strict=True)
    ]


async def played(server: Server, rows: Any = "trajectory", **more: Any) -> tuple[GeneratorOutput, list[str]]:
    """A batch through our generator and SkyRL's client."""
    batch, uids = asked(**more)
    async with client_of(server) as client:
        generator = SkyEnvGenerator(policies.ROLLOUTS, client, server._tokenizer, rows=rows, model=MODEL)
        return await generator.generate(batch), uids


def main(out: str) -> None:
    output, uids = asyncio.run(played(Server(policies.tokenizer())))
    Path(out).write_text(json.dumps(rows(output, uids)))


if __name__ == "__main__":
    main(sys.argv[1])
