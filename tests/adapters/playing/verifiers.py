"""The policy's rows through verifiers' own environment, agent, interception server and train client."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import verifiers.v1 as vf
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from skyenv.core import Engine
from skyenv.renderer import Renderer
from skyenv.types import Message, SamplingParams
from tests.adapters import policies
from tests.adapters.playing.serving import running

GROUP_SIZE = 2


class Served:
    """An engine behind vLLM's generate route. Which sample a session is follows from the order of its first request."""

    def __init__(self, engine: Engine, renderer: Renderer, tasks: dict[str, str]) -> None:
        self._engine, self._renderer, self._tasks = engine, renderer, tasks
        self._sessions: dict[str, str] = {}
        self.asked: list[dict[str, Any]] = []

    def app(self) -> Starlette:
        routes = [Route("/inference/v1/generate", self.generate, methods=["POST"])]
        return Starlette(routes=[*routes, Route("/v1/models", self.models)])

    async def models(self, request: Request) -> JSONResponse:
        return JSONResponse({"data": [{"id": "policy"}]})

    async def generate(self, request: Request) -> JSONResponse:
        body = await request.json()
        self.asked.append(body)
        ids, sampling = body["token_ids"], body["sampling_params"]
        text = self._renderer.decode([*ids, self._renderer.stop_token_ids[0]])
        session = self._session(request.headers["x-session-id"], text)
        answers = [Message("assistant", "")] * (text.count("<|im_start|>assistant\n") - 1)
        wanted = SamplingParams(max_tokens=sampling["max_tokens"], stop_token_ids=tuple(sampling["stop_token_ids"]))
        done = await self._engine.generate(ids, wanted, messages=answers, session_id=session)
        pairs = zip(done.token_ids, done.logprobs, strict=True)
        content = [{"token": f"token_id:{number}", "logprob": logprob} for number, logprob in pairs]
        choice = {"token_ids": done.token_ids, "logprobs": {"content": content}, "finish_reason": done.finish_reason}
        return JSONResponse({"request_id": "r", "choices": [choice]})

    def _session(self, session: str, text: str) -> str:
        (task_id,) = [task_id for task_id, problem in self._tasks.items() if problem in text]
        before = sum(name.startswith(f"{task_id}#") for name in self._sessions.values())
        return self._sessions.setdefault(session, f"{task_id}#0.{before}.1")


def environment(**harness: Any) -> vf.Env[Any]:
    """Our plugins, found as verifiers finds them."""
    taskset = {"id": "skyenv_verifiers", "env_options": {"prompt": "brief"}}
    agent: dict[str, Any] = {"harness": {"id": "skyenv_verifiers", "max_turns": 4, **harness}}
    config = vf.env_config_type("skyenv_verifiers").model_validate({"taskset": taskset, "agent": agent})
    return vf.load_environment(config)


def context(url: str, folder: str) -> vf.ModelContext:
    """The model as prime-rl describes it, with our renderer."""
    renderer = {"name": "custom", "import_path": "skyenv.adapters.verifiers_renderer.SkyRenderer", "format": "hermes"}
    client = {"base_url": f"{url}/v1", "renderer": renderer, "renderer_model_name": folder, "api_key_var": "NONE"}
    sampling = vf.Sampling(max_tokens=policies.ROLLOUTS.sampling.max_tokens)
    return vf.ModelContext("policy", vf.TrainClientConfig.model_validate(client), sampling)


def rows(episode: vf.Episode) -> list[dict[str, Any]]:
    """What prime-rl trains on: each trainable branch of a trace is a sample."""
    assert episode.ok, [error for trace in episode.traces for error in trace.errors] + episode.errors
    return [
        row(trace.task.key, branch.token_ids, branch.sampled_mask, branch.logprobs, trace.reward)
        for trace in episode.traces
        for branch in trace.branches
        if branch.trainable
    ]


def row(task_id: str, ids: list[int], mask: list[bool], logprobs: list[float], reward: float) -> dict[str, Any]:
    start, end = mask.index(True), len(mask) - mask[::-1].index(True)
    return {
        "task_id": task_id,
        "prompt_ids": ids[:start],
        "completion_ids": ids[start:end],
        "loss_mask": [int(sampled) for sampled in mask[start:end]],
        "logprobs": logprobs[start:end],
        "reward": reward,
    }


async def with_model(use: Callable[[vf.ModelContext, Served], Awaitable[Any]]) -> Any:
    """Run something with the policy served."""
    tokenizer = policies.tokenizer()
    renderer = policies.renderer(tokenizer)
    tasks = {task.task_id: task.problem for task in policies.ROLLOUTS.load()}
    served = Served(policies.HalfRight(renderer), renderer, tasks)
    with tempfile.TemporaryDirectory() as folder, running(served.app()) as url:
        tokenizer.save_pretrained(folder)
        return await use(context(url, folder), served)


async def play(model: vf.ModelContext, served: Served) -> list[dict[str, Any]]:
    env = environment()
    found: list[dict[str, Any]] = []
    async with env.serving():
        for task in env.taskset.include(ids=policies.TASKS):
            for slot in env.slots(task, GROUP_SIZE):
                found += rows(await env.run_slot(slot, model))
    return found


async def main(out: Path) -> None:
    out.write_text(json.dumps(await with_model(play)))


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]))
