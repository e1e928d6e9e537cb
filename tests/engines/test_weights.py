"""The trainer's weights on real servers: round after round, under rollouts, with a tied head, as adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from anyio.from_thread import BlockingPortal, start_blocking_portal

from sky_trainer.cli import main
from sky_trainer.models import load_model, load_tokenizer
from sky_trainer.opening import opened_servers
from sky_trainer.rollouts import call, opened
from sky_trainer.sections.engine import EngineConfig
from sky_trainer.sections.lora import LoraConfig, with_adapters
from sky_trainer.sync.delivery import BroadcastDelivery, Delivery, DiskDelivery, LoraDelivery, Server
from sky_trainer.sync.files import VersionedFiles
from sky_trainer.sync.groups import Group, TorchGroup
from sky_trainer.sync.probe import TEXT, Probe, own_logprobs
from sky_trainer.sync.servers import ServerWeights, UpdateRules
from sky_trainer.weights import WeightsNotVisible
from skyenv.engines.control import Rendezvous
from skyenv.engines.pool import EnginePool
from skyenv.engines.starting import free_port, started
from skyenv.types import Completion, SamplingParams
from tests.conftest import RealServer
from tests.engines.models import save_model
from tests.engines.serve import spec

pytestmark = pytest.mark.engine
TEMPERATURE = 0.8
PROMPT = list(range(20, 50))


@pytest.fixture(params=["vllm", "sglang"])
def server(request: pytest.FixtureRequest) -> RealServer:
    found: RealServer = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def portal() -> Iterator[BlockingPortal]:
    with start_blocking_portal() as portal:
        yield portal


def step(model: Any, seed: int, size: float = 0.02) -> None:
    """Change everything that is trained."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(size * torch.randn(parameter.shape, generator=generator))


@contextmanager
def syncing(
    portal: BlockingPortal, server: RealServer, model: Any, delivery: Callable[[Any], Delivery], rules: UpdateRules
) -> Iterator[tuple[EnginePool, ServerWeights]]:
    """The pool over one server and the trainer's way to it."""
    config = EngineConfig(kind=server.flavour, urls=(server.url,))
    with opened(portal, opened_servers(config)) as (pool, servers):
        ids = load_tokenizer(str(server.model)).encode(TEXT)
        probe = Probe(model, ids, TEMPERATURE)
        yield pool, ServerWeights(portal, pool, servers, delivery(model), rules=rules, probe=probe)


def agree(model: Any, answer: Completion, prompt: Sequence[int] = PROMPT) -> bool:
    """Whether what was sampled has the trainer's own logprobs."""
    (own,) = own_logprobs(model, [*prompt, *answer.token_ids], (TEMPERATURE,))
    return own[len(prompt) - 1 :] == pytest.approx(list(answer.logprobs), abs=1e-4)


def rounds(portal: BlockingPortal, pool: EnginePool, weights: ServerWeights, model: Any, count: int) -> None:
    """Push, sample, compare, step."""
    for version in range(count):
        weights.push(version)
        assert weights.last is not None
        assert weights.last.gap is not None
        assert weights.last.gap < 1e-4
        answer = call(portal, pool.generate, PROMPT, SamplingParams(temperature=TEMPERATURE, max_tokens=12))
        assert answer.policy_version == version
        assert agree(model, answer)
        step(model, version)


def test_files_round_after_round(portal: BlockingPortal, server: RealServer, tmp_path: Path) -> None:
    model = load_model(str(server.model))
    with syncing(portal, server, model, lambda m: DiskDelivery(m, VersionedFiles(tmp_path)), UpdateRules()) as (
        pool,
        weights,
    ):
        rounds(portal, pool, weights, model, 4)


def test_rollouts_go_on_across_an_update(portal: BlockingPortal, server: RealServer, tmp_path: Path) -> None:
    """What is broken off is asked for again: ids of one version each, none lost."""
    model = load_model(str(server.model))
    sampling = SamplingParams(temperature=TEMPERATURE, max_tokens=160)

    async def running(pool: EnginePool) -> int:
        return sum(stats.requests for stats in pool.stats)

    with syncing(portal, server, model, lambda m: DiskDelivery(m, VersionedFiles(tmp_path)), UpdateRules()) as (
        pool,
        weights,
    ):
        weights.push(0)
        prompts = [[*PROMPT, number] for number in range(5, 13)]
        under_way = [portal.start_task_soon(pool.generate, prompt, sampling) for prompt in prompts]
        while portal.call(running, pool) < len(prompts) // 2 and not any(future.done() for future in under_way):
            portal.call(anyio.sleep, 0.01)
        step(model, 0)
        weights.push(1)
        answers = [future.result(120) for future in under_way]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.policy_version == 0 or agree(model, answer, prompt)
        assert {version for _, version in answer.versions} <= {0, 1}


