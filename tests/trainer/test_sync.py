"""Weights on their way to servers: files, versions, what is seen of them, and servers that die in the middle."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from anyio.from_thread import BlockingPortal
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from sky_trainer import tiny
from sky_trainer.engines import HFEngine
from sky_trainer.rollouts import call, opened
from sky_trainer.serving import ServedEngine
from sky_trainer.sync.delivery import DiskDelivery
from sky_trainer.sync.export import named_weights
from sky_trainer.sync.files import VersionedFiles, write_checkpoint
from sky_trainer.sync.probe import Probe, own_logprobs
from sky_trainer.sync.servers import ServerWeights, UpdateRules
from sky_trainer.weights import WeightsNotVisible, WeightSyncFailed
from skyenv.errors import EngineError, EngineUnavailable
from skyenv.testing import check_engine
from skyenv.types import Completion, SamplingParams

from .served import Rack, rack

PROBE = [5, 9, 40, 41, 42, 5, 60, 61, 62, 63, 20, 21]
FEW = SamplingParams(max_tokens=4)
Push = Callable[[int], None]


def step(model: Any, size: float = 0.05, seed: int = 1) -> None:
    """Change every weight, as an optimizer would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))


@pytest.fixture
def racked(portal: BlockingPortal, model: Any, tokenizer: Any) -> Iterator[Rack]:
    with opened(portal, rack([model, model], tokenizer)) as servers:
        yield servers


@pytest.fixture
def weights(portal: BlockingPortal, racked: Rack, model: Any, tmp_path: Path) -> ServerWeights:
    delivery = DiskDelivery(model, VersionedFiles(tmp_path / "weights"))
    return ServerWeights(
        portal, racked.pool, racked.servers, delivery, rules=UpdateRules("abort", 60.0), probe=Probe(model, PROBE, 1.0)
    )


def ask(portal: BlockingPortal, racked: Rack, sampling: SamplingParams = FEW) -> Completion:
    return call(portal, racked.pool.generate, [5, 6, 7], sampling)


def test_every_server_samples_from_what_was_pushed(
    portal: BlockingPortal, racked: Rack, weights: ServerWeights, model: Any, tmp_path: Path
) -> None:
    for version in (0, 1, 2, 3):
        weights.push(version)
        report = weights.last
        assert report is not None
        assert (report.version, report.servers, report.lost) == (version, 2, 0)
        assert report.gap is not None
        assert report.gap < 1e-4
        assert ask(portal, racked).policy_version == version
        for held in racked.models:
            assert all(torch.equal(a, b) for a, b in zip(held.parameters(), model.parameters(), strict=True))
        step(model, seed=version)
    kept = sorted(path.name for path in (tmp_path / "weights").iterdir())
    assert kept == ["v00000002", "v00000003"]
    with pytest.raises(ValueError, match="after 3"):
        weights.push(2)


def test_a_server_that_dies_in_the_middle_leaves_and_comes_back_with_the_version_of_the_day(
    portal: BlockingPortal, racked: Rack, weights: ServerWeights, model: Any
) -> None:
    weights.push(0)
    step(model)
    racked.cables[0].cut_at = "/update_weights_from_disk"
    weights.push(1)
    assert weights.last is not None
    assert (weights.last.servers, weights.last.lost) == (1, 1)
    assert [racked.pool.is_up(server.url) for server in racked.servers] == [False, True]
    assert ask(portal, racked).policy_version == 1
    racked.cables[0].cut, racked.cables[0].cut_at = False, ""
    call(portal, come_back, racked)
    assert [racked.pool.is_up(server.url) for server in racked.servers] == [True, True]
    assert torch.equal(racked.models[0].lm_head.weight, model.lm_head.weight)
    assert racked.servers[0].control.version == 1


async def come_back(racked: Rack) -> None:
    """Ask until the pool has looked after the server that was out."""
    with anyio.fail_after(100):
        while not all(racked.pool.is_up(server.url) for server in racked.servers):
            await racked.pool.generate([5, 6], FEW)
            await anyio.sleep(0.05)


def test_a_server_that_cannot_take_the_version_of_the_day_stays_out(
    portal: BlockingPortal, racked: Rack, weights: ServerWeights, tmp_path: Path
) -> None:
    weights.push(0)
    portal.call(racked.pool.put_out, racked.servers[0].url, EngineUnavailable("looked ill"))
    for path in (tmp_path / "weights" / "v00000000").glob("*.safetensors"):
        path.unlink()
    with pytest.raises(EngineError, match=r"holds no \.safetensors"):
        call(portal, weights.admit, racked.servers[0].engine)
    assert not racked.pool.is_up(racked.servers[0].url)


