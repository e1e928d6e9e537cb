"""An engine over a transformers module in this process: the policy being trained samples its own rollouts.

Requests join the running batch between two decoding steps and leave it when they end (`sky_trainer.decoding`).
Logprobs are those of the distribution that was sampled from, temperature included, so they equal the trainer's forward
up to rounding. A request's random stream depends on its seed (or on session, prompt and policy version), never on which
requests share its batch. Weights change between two decoding steps, through `HFEngine.replace`; whoever changes them
otherwise must not do it while requests run.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import anyio
from anyio.abc import TaskGroup

from sky_trainer.decoding import Batch, Request, Steps
from skyenv.errors import EngineError, boundary
from skyenv.types import Completion, Message, SamplingParams

if TYPE_CHECKING:
    import torch

Decode = Callable[[Sequence[int]], str]


class HFEngine:
    """`skyenv.core.Engine` on a causal LM module. Use as `async with`; leaving it fails what still waits.

    `decode` turns sampled ids into text; `eos_token_ids` end every completion, beside a request's own stop ids.
    `policy_version` is written on completions. At most `max_batch` requests are decoded together. When none runs, the
    first waits `gather` seconds for others, so that they are prefilled together.
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
        self._lock = threading.Lock()  # around what the decoding thread takes from the loop: the next two
        self._waiting: list[Request] = []
        self._taken: list[Request] = []
        self._wake = anyio.Event()
        self._served = 0
        self._steps = Steps()
        self._batch = Batch(model, self._eos, self._steps)
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
        for request in self._all():
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
        with self._lock:
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
        with self._lock:
            ending, unborn, self._waiting = self._taken + self._waiting, self._waiting, []
        for request in ending:
            request.cancelled = True
        for request in unborn:
            request.done.set()
        for request in ending:
            await request.done.wait()

    def _all(self) -> list[Request]:
        with self._lock:
            return self._taken + self._waiting

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
            while self._waiting or self._batch.rows:
                await self._advance()

    async def _advance(self) -> None:
        """Decode until a request has ended, then answer it. What fails ends all that are decoded together."""
        try:
            with boundary(EngineError, "generation failed"):
                ended = await anyio.to_thread.run_sync(self._batch.advance, self._arrivals)
        except EngineError as error:
            ended, self._taken = self._taken, []
            self._batch = Batch(self._model, self._eos, self._steps)
            for request in ended:
                request.error = error
        for request in ended:
            request.done.set()
        self._taken = [request for request in self._taken if not request.done.is_set()]

    def _arrivals(self) -> list[Request]:
        """Requests that join now, noted as taken. Runs in the decoding thread."""
        if not self._waiting or not self._batch.open:
            return []
        room = self._max_batch - len(self._batch.rows)
        with self._lock:
            alive = [request for request in self._waiting if not request.cancelled]
            joining, self._waiting = alive[:room], alive[room:]
            self._taken += joining
        return joining
