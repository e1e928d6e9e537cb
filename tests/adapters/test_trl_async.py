"""TRL's own asynchronous trainer on our rollouts: rows, versions, steps that change weights, servers that take them."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import scaled_dot_product_attention
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from sky_trainer.models import load_model
from sky_trainer.tiny import make_model
from skyenv.adapters.trl_async import TRLAsyncRollouts
from skyenv.errors import ConfigError, EngineError, SkyEnvError
from skyenv.types import Completion, SamplingParams
from tests.adapters import policies
from tests.conftest import RealServer
from tests.engines.models import logprobs_here, renderer_of, save_model

TOKENIZER = policies.tokenizer()
PROMPT = tuple(range(20, 60))
SHORT = replace(
    policies.ROLLOUTS,
    env_options={"prompt": "brief", "tools": ["skyenv.tools.bash:ExecuteBash", "skyenv.tools.finish:Finish"]},
)


def half_right() -> policies.HalfRight:
    return policies.HalfRight(policies.renderer(TOKENIZER))


def taken(worker: TRLAsyncRollouts, count: int) -> list[RolloutSample]:
    return [worker.rollout_buffer.get(timeout=300) for _ in range(count)]


def test_adapter_rows_are_our_own() -> None:
    with TRLAsyncRollouts(policies.ROLLOUTS, half_right(), TOKENIZER, group_size=2, groups_ahead=2) as worker:
        assert set(worker.dataset()["prompt"]) == set(policies.TASKS)
        worker.update_model_version(7)
        worker.start()
        samples: list[RolloutSample] = []
        while len(samples) < 4:  # of the first two groups, whichever of the next ones is done before
            samples += [sample for sample in taken(worker, 1) if sample.group_id < 2]
        worker.check_health(600.0)
        assert worker.metrics_queue.get(timeout=300) == {"rollout/failed_frac": (0.0, 2.0)}
    rows = anyio.run(policies.own_rows, TOKENIZER, 2)
    samples.sort(key=lambda sample: (policies.TASKS.index(sample.prompt[0]["content"]), -sample.advantage))
    assert len({sample.group_id for sample in samples}) == 2
    for sample, row in zip(samples, rows, strict=True):
        before = len(row.prompt_ids)
        assert sample.input_ids.tolist() == row.prompt_ids + row.completion_ids
        assert sample.completion_mask.tolist() == [0] * before + row.loss_mask
        assert sample.old_log_probs.tolist() == pytest.approx([0.0] * before + row.logprobs)
        assert sample.advantage == pytest.approx(1.0 if row.reward else -1.0, abs=1e-6)
        assert (sample.metrics["reward"], sample.metrics["reward_std"]) == (row.reward, 0.5)
        assert sample.model_version == 7
        assert [message["role"] for message in sample.completion[:2]] == ["assistant", "tool"]


def test_adapter_waits_for_a_trainer_that_takes_its_time() -> None:
    """A full queue holds the rollouts up, and that is no silence of theirs; leaving ends them in the middle."""
    with TRLAsyncRollouts(policies.ROLLOUTS, half_right(), TOKENIZER, group_size=2, groups_ahead=1, queued=1) as worker:
        worker.start()
        while not worker.rollout_buffer.full():
            worker.check_health(600.0)
        for number in range(6):
            (sample,) = taken(worker, 1)
            assert sample.group_id == number // 2
        assert worker.rollout_buffer.qsize() <= 1
    worker.stop()


class Failing(policies.HalfRight):
    """No answer for the first sample of each group."""

    async def generate(self, prompt_ids: Any, sampling: SamplingParams, **said: Any) -> Completion:
        if said["session_id"].rpartition("#")[2].split(".")[1] == "0":
            raise EngineError("no such model")
        return await super().generate(prompt_ids, sampling, **said)


def test_adapter_leaves_failed_trajectories_out() -> None:
    engine = Failing(policies.renderer(TOKENIZER))
    with TRLAsyncRollouts(policies.ROLLOUTS, engine, TOKENIZER, group_size=2, scale="none") as worker:
        worker.start()
        samples = taken(worker, 3)
        assert worker.metrics_queue.get(timeout=300) == {"rollout/failed_frac": (1.0, 2.0)}
    assert [(sample.metrics["reward"], sample.advantage) for sample in samples] == [(0.0, 0.0)] * 3
    assert len({sample.group_id for sample in samples}) == 3


class Broken(policies.HalfRight):
    """An engine with a bug."""

    async def generate(self, *_: Any, **__: Any) -> Completion:
        raise ConfigError("engine.model: there is none")


def test_adapter_tells_the_trainer_what_ended_the_rollouts() -> None:
    with TRLAsyncRollouts(policies.ROLLOUTS, Broken(policies.renderer(TOKENIZER)), TOKENIZER, group_size=2) as worker:
        worker.check_health(0.0)  # nothing was started
        worker.start()
        with pytest.raises(ConfigError, match="already"):
            worker.start()
        with pytest.raises(SkyEnvError, match=r"20 of 20 trajectories failed, the last: ConfigError: .*there is none"):
            watch(worker)


def watch(worker: TRLAsyncRollouts) -> None:
    """Wait for rows that do not come, as TRL does."""
    while True:
        worker.check_health(600.0)
        with pytest.raises(queue.Empty):
            worker.rollout_buffer.get(timeout=0.05)


def test_adapter_names_what_is_wrong() -> None:
    for options, named in (({"group_size": 1}, "group_size"), ({"queued": 0}, "queued")):
        with pytest.raises(ConfigError, match=named):
            TRLAsyncRollouts(policies.ROLLOUTS, half_right(), TOKENIZER, **options)
    closed = TRLAsyncRollouts(policies.ROLLOUTS, half_right(), TOKENIZER)
    with pytest.raises(ConfigError, match="inside `with`"):
        closed.start()
    with closed as worker, pytest.raises(ConfigError, match="engines"):
        worker.weights("weights")


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts_q: Any, starts_k: Any, *_: Any, **options: Any
) -> torch.Tensor:
    """What FlashAttention's kernel computes, which GPUs alone have: causal, each segment behind its own path."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    out = torch.empty_like(query)
    for number in range(len(starts_q) - 1):
        here, there = (slice(*map(int, starts[number : number + 2])) for starts in (starts_q, starts_k))
        length, width = here.stop - here.start, there.stop - there.start
        seen = torch.ones(length, width, dtype=torch.bool).tril(width - length)
        mine, theirs, values = (part.transpose(0, 1) for part in (query[here], key[there], value[there]))
        found = scaled_dot_product_attention(mine, theirs, values, seen, scale=options["softmax_scale"])
        out[here] = found.transpose(0, 1)
    return out


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two things of TRL's trainer that a CPU has not: the kernel, and a name in its table of GPUs."""
    kernel = SimpleNamespace(flash_attn_varlen_func=attention)
    monkeypatch.setattr(packing, "_flash_attn", lambda: kernel)
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)


