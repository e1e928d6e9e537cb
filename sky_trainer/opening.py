"""The engine of a run and how it gets the trainer's weights, opened together as the `engine:` section says."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from anyio.from_thread import BlockingPortal

from sky_trainer.config import Config
from sky_trainer.engines import HFEngine
from sky_trainer.rollouts import opened
from sky_trainer.sections.engine import EngineConfig
from sky_trainer.sync.delivery import BroadcastDelivery, Delivery, DiskDelivery, LoraDelivery, Server
from sky_trainer.sync.files import VersionedFiles
from sky_trainer.sync.probe import TEXT, Probe
from sky_trainer.sync.servers import ServerWeights, UpdateRules
from sky_trainer.weights import CopiedWeights, SharedWeights, WeightSync
from skyenv.core import Engine
from skyenv.engines.openai import OpenAIEngine
from skyenv.engines.pool import EnginePool
from skyenv.engines.sglang import SGLangControl
from skyenv.engines.vllm import VLLMControl
from skyenv.renderer import Renderer

WEIGHTS = "weights"


@contextmanager
def opened_engine(
    config: Config, portal: BlockingPortal, model: Any, renderer: Renderer
) -> Iterator[tuple[Engine, WeightSync]]:
    """The engine, open on the portal, and its `WeightSync`, for the policy `model`.

    Raises ConfigError for what the user can change, EngineUnavailable when no server answers.
    """
    if config.engine.remote:
        with opened(portal, opened_servers(config.engine)) as (pool, servers):
            ids = renderer.encode(TEXT)
            probe = Probe(model, ids, config.rollout.temperature, config.engine.probe_bound)
            yield (
                pool,
                ServerWeights(
                    portal,
                    pool,
                    servers,
                    make_delivery(config.engine, config.run_dir, model),
                    rules=UpdateRules(config.engine.pause, config.engine.sync_timeout),
                    probe=None if config.engine.probe_bound < 0 else probe,
                ),
            )
        return
    copied = config.engine.sync == "copy" or (config.engine.sync == "auto" and config.staleness > 0)
    own = copy.deepcopy(model) if copied else model
    engine = HFEngine(own, renderer.decode, renderer.stop_token_ids, seed=config.seed)
    with opened(portal, engine):
        yield engine, CopiedWeights(portal, engine, model) if copied else SharedWeights(engine)


def make_delivery(engine: EngineConfig, run_dir: Path, model: Any) -> Delivery:
    """How weights travel to servers. ConfigError when the policy or the directory does not fit."""
    if engine.sync == "nccl" or engine.sync == "gloo":
        return BroadcastDelivery(model, engine.sync, engine.address, engine.sync_timeout)
    directory = Path(engine.directory) if engine.directory else run_dir / WEIGHTS
    files = VersionedFiles(directory, engine.server_directory)
    return LoraDelivery(model, files) if engine.sync == "lora" else DiskDelivery(model, files)


@asynccontextmanager
async def opened_servers(config: EngineConfig) -> AsyncIterator[tuple[EnginePool, list[Server]]]:
    """A pool of the configured servers and the control of each."""
    assert config.kind != "embedded"
    engines = [
        OpenAIEngine(
            url,
            config.model,
            flavour=config.kind,
            timeout=config.request_timeout,
            retry_for=0.0,
            token=config.token,
        )
        for url in config.urls
    ]
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(EnginePool(engines))
        servers = []
        for engine in engines:
            kind = VLLMControl if config.kind == "vllm" else SGLangControl
            control: VLLMControl | SGLangControl = kind(engine, update_timeout=config.sync_timeout)
            servers.append(Server(engine, await stack.enter_async_context(control)))
        yield pool, servers
