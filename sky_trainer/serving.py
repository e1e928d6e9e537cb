"""A policy behind HTTP in a process of its own: `HFEngine` in SGLang's dialect, for machines that run no server.

The subset that a trainer and a pipeline use: `/generate` from ids with ids and logprobs, `/update_weights_from_disk`,
pause and continue, abort, health. Weights change between two decoding steps, so requests under way go on, over the
attention states of the old weights; each answer carries the version that its first id was sampled with.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sky_trainer.engines import HFEngine
from sky_trainer.sync.probe import own_logprobs
from skyenv.errors import EngineError, boundary
from skyenv.types import SamplingParams

Answer = Callable[[Any], Awaitable[dict[str, Any]]]
SUFFIX = ".safetensors"


class BadRequest(Exception):
    """The request cannot be served; the message says why."""


class ServedEngine:
    """The application over an engine that its caller opens and closes. `token` "": everyone on the network may ask."""

    def __init__(self, engine: HFEngine, model: Any, name: str, token: str = "") -> None:
        self._engine, self._model, self._name, self._token = engine, model, name, token
        self._updating = anyio.Lock()
        self._running: dict[str, anyio.CancelScope] = {}

    def app(self) -> Starlette:
        """The ASGI application."""
        posts: dict[str, Answer] = {
            "/generate": self.generate,
            "/update_weights_from_disk": self.update_from_disk,
            "/update_weight_version": self.update_version,
            "/pause_generation": self.pause,
            "/continue_generation": self.resume,
            "/abort_request": self.abort,
        }
        gets = {"/health": self.health, "/v1/models": self.models, "/model_info": self.info, "/server_info": self.info}
        routes = [Route(path, self._endpoint(answer), methods=["POST"]) for path, answer in posts.items()]
        routes += [Route(path, self._endpoint(answer), methods=["GET"]) for path, answer in gets.items()]
        return Starlette(routes=routes)

    def _endpoint(self, answer: Answer) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            open_to_all = request.url.path == "/health"  # as on vLLM and SGLang: whoever watches has no token
            if self._token and not open_to_all and not hmac.compare_digest(given.encode(), self._token.encode()):
                return JSONResponse({"error": "the bearer token is missing or wrong"}, 401)
            try:
                body = await request.json() if request.method == "POST" and await request.body() else {}
                return JSONResponse(await answer(body))
            except (BadRequest, ValueError, KeyError, TypeError) as error:
                return JSONResponse({"success": False, "message": f"{type(error).__name__}: {error}"}, 400)
            except EngineError as error:
                return JSONResponse({"success": False, "message": str(error)}, 500)

        return endpoint

    async def health(self, body: Any) -> dict[str, Any]:
        """It answers."""
        return {}

    async def models(self, body: Any) -> dict[str, Any]:
        """One model, in the words of SGLang."""
        return {"object": "list", "data": [{"id": self._name, "object": "model", "owned_by": "sglang"}]}

    async def info(self, body: Any) -> dict[str, Any]:
        """Version, and that there is one worker."""
        return {"model_path": self._name, "weight_version": str(self._engine.policy_version), "tp_size": 1}

    async def generate(self, body: Any) -> dict[str, Any]:
        """One completion; with `logprob_start_len` 0 the prompt's logprobs too."""
        ids, asked = list(body["input_ids"]), body.get("sampling_params", {})
        sampling = SamplingParams(
            temperature=float(asked.get("temperature", 1.0)),
            top_p=float(asked.get("top_p", 1.0)),
            top_k=max(0, int(asked.get("top_k", 0))),
            max_tokens=int(asked.get("max_new_tokens", 128)),
            stop_token_ids=tuple(asked.get("stop_token_ids", ())),
            seed=asked.get("sampling_seed"),
        )
        rid = str(body.get("rid", ""))
        meta: dict[str, Any] = {"id": rid}
        if body.get("logprob_start_len") == 0:
            scores = await anyio.to_thread.run_sync(self._prompt_scores, ids)
            meta["input_token_logprobs"] = [[s, i, None] for s, i in zip([None, *scores], ids, strict=True)]
        completion = None
        with anyio.CancelScope() as scope:
            self._running[rid] = scope
            try:
                completion = await self._engine.generate(ids, sampling)
            finally:
                self._running.pop(rid, None)
        if completion is None:
            meta |= {"finish_reason": {"type": "abort", "message": "aborted"}, "output_token_logprobs": []}
            return {"text": "", "meta_info": meta | {"completion_tokens": 0}}
        pairs = zip(completion.logprobs, completion.token_ids, strict=True)
        meta |= {
            "output_token_logprobs": [[logprob, token, None] for logprob, token in pairs],
            "completion_tokens": len(completion.token_ids),
            "finish_reason": {"type": completion.finish_reason},
            "weight_version": str(completion.policy_version),
        }
        return {"text": completion.text, "output_ids": list(completion.token_ids), "meta_info": meta}

    def _prompt_scores(self, ids: Sequence[int]) -> list[float]:
        with self._engine.between_steps():
            return own_logprobs(self._model, ids, (1.0,))[0]

    async def update_from_disk(self, body: Any) -> dict[str, Any]:
        """Load `model_path` in place; every weight must be there and fit, or nothing changes."""
        version = int(body.get("weight_version") or self._engine.policy_version)
        async with self._updating:
            loaded = await anyio.to_thread.run_sync(read_weights, Path(body["model_path"]), self._model)
            await self._engine.replace(lambda module: _assign(module, loaded), version)
        return {"success": True, "message": f"version {version}", "num_paused_requests": 0}

    async def update_version(self, body: Any) -> dict[str, Any]:
        """Name the version that the weights are."""
        await self._engine.replace(lambda module: None, int(body["new_version"]))
        return {"success": True, "new_version": str(body["new_version"])}

    async def pause(self, body: Any) -> dict[str, Any]:
        """Modes abort and in_place."""
        mode = body.get("mode", "abort")
        if mode not in ("abort", "in_place"):
            raise BadRequest(f"mode is {mode!r}; this server knows abort and in_place")
        if mode == "abort":
            await self._engine.abort()
        self._engine.pause()
        return {"status": "ok"}

    async def resume(self, body: Any) -> dict[str, Any]:
        """Go on."""
        self._engine.resume()
        return {"status": "ok"}

    async def abort(self, body: Any) -> dict[str, Any]:
        """One request by its id, or all."""
        if body.get("abort_all"):
            await self._engine.abort()
        elif (scope := self._running.get(str(body.get("rid", "")))) is not None:
            scope.cancel()
        return {}


def read_weights(directory: Path, model: Any) -> dict[str, Any]:
    """The tensors of a checkpoint for a module's state. BadRequest when one is missing or has another shape."""
    from safetensors.torch import load_file

    wanted = model.state_dict()
    files = sorted(directory.glob(f"*{SUFFIX}"))
    if not files:
        raise BadRequest(f"{directory} holds no {SUFFIX} files")
    found: dict[str, Any] = {}
    with boundary(EngineError, f"{directory} cannot be read"):
        for path in files:
            found |= load_file(path)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    for name, value in wanted.items():
        if name not in found and name not in tied:
            raise BadRequest(f"{directory} has no {name}")
        if name in found and found[name].shape != value.shape:
            raise BadRequest(f"{name} has shape {tuple(found[name].shape)}, and the model's is {tuple(value.shape)}")
    return {name: found[name] for name in wanted if name in found}


def _assign(module: Any, weights: dict[str, Any]) -> None:
    import torch

    state = module.state_dict()
    with torch.no_grad():
        for name, value in weights.items():
            state[name].copy_(value)
