"""Sampling from a transformers module, many requests at once: rows join a running batch and leave it one by one.

A batch is left-padded: every row's last key/value slot is its newest id, what lies before its first is masked. Requests
that join are prefilled by themselves; then the narrower of the two caches gets empty slots on its left and the two
become one batch. Keys carry their rotary position, so a row's slot does not matter. When rows leave, slots that no
other row needs go too. Caches of another kind (sliding windows, recurrent states) cannot be joined like that: such
models take new rows when the batch is empty.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import anyio

from skyenv.errors import EngineError
from skyenv.types import FinishReason, SamplingParams

if TYPE_CHECKING:
    import torch


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


class Batch:
    """The requests that are decoded together, and their cache. Not safe to share between threads."""

    def __init__(self, model: Any, eos: frozenset[int], steps: Steps) -> None:
        self.rows: list[Request] = []
        self._model, self._eos, self._steps = model, eos, steps
        self._streams: list[torch.Generator] = []
        self._cache: Any = None
        self._inputs: Any = None
        self._mask: Any = None
        self._positions: Any = None

    @property
    def open(self) -> bool:
        """Whether requests may join now."""
        return not self.rows or _joinable(self._cache)

    def advance(self, arrivals: Callable[[], list[Request]]) -> list[Request]:
        """Decode, taking in what arrives between two steps, until a request has ended; returns the ended ones. Blocks.

        The module is in eval mode meanwhile.
        """
        import torch

        was_training = self._model.training
        self._model.eval()
        try:
            with torch.no_grad():
                ended: list[Request] = []
                while not ended:
                    new = arrivals()
                    if new:
                        ended += self._join(new)
                    if self.rows and not ended:
                        ended += self._step()
                    elif not self.rows:
                        break
                return ended
        finally:
            self._model.train(was_training)

    def _join(self, new: list[Request]) -> list[Request]:
        """Prefill requests and put them beside the running ones; those that ended with their first id are returned."""
        import torch
        from transformers import DynamicCache

        device = next(self._model.parameters()).device
        width = max(len(request.prompt) for request in new)
        inputs = torch.tensor([[0] * (width - len(r.prompt)) + r.prompt for r in new], device=device)
        mask = torch.tensor([[0] * (width - len(r.prompt)) + [1] * len(r.prompt) for r in new], device=device)
        joining = Batch(self._model, self._eos, self._steps)
        joining.rows, joining._cache = list(new), DynamicCache(config=self._model.config)
        joining._streams = [torch.Generator(device=device).manual_seed(request.seed) for request in new]
        joining._inputs, joining._mask, joining._positions = inputs, mask, (mask.cumsum(-1) - 1).clamp(min=0)
        ended = joining._step()
        if joining.rows:
            self._absorb(joining)
        return ended

    def _absorb(self, other: Batch) -> None:
        """Become one batch with `other`."""
        import torch

        if not self.rows:
            self.rows, self._streams, self._cache = other.rows, other._streams, other._cache
            self._inputs, self._mask, self._positions = other._inputs, other._mask, other._positions
            return
        missing = other._mask.shape[1] - self._mask.shape[1]
        _widen(self, max(missing, 0))
        _widen(other, max(-missing, 0))
        for mine, its in zip(self._cache.layers, other._cache.layers, strict=True):
            mine.keys = torch.cat([mine.keys, its.keys])
            mine.values = torch.cat([mine.values, its.values])
        self.rows, self._streams = self.rows + other.rows, self._streams + other._streams
        self._inputs = torch.cat([self._inputs, other._inputs])
        self._mask = torch.cat([self._mask, other._mask])
        self._positions = torch.cat([self._positions, other._positions])

    def _step(self) -> list[Request]:
        """One id for every row; the requests that ended with it leave."""
        import torch

        with self._steps.one():
            output = self._model(
                input_ids=self._inputs,
                attention_mask=self._mask,
                position_ids=self._positions,
                use_cache=True,
                logits_to_keep=1,
                **{_cache_keyword(self._model): self._cache},
            )
        logits = output.logits[:, -1].float()
        tokens, logprobs = sample(logits, [request.sampling for request in self.rows], self._streams)
        for request, token, logprob in zip(self.rows, tokens.tolist(), logprobs.tolist(), strict=True):
            request.take(token, logprob, self._eos)
        self._inputs = tokens[:, None]
        self._mask = torch.cat([self._mask, self._mask.new_ones((len(self.rows), 1))], dim=1)
        self._positions = self._positions[:, -1:] + 1
        ended = [request for request in self.rows if request.finish is not None]
        if ended:
            self._keep([place for place, request in enumerate(self.rows) if request.finish is None])
        return ended

    def _keep(self, places: list[int]) -> None:
        """Only these rows stay, and of the slots those that one of them needs."""
        import torch

        self.rows = [self.rows[place] for place in places]
        self._streams = [self._streams[place] for place in places]
        if not places:
            self._cache = None
            return
        keep = torch.tensor(places, dtype=torch.long, device=self._mask.device)
        self._inputs, self._positions = self._inputs[keep], self._positions[keep]
        self._cache.batch_select_indices(keep)
        empty = 0
        if _joinable(self._cache):
            empty = int(self._mask[keep].argmax(dim=1).min())
            for layer in self._cache.layers if empty else ():
                layer.keys, layer.values = layer.keys[:, :, empty:], layer.values[:, :, empty:]
        self._mask = self._mask[keep][:, empty:]


def _widen(batch: Batch, slots: int) -> None:
    """Put empty slots on the left of a batch's cache and mask."""
    from torch.nn.functional import pad

    if slots:
        batch._mask = pad(batch._mask, (slots, 0))
        for layer in batch._cache.layers:
            layer.keys, layer.values = pad(layer.keys, (0, 0, slots, 0)), pad(layer.values, (0, 0, slots, 0))


def _joinable(cache: Any) -> bool:
    """Whether every layer keeps all keys and values in order, one slot an id."""
    from transformers.cache_utils import DynamicLayer

    return all(type(layer) is DynamicLayer for layer in cache.layers)


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
