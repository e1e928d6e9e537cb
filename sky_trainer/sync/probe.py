"""Whether a server samples from the weights that the trainer holds: the same ids under both, compared.

Two readings a server: logprobs of a fixed text, and of a continuation that the server samples as it samples rollouts.
The first shows weights that did not arrive, also when the change is far below the bound: then it did not move at all.
The second goes through what the first does not, prefix caches and the treatment of temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from sky_trainer.sync.delivery import Server
from sky_trainer.weights import WeightsNotVisible
from skyenv.engines.control import VLLMControl
from skyenv.errors import EngineError, boundary
from skyenv.types import SamplingParams

TEXT = "Weights that a trainer has just changed are the ones that the next rollout is sampled from: 3, 1, 4, 1, 5, 9."
CONTINUATION = 16
EXACT_BOUND, ROUNDED_BOUND = 2e-3, 0.1
STILL = 1e-6


@dataclass(frozen=True, slots=True)
class Reading:
    """What a server says: logprobs of `probe[1:]`, and the ids that it sampled after `probe` with their logprobs."""

    url: str
    scores: tuple[float, ...]
    sampled: tuple[int, ...]
    logprobs: tuple[float, ...]


class Probe:
    """Compares servers with `model`. `ids` are at least two; `temperature` is the rollouts'.

    `bound` is the mean difference in nats that is taken for rounding; 0 chooses by the model's precision: 16-bit
    weights and GPUs round differently from server to trainer.
    """

    def __init__(self, model: Any, ids: Sequence[int], temperature: float, bound: float = 0.0) -> None:
        self.ids = tuple(ids)
        self._model, self._temperature = model, temperature
        self._bound = bound or _default_bound(model)
        self._own: tuple[float, ...] = ()
        self._last: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {}

    async def read(self, server: Server) -> Reading:
        """Ask one server. Raises EngineError."""
        sampling = SamplingParams(temperature=self._temperature, max_tokens=CONTINUATION)
        answer = await server.engine.generate(list(self.ids), sampling)
        scores = await prompt_logprobs(server, self.ids)
        return Reading(server.url, scores, answer.token_ids, answer.logprobs)

    def compare(self, readings: Sequence[Reading], version: int) -> float:
        """Run the trainer's module on every rank; the largest gap of any server. Raises WeightsNotVisible."""
        largest = 0.0
        for reading in readings:
            self._own, expected = self._score(reading.sampled)
            self._check_scores(reading, version)
            gap = _gap(expected, reading.logprobs)
            if gap > self._bound:
                raise WeightsNotVisible(reading.url, version, gap, self._generation_cause(gap))
            largest = max(largest, gap, _gap(self._own, reading.scores))
            self._last[reading.url] = (self._own, reading.scores)
        return largest

    def check_again(self, reading: Reading, version: int) -> None:
        """Compare a server that came late with what the trainer held at the last `compare`."""
        self._last.pop(reading.url, None)
        if self._own:
            self._check_scores(reading, version)

    def _check_scores(self, reading: Reading, version: int) -> None:
        gap = _gap(self._own, reading.scores)
        own_before, scores_before = self._last.get(reading.url, ((), ()))
        stands = bool(scores_before) and scores_before == reading.scores
        moved = _gap(self._own, own_before) if own_before else 0.0
        if stands and moved > max(STILL, self._resolution()):
            cause = (
                "its logprobs of the probe did not change at all where the trainer's moved by"
                f" {moved:.2g} nats: it holds older weights; does it see the directory that it was told to load?"
            )
            raise WeightsNotVisible(reading.url, version, gap, cause)
        if gap > self._bound:
            raise WeightsNotVisible(reading.url, version, gap, self._weights_cause(gap))

    def _resolution(self) -> float:
        """A movement that a server's own rounding cannot hide."""
        return STILL if self._bound <= EXACT_BOUND else self._bound / 10

    def _weights_cause(self, gap: float) -> str:
        cause = f"its logprobs of the probe differ by {gap:.3g} nats on average, {self._bound:.2g} is rounding."
        if getattr(self._model.config, "tie_word_embeddings", False):
            return (
                f"{cause} The model ties its output head to its embeddings, and a server may keep a packed copy of the"
                " old head (vLLM on a CPU does): start it from the untied checkpoint in engine.directory"
            )
        return f"{cause} Part of the weights may be old, or it serves another model or precision (engine.probe_bound)"

    def _generation_cause(self, gap: float) -> str:
        cause = f"what it sampled has logprobs that differ by {gap:.3g} nats on average, though the weights are right."
        if self._temperature != 1.0:
            return (
                f"{cause} Logprobs must be those after temperature: start vLLM with --logprobs-mode processed_logprobs"
            )
        return f"{cause} A cache may hold states of older weights, or its sampling cuts the distribution (top_p, top_k)"

    def _score(self, sampled: Sequence[int]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The trainer's logprobs of `ids[1:]` at temperature 1 and of `sampled` at the rollouts'."""
        ids, cut = [*self.ids, *sampled], len(self.ids) - 1
        plain, tempered = own_logprobs(self._model, ids, (1.0, self._temperature))
        return tuple(plain[:cut]), tuple(tempered[cut:])


def own_logprobs(model: Any, ids: Sequence[int], temperatures: Sequence[float]) -> list[list[float]]:
    """Logprobs of `ids[1:]` under a module, one list a temperature. The module's mode is put back."""
    import torch

    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            device = next(model.parameters()).device
            logits = model(input_ids=torch.tensor([list(ids)], device=device)).logits[0, :-1].float()
            targets = torch.tensor(list(ids[1:]), device=device)[:, None]
            return [torch.log_softmax(logits / t, -1).gather(-1, targets)[:, 0].tolist() for t in temperatures]
    finally:
        model.train(was_training)


async def prompt_logprobs(server: Server, ids: Sequence[int]) -> tuple[float, ...]:
    """A server's logprobs of `ids[1:]`, at temperature 1. Raises EngineError."""
    ask = _ask_vllm if isinstance(server.control, VLLMControl) else _ask_sglang
    scores = await ask(server, list(ids))
    if len(scores) != len(ids) - 1:
        raise EngineError(f"{server.url} gave {len(scores)} prompt logprobs for {len(ids)} ids")
    return tuple(scores)


async def _ask_vllm(server: Server, ids: list[int]) -> list[float]:
    model = server.engine.adapter or server.engine.model
    body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
    answer = await server.control.call("POST", "/v1/completions", body=body)
    with boundary(EngineError, f"{server.url} gave no prompt logprobs"):
        entries = answer["choices"][0]["prompt_logprobs"]
        return [float(entry[str(token)]["logprob"]) for token, entry in zip(ids[1:], entries[1:], strict=True)]


async def _ask_sglang(server: Server, ids: list[int]) -> list[float]:
    body: dict[str, Any] = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    if server.engine.adapter:
        body["lora_path"] = server.engine.adapter
    answer = await server.control.call("POST", "/generate", body=body)
    with boundary(EngineError, f"{server.url} gave no prompt logprobs"):
        return [float(entry[0]) for entry in answer["meta_info"]["input_token_logprobs"][1:]]


def _gap(left: Sequence[float], right: Sequence[float]) -> float:
    """Mean absolute difference; nothing sampled is no difference."""
    return fmean(abs(a - b) for a, b in zip(left, right, strict=True)) if left else 0.0


def _default_bound(model: Any) -> float:
    import torch

    parameter = next(model.parameters())
    exact = parameter.dtype == torch.float32 and parameter.device.type == "cpu"
    return EXACT_BOUND if exact else ROUNDED_BOUND
