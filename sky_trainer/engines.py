"""An engine over a transformers module in this process: the policy being trained samples its own rollouts.

Requests that wait at the same moment share one left-padded batch. Logprobs are those of the distribution that was
sampled from, temperature included, so they equal the trainer's forward up to rounding. A request's random stream
depends on its seed (or on session, prompt and policy version), never on which requests share its batch. Weights change
between two decoding steps, through `HFEngine.replace`; whoever changes them otherwise must not do it while requests
run.
"""

from __future__ import annotations

import hashlib
import inspect
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import anyio
from anyio.abc import TaskGroup

from skyenv.errors import EngineError, boundary
from skyenv.types import Completion, FinishReason, Message, SamplingParams

if TYPE_CHECKING:
    import torch

Decode = Callable[[Sequence[int]], str]


class Request:
    """One call of `generate` on its way through the batching task."""

    __slots__ = ("cancelled", "done", "error", "finish", "ids", "logprobs", "prompt", "sampling", "seed")

    def __init__(self, prompt: list[int], sampling: SamplingParams, seed: int) -> None:
        self.prompt = prompt
        self.sampling = sampling
        self.seed = seed
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish: FinishReason | None = None
        self.cancelled = False
        self.error: EngineError | None = None
        self.done = anyio.Event()

    def take(self, token: int, logprob: float, eos: frozenset[int]) -> None:
        """Record one sampled id and decide whether it was the last."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        if token in eos or token in self.sampling.stop_token_ids:
            self.finish = "stop"
        elif len(self.ids) >= self.sampling.max_tokens:
            self.finish = "length"
        elif self.cancelled:
            self.finish = "abort"


class Steps:
    """Lets decoding steps through one by one, and none while weights are replaced or generation is paused."""

    def __init__(self) -> None:
        self._alone = threading.Lock()
        self._running = threading.Event()
        self._running.set()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Around a decoding step; blocks while paused."""
        while True:
            self._running.wait()
            with self._alone:
                if self._running.is_set():
                    yield
                    return

    @contextmanager
    def between(self) -> Iterator[None]:
        """Around what must not meet a decoding step."""
        with self._alone:
            yield

    def pause(self) -> None:
        """No further step begins. The one that runs may end after this returns."""
        self._running.clear()

    def resume(self) -> None:
        """Let steps through again."""
        self._running.set()