class Noted:
    """Takes weights as TRL hands them over and keeps what was called."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.names: set[str] = set()

    def init_weight_transfer(self) -> None:
        self.calls.append("init")

    def pause(self) -> None:
        self.calls.append("pause")

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.calls.append("send")
        self.names = {name for name, _ in iterator}

    def resume(self) -> None:
        self.calls.append("resume")

    def destroy(self) -> None:
        self.calls.append("destroy")


def likelihood(model: Any, samples: list[RolloutSample]) -> float:
    """How likely the words of the rewarded samples are under a model; the others' ratios are clipped away at once."""
    means: list[float] = []
    for sample in samples:
        if sample.advantage > 0:
            ids, mask = torch.tensor(sample.input_ids)[None], torch.tensor(sample.completion_mask[1:])
            with torch.no_grad():
                logprobs = model(ids).logits[0, :-1].float().log_softmax(-1)
            chosen = logprobs.gather(1, ids[0, 1:, None])[:, 0]
            means.append(float((chosen * mask).sum() / mask.sum()))
    return fmean(means)


@pytest.mark.usefixtures("cpu")
def test_adapter_trains_under_trls_own_trainer(tmp_path: Path) -> None:
    make_model(TOKENIZER, hidden=32, layers=1, seed=0).save_pretrained(tmp_path / "model")
    args = AsyncGRPOConfig(
        output_dir=str(tmp_path / "out"), max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=1,
        learning_rate=1e-2, use_cpu=True, bf16=False, report_to="none", logging_steps=1, save_strategy="no",
        gradient_checkpointing=False, dtype="float32", max_staleness=4, num_generations=2, token_budget=-1,
    )  # fmt: skip
    weights = Noted()
    with TRLAsyncRollouts(SHORT, half_right(), TOKENIZER, group_size=2) as worker:
        trainer = AsyncGRPOTrainer(
            model=str(tmp_path / "model"), args=args, train_dataset=worker.dataset(), processing_class=TOKENIZER,
            rollout_worker=cast(Any, worker), weight_transfer=cast(Any, weights),
        )  # fmt: skip
        trainer.train()
        worker.start()
        samples = taken(worker, 2)
    assert weights.calls == ["init", *["pause", "send", "resume"] * 3, "destroy"]
    logged = [line for line in trainer.state.log_history if "grad_norm" in line]
    assert len(logged) == 2
    assert logged[0]["grad_norm"] > 0
    assert logged[0]["reward"] == 0.5
    assert logged[0]["rollout/failed_frac"] == 0.0
    trainer.save_model(str(tmp_path / "trained"))
    before, after = (load_model(str(tmp_path / name)) for name in ("model", "trained"))
    assert weights.names == {name for name, _ in before.named_parameters()}
    assert likelihood(after, samples) > likelihood(before, samples) + 0.01


@pytest.mark.engine
@pytest.mark.parametrize("flavour", ["vllm", "sglang"])
def test_adapter_brings_weights_to_servers(flavour: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """TRL's calls, in its order; then the server answers with what the weights say."""
    server: RealServer = request.getfixturevalue(flavour)
    other = save_model(tmp_path / "other", seed=1)
    tokenizer = renderer_of(server.model).tokenizer
    engine = server.engine()
    with TRLAsyncRollouts(policies.ROLLOUTS, engine, tokenizer) as worker:
        weights = worker.weights(tmp_path / "weights")
        weights.init_weight_transfer()
        for _ in range(2):
            weights.pause()
            weights.send_weights(iter(load_file(other / "model.safetensors").items()))
            weights.resume()
        assert [path.name for path in (tmp_path / "weights").iterdir()] == ["v00000002"]
        actor = worker.portal.actor()
        answer = actor.call(lambda: engine.generate(PROMPT, SamplingParams(max_tokens=40)))
        actor.close()
        weights.destroy()
    assert answer.policy_version == 2
    assert answer.logprobs == pytest.approx(logprobs_here(other, PROMPT, answer.token_ids), abs=1e-4)