def test_a_push_that_nobody_takes_is_an_error_that_names_all(racked: Rack, weights: ServerWeights) -> None:
    for cable in racked.cables:
        cable.cut_at = "/pause_generation"
    with pytest.raises(WeightSyncFailed, match=r"server0.*server1"):
        weights.push(0)


def test_what_runs_on_a_server_that_is_put_out_goes_to_another(portal: BlockingPortal, racked: Rack) -> None:
    async def scenario() -> Completion:
        answers: list[Completion] = []
        racked.servers[0].engine.policy_version, racked.servers[1].engine.policy_version = 1, 2

        async def one() -> None:
            answers.append(await racked.pool.generate([5, 6, 7], FEW, session_id="t#0.0"))

        async with anyio.create_task_group() as group:
            await racked.servers[0].control.pause("keep")
            group.start_soon(one)
            while not racked.pool.stats[0].requests:
                await anyio.sleep(0.01)
            racked.pool.put_out(racked.servers[0].url, EngineUnavailable("dead"))
        await racked.servers[0].control.resume()
        return answers[0]

    assert len(call(portal, scenario).token_ids) == 4
    assert "/generate" in racked.cables[1].asked


class Deaf(DiskDelivery):
    """Writes the weights of version 0 for ever."""

    def prepare(self, version: int) -> None:
        if version == 0:
            super().prepare(0)

    async def give(self, server: Any, version: int) -> None:
        await super().give(server, 0)
        server.control.installed(version)


@pytest.mark.parametrize("size", [0.05, 1e-5])
def test_weights_that_did_not_arrive_are_seen_however_small_the_step(
    portal: BlockingPortal, racked: Rack, model: Any, tmp_path: Path, size: float
) -> None:
    probe = Probe(model, PROBE, 1.0)
    weights = ServerWeights(portal, racked.pool, racked.servers, Deaf(model, VersionedFiles(tmp_path)), probe=probe)
    weights.push(0)
    step(model, size)
    with pytest.raises(
        WeightsNotVisible, match=r"server\d does not sample from version 1.*did not change at all"
    ) as got:
        weights.push(1)
    assert got.value.gap > 0


def test_an_old_head_is_seen_and_named(portal: BlockingPortal, tokenizer: Any, tmp_path: Path, model: Any) -> None:
    """A server that keeps its output head, as those do that cache a packed copy of tied embeddings."""
    model.config.tie_word_embeddings = True
    model.tie_weights()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with opened(portal, rack([model], tokenizer)) as racked:
        held = racked.models[0]
        held.lm_head.weight = torch.nn.Parameter(held.lm_head.weight.detach().clone())
        kept = held.lm_head.weight.detach().clone()

        def old_head(module: Any, inputs: Any) -> None:
            module.lm_head.weight.data.copy_(kept)

        held.register_forward_pre_hook(old_head)
        delivery = DiskDelivery(model, VersionedFiles(tmp_path))
        weights = ServerWeights(portal, racked.pool, racked.servers, delivery, probe=Probe(model, PROBE, 1.0))
        weights.push(0)
        step(model)
        with pytest.raises(WeightsNotVisible, match="ties its output head"):
            weights.push(1)


def test_logprobs_of_another_temperature_are_seen(portal: BlockingPortal, racked: Rack, model: Any) -> None:
    """As of a server that reports those before temperature: the weights are right, the sampled logprobs are not."""
    reading = call(portal, Probe(model, PROBE, 0.5).read, racked.servers[0])
    Probe(model, PROBE, 0.5).compare([reading], 0)
    with pytest.raises(WeightsNotVisible, match="processed_logprobs"):
        Probe(model, PROBE, 0.7).compare([reading], 0)


def test_a_rollout_goes_on_across_an_update(portal: BlockingPortal, racked: Rack, model: Any, tmp_path: Path) -> None:
    """Frozen in the middle, taken up over the new weights; nothing is lost."""
    delivery = DiskDelivery(model, VersionedFiles(tmp_path))
    weights = ServerWeights(portal, racked.pool, racked.servers, delivery, rules=UpdateRules("keep", 60.0))
    weights.push(0)
    long = SamplingParams(max_tokens=200, stop_token_ids=(299,), seed=3)

    begun = threading.Event()
    racked.models[0].register_forward_hook(lambda *_: begun.set())
    under_way = portal.start_task_soon(racked.servers[0].engine.generate, [5, 6, 7], long)
    assert begun.wait(100)
    step(model, 0.01)
    weights.push(1)
    answer = under_way.result(300)
    assert answer.policy_version == 0
    assert answer.finish_reason in ("length", "stop")
    assert ask(portal, racked).policy_version == 1