class HFEngine:
    """`skyenv.core.Engine` on a causal LM module. Use as `async with`; leaving it fails what still waits.

    `decode` turns sampled ids into text; `eos_token_ids` end every completion, beside a request's own stop ids.
    `policy_version` is written on completions. At most `max_batch` requests are decoded together; after the first
    arrives, others get `gather` seconds to join it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        decode: Decode,
        eos_token_ids: Sequence[int],
        *,
        seed: int = 0,
        max_batch: int = 64,
        gather: float = 0.003,
    ) -> None:
        self.policy_version = 0
        self._model: Any = model
        self._decode = decode
        self._eos = frozenset(eos_token_ids)
        self._seed = seed
        self._max_batch = max_batch
        self._gather = gather
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._wake = anyio.Event()
        self._served = 0
        self._steps = Steps()
        self._tasks: TaskGroup | None = None

    async def __aenter__(self) -> Self:
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._serve)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks, self._tasks = self._tasks, None
        if tasks is None:
            return
        for request in self._waiting + self._running:
            request.cancelled = True
            request.error = EngineError("the engine was closed")
            request.done.set()
        self._steps.resume()
        tasks.cancel_scope.cancel()
        await tasks.__aexit__(None, None, None)  # the caller's exception is not this group's

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        messages: Sequence[Message] = (),
        session_id: str = "",
    ) -> Completion:
        """Sample one completion; see `skyenv.core.Engine`. `messages` are not needed. Raises EngineError."""
        if self._tasks is None:
            raise EngineError("the engine is closed; use it inside `async with`")
        request = Request(self._checked(prompt_ids), sampling, self._seed_of(prompt_ids, sampling, session_id))
        version, started = self.policy_version, time.perf_counter()
        self._waiting.append(request)
        self._wake.set()
        try:
            await request.done.wait()
        finally:
            request.cancelled = True
        if request.error is not None:
            raise EngineError(str(request.error)) from request.error
        return Completion(
            text=self._decode(request.ids),
            token_ids=tuple(request.ids),
            logprobs=tuple(request.logprobs),
            finish_reason=request.finish or "abort",
            policy_version=version,
            seconds=time.perf_counter() - started,
        )

    async def replace(self, load: Callable[[Any], None], version: int) -> None:
        """Change the module's weights by `load(module)`, between two decoding steps and in another thread.

        Requests under way go on: their later ids come from the new weights over what the old ones left in the cache.
        ValueError when the version goes back.
        """
        if version < self.policy_version:
            raise ValueError(f"policy version {version} after {self.policy_version}")
        await anyio.to_thread.run_sync(self._replace, load)
        self.policy_version = version

    def _replace(self, load: Callable[[Any], None]) -> None:
        with self._steps.between():
            load(self._model)

    def between_steps(self) -> AbstractContextManager[None]:
        """Around other use of the module; blocks until the running decoding step has ended, and holds up the next."""
        return self._steps.between()

    def pause(self) -> None:
        """Begin no further decoding step until `resume`; requests wait where they are."""
        self._steps.pause()

    def resume(self) -> None:
        """Go on after `pause`."""
        self._steps.resume()

    async def abort(self) -> None:
        """End every request with the ids that it has, finish reason `abort`; return once they have ended."""
        ending = self._running + self._waiting
        for request in ending:
            request.cancelled = True
        for request in self._waiting:
            request.done.set()
        self._waiting = []
        for request in ending:
            await request.done.wait()

    def _checked(self, prompt_ids: Sequence[int]) -> list[int]:
        vocab = self._model.config.vocab_size
        if not prompt_ids:
            raise EngineError("the prompt holds no ids")
        wrong = [token for token in prompt_ids if not 0 <= token < vocab]
        if wrong:
            raise EngineError(f"prompt id {wrong[0]} is outside the model's vocabulary of {vocab}")
        return list(prompt_ids)

    def _seed_of(self, prompt_ids: Sequence[int], sampling: SamplingParams, session_id: str) -> int:
        self._served += 1
        if sampling.seed is not None:
            return sampling.seed
        session = session_id or f"#{self._served}"
        parts = f"{self._seed}|{session}|{self.policy_version}|{','.join(map(str, prompt_ids))}"
        return int.from_bytes(hashlib.blake2b(parts.encode(), digest_size=7).digest())

    async def _serve(self) -> None:
        while True:
            await self._wake.wait()
            await anyio.sleep(self._gather)
            self._wake = anyio.Event()
            while batch := self._take_batch():
                await self._run(batch)

    def _take_batch(self) -> list[Request]:
        alive = [request for request in self._waiting if not request.cancelled]
        self._waiting = alive[self._max_batch :]
        return alive[: self._max_batch]

    async def _run(self, batch: list[Request]) -> None:
        self._running = batch
        try:
            with boundary(EngineError, "generation failed"):
                await anyio.to_thread.run_sync(decode_batch, self._model, batch, self._eos, self._steps)
        except EngineError as error:
            for request in batch:
                request.error = error
        finally:
            for request in batch:
                request.done.set()


def decode_batch(model: Any, batch: Sequence[Request], eos: frozenset[int], steps: Steps) -> None:
    """Sample all requests of a batch to their ends. Blocks; the module is in eval mode meanwhile."""
    import torch

    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            _decode_rows(model, batch, eos, steps)
    finally:
        model.train(was_training)


def _decode_rows(model: Any, batch: Sequence[Request], eos: frozenset[int], steps: Steps) -> None:
    import torch
    from transformers import DynamicCache

    device = next(model.parameters()).device
    width = max(len(request.prompt) for request in batch)
    inputs = torch.tensor([[0] * (width - len(r.prompt)) + r.prompt for r in batch], device=device)
    mask = torch.tensor([[0] * (width - len(r.prompt)) + [1] * len(r.prompt) for r in batch], device=device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    cache_argument = {_cache_keyword(model): cache}
    rows = list(batch)
    streams = [torch.Generator(device=device).manual_seed(request.seed) for request in rows]
    while rows:
        with steps.one():
            output = model(
                input_ids=inputs,
                attention_mask=mask,
                position_ids=positions,
                use_cache=True,
                logits_to_keep=1,
                **cache_argument,
            )
        tokens, logprobs = sample(output.logits[:, -1].float(), [r.sampling for r in rows], streams)
        for request, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            request.take(token, logprob, eos)
        alive = [i for i, request in enumerate(rows) if request.finish is None]
        if len(alive) < len(rows):
            rows, streams = [rows[i] for i in alive], [streams[i] for i in alive]
            keep = torch.tensor(alive, dtype=torch.long, device=device)
            tokens, mask, positions = tokens[keep], mask[keep], positions[keep]
            if rows:
                cache.batch_select_indices(keep)
        inputs = tokens[:, None]
        mask = torch.cat([mask, mask.new_ones((len(rows), 1))], dim=1)
        positions = positions[:, -1:] + 1


def _cache_keyword(model: Any) -> str:
    """What this release of transformers calls the key/value cache."""
    bare = model.get_base_model() if hasattr(model, "get_base_model") else model
    return "cache" if "cache" in inspect.signature(type(bare).forward).parameters else "past_key_values"


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], streams: Sequence[torch.Generator]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one id a row of `logits` (B, V); returns ids (B,) and their logprobs (B,) under the sampled distribution.

    Temperature 0 takes the likeliest id and reports its logprob at temperature 1. EngineError on logits that are not
    numbers.
    """
    import torch

    if not torch.isfinite(logits).all():
        raise EngineError("the model's logits are not finite; its weights are broken or the learning rate is too high")
    greedy = torch.tensor([p.temperature <= 0 for p in params], device=logits.device)
    scale = torch.tensor([p.temperature if p.temperature > 0 else 1.0 for p in params], device=logits.device)
    scores = logits / scale[:, None]
    for i, p in enumerate(params):
        if p.top_k > 0 or p.top_p < 1:
            scores[i] = _cut(scores[i], p)
    logprobs = torch.log_softmax(scores, dim=-1)
    noise = torch.stack(
        [torch.empty_like(row).exponential_(generator=g) for row, g in zip(logprobs, streams, strict=True)]
    )
    drawn = (logprobs - noise.log()).argmax(-1)
    tokens = torch.where(greedy, logprobs.argmax(-1), drawn)
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)


def _cut(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Scores (V,) with everything outside top_k and top_p at minus infinity."""
    ordered, order = scores.sort(descending=True)
    if params.top_k > 0:
        ordered[params.top_k :] = -float("inf")
    if params.top_p < 1:
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        ordered[before >= params.top_p] = -float("inf")
    return scores.scatter(0, order, ordered)