def test_a_broadcast_reaches_sglang(portal: BlockingPortal, sglang: RealServer) -> None:
    model = load_model(str(sglang.model))
    with syncing(portal, sglang, model, lambda m: BroadcastDelivery(m, "gloo", "127.0.0.1", 120.0), UpdateRules()) as (
        pool,
        weights,
    ):
        rounds(portal, pool, weights, model, 3)


@pytest.fixture(scope="module")
def tied_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A vLLM of a model whose output head is its embeddings, which takes adapters and broadcasts."""
    folder = tmp_path_factory.mktemp("tied")
    model = save_model(folder / "model", seed=0, tied=True)
    options = (
        *("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2"),
        *("--weight-transfer-config", '{"backend": "gloo"}'),
        *("--worker-extension-cls", "tests.engines.gloo_transfer.Extension"),
    )
    env = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "PYTHONPATH": str(Path(__file__).parents[2])}
    with ExitStack() as stack:
        wanted = spec("vllm", model, *options, **env)
        server = stack.enter_context(started(wanted, folder / "log"))
        yield RealServer("vllm", server.url, model)


class WithoutHead(DiskDelivery):
    """Checkpoints as transformers writes them: a tied head is left out."""

    def prepare(self, version: int) -> None:
        written = self._files.begin(version)
        self._model.save_pretrained(written)
        self._files.finish(written, version)


def test_an_old_head_is_caught_and_a_written_head_is_taken(
    portal: BlockingPortal, tied_vllm: RealServer, tmp_path: Path
) -> None:
    """vLLM on a CPU keeps a packed copy of a tied head when a checkpoint does not name it, and says nothing."""
    model = load_model(str(tied_vllm.model))
    with syncing(portal, tied_vllm, model, lambda m: WithoutHead(m, VersionedFiles(tmp_path / "a")), UpdateRules()) as (
        _,
        weights,
    ):
        weights.push(0)
        step(model, 0)
        with pytest.raises(WeightsNotVisible, match="ties its output head") as caught:
            weights.push(1)
        assert caught.value.gap > 0.01
    with syncing(
        portal, tied_vllm, model, lambda m: DiskDelivery(m, VersionedFiles(tmp_path / "b")), UpdateRules()
    ) as (
        pool,
        weights,
    ):
        rounds(portal, pool, weights, model, 3)


def test_adapters_round_after_round(portal: BlockingPortal, tied_vllm: RealServer, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    bare = load_model(str(tied_vllm.model))
    with syncing(
        portal, tied_vllm, bare, lambda m: DiskDelivery(m, VersionedFiles(tmp_path / "base")), UpdateRules()
    ) as (
        _,
        weights,
    ):
        weights.push(0)
    model = get_peft_model(bare, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
    with syncing(
        portal, tied_vllm, model, lambda m: LoraDelivery(m, VersionedFiles(tmp_path / "lora")), UpdateRules()
    ) as (
        pool,
        weights,
    ):
        rounds(portal, pool, weights, model, 4)


class ToVllm(BroadcastDelivery):
    """The broadcast to vLLM with Gloo in NCCL's place."""

    async def _join(self, server: Server) -> tuple[Group, str]:
        size = 1 + await server.control.workers()
        port = free_port()
        group = TorchGroup("gloo", "127.0.0.1", port, size, "transfer", 120.0)
        where = Rendezvous("127.0.0.1", port, size)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.control.join, where)
            await anyio.to_thread.run_sync(group.join)
        return group, "transfer"


def test_an_exported_model_is_served(portal: BlockingPortal, server: RealServer, tmp_path: Path) -> None:
    """An adapter merged into its base by `sky_trainer export`: the server samples from base and adapter together."""
    policy = with_adapters(load_model(str(server.model)), LoraConfig(rank=4))
    step(policy, 1, 0.2)
    policy.save_pretrained(tmp_path / "final", save_embedding_layers=False)
    load_tokenizer(str(server.model)).save_pretrained(tmp_path / "final")
    assert main(["export", str(tmp_path / "final"), str(tmp_path / "out")]) == 0
    with opened(portal, opened_servers(EngineConfig(kind=server.flavour, urls=(server.url,)))) as (pool, servers):
        call(portal, servers[0].control.load_from_disk, str(tmp_path / "out"), 1)
        answer = call(portal, pool.generate, PROMPT, SamplingParams(temperature=TEMPERATURE, max_tokens=12))
    assert agree(policy, answer)
    assert not agree(load_model(str(server.model)), answer)


def test_vllm_takes_a_broadcast_by_its_own_protocol(portal: BlockingPortal, tied_vllm: RealServer) -> None:
    model = load_model(str(tied_vllm.model))
    with syncing(portal, tied_vllm, model, lambda m: ToVllm(m, "gloo", "127.0.0.1", 120.0), UpdateRules()) as (
        pool,
        weights,
    ):
        rounds(portal, pool, weights, model, 3)