def test_a_version_is_whole_or_absent(model: Any, tmp_path: Path) -> None:
    files = VersionedFiles(tmp_path / "w", seen_as="/mnt/w/")
    assert files.server_path(7) == "/mnt/w/v00000007"
    written = files.begin(7)
    write_checkpoint(written, dict(named_weights(model)), model.config)
    assert not files.path(7).exists()
    files.finish(written, 7)
    again = AutoModelForCausalLM.from_pretrained(files.path(7))
    assert own_logprobs(again, PROBE, (1.0,)) == own_logprobs(model, PROBE, (1.0,))
    (tmp_path / "w" / ".v00000008.12345").mkdir()
    (tmp_path / "w" / "notes").mkdir()
    VersionedFiles(tmp_path / "w")
    assert sorted(path.name for path in (tmp_path / "w").iterdir()) == ["notes", "v00000007"]


def test_a_tied_head_is_written_on_its_own(tokenizer: Any, tmp_path: Path) -> None:
    model = tiny.make_model(tokenizer, hidden=32, layers=1, seed=0)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    write_checkpoint(tmp_path, dict(named_weights(model)), model.config)
    assert "lm_head.weight" in load_file(tmp_path / "model.safetensors")
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.lm_head.weight is not again.model.embed_tokens.weight
    assert own_logprobs(again, PROBE, (1.0,)) == own_logprobs(model, PROBE, (1.0,))


def test_adapters_are_added_to_what_is_written_and_left_alone(model: Any) -> None:
    from peft import LoraConfig, get_peft_model

    bare = copy.deepcopy(model)
    settings = LoraConfig(
        r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False, modules_to_save=["lm_head"]
    )
    policy = get_peft_model(model, settings)
    policy.add_adapter("ref", settings)  # as a trainer keeps the start for its KL penalty
    with torch.no_grad():
        policy.get_output_embeddings().weight.add_(0.1 * torch.randn_like(policy.get_output_embeddings().weight))
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    found = dict(named_weights(policy))
    assert set(found) == set(bare.state_dict())
    bare.load_state_dict(found)
    expected, seen = own_logprobs(policy, PROBE, (1.0,))[0], own_logprobs(bare, PROBE, (1.0,))[0]
    assert seen == pytest.approx(expected, abs=1e-5)
    assert all(torch.equal(before[name], value) for name, value in policy.state_dict().items())


async def test_the_served_engine_is_an_engine(model: Any, tokenizer: Any) -> None:
    from skyenv import formats
    from skyenv.renderer import Renderer

    async with rack([model], tokenizer) as racked:
        renderer = Renderer(tokenizer, formats.get("hermes"))
        assert len(await check_engine(racked.servers[0].engine, renderer, vocab_size=len(tokenizer))) >= 6


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/update_weights_from_disk", {"model_path": "/nowhere"}, "holds no .safetensors"),
        ("/update_weights_from_disk", {}, "model_path"),
        ("/pause_generation", {"mode": "retract"}, "knows abort and in_place"),
        ("/generate", {"input_ids": "text"}, "ValueError|TypeError|outside"),
        ("/generate", {}, "input_ids"),
    ],
)
async def test_wrong_requests_are_refused(model: Any, tokenizer: Any, path: str, body: Any, message: str) -> None:
    async with rack([model], tokenizer) as racked:
        with pytest.raises(EngineError, match=message):
            await racked.servers[0].control.call("POST", path, body=body)


async def test_weights_that_do_not_fit_change_nothing(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    other = tiny.make_model(tokenizer, hidden=64, layers=1, seed=0)
    write_checkpoint(tmp_path, dict(named_weights(other)), other.config)
    async with rack([model], tokenizer) as racked:
        before = copy.deepcopy(racked.models[0].state_dict())
        with pytest.raises(EngineError, match="has shape"):
            await racked.servers[0].control.load_from_disk(str(tmp_path), 1)
        assert all(torch.equal(before[name], value) for name, value in racked.models[0].state_dict().items())


async def test_a_token_is_asked_for(model: Any, tokenizer: Any) -> None:
    import httpx

    async with HFEngine(model, tokenizer.decode, [tokenizer.eos_token_id]) as engine:
        app = ServedEngine(engine, model, "policy", token="secret").app()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            assert (await client.get("/model_info")).status_code == 401
            assert (await client.get("/model_info", headers={"authorization": "Bearer wrong"})).status_code == 401
            assert (await client.get("/model_info", headers={"authorization": "Bearer secret"})).status_code == 200
            assert (await client.get("/health")).status_code == 200
