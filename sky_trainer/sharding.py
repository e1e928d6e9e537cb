"""Rollouts of a training run in workers of a Ray cluster: what a worker opens, and how it hears of new weights."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
from anyio.from_thread import BlockingPortal

import skyenv
from sky_trainer.assembly import choose_tasks, make_pipeline, make_renderer
from sky_trainer.config import Config, from_mapping, to_mapping
from sky_trainer.models import load_tokenizer
from sky_trainer.sections.launch import LaunchConfig
from sky_trainer.weights import WeightSync
from skyenv.engines.openai import OpenAIEngine
from skyenv.engines.pool import EnginePool
from skyenv.errors import ConfigError, EngineUnavailable
from skyenv.vector.metrics import Meter
from skyenv.vector.pipeline import RolloutPipeline
from skyenv.vector.sharded import ShardedPipeline
from skyenv.vector.wire import PipelineSpec


def worker_spec(config: Config, policy: str) -> PipelineSpec:
    """What a worker of this run opens. `policy` holds the tokenizer, and `config.engine` the servers' URLs."""
    told = dataclasses.replace(config, launch=LaunchConfig())  # the servers run already
    return PipelineSpec("sky_trainer.sharding:open_worker", {"config": to_mapping(told), "policy": policy})


@asynccontextmanager
async def open_worker(options: Mapping[str, Any]) -> AsyncIterator[RolloutPipeline]:
    """A pipeline with connections of its own to the run's sandboxes and servers."""
    config = from_mapping(options["config"])
    tasks = await anyio.to_thread.run_sync(choose_tasks, config.tasks)
    tokenizer = await anyio.to_thread.run_sync(load_tokenizer, options["policy"])
    settings, kind = config.engine, config.engine.kind
    if kind == "embedded":
        raise ConfigError("engine.kind: workers need servers")
    engines = [
        OpenAIEngine(url, settings.model, flavour=kind, timeout=settings.request_timeout, retry_for=0.0)
        for url in settings.urls
    ]
    async with skyenv.connect(config.sandbox.url, config.sandbox.token) as provider, EnginePool(engines) as pool:
        pool.admit = Readmission(pool).admit
        renderer = make_renderer(tokenizer, config.rollout)
        meter = Meter(engine_slots=config.metrics.engine_slots, timeline=config.metrics.timeline)
        yield make_pipeline(pool, renderer, provider, tasks, config.env, config.rollout, meter=meter)


class Readmission:
    """A server that was out may have lost its weights: it gets work again from the next version on, as the trainer
    gives weights to every server that answers.
    """

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self._out_since: dict[str, int] = {}

    async def admit(self, engine: OpenAIEngine) -> None:
        """EngineUnavailable until there is a newer version than when it was first asked for."""
        since = self._out_since.setdefault(engine.url, self._pool.policy_version)
        if self._pool.policy_version <= since:
            raise EngineUnavailable(f"{engine.url} gets its weights with the next update")
        del self._out_since[engine.url]


class AnnouncedWeights:
    """`WeightSync` that tells the workers, too, which version the servers sample from."""

    def __init__(self, weights: WeightSync, portal: BlockingPortal, pipeline: ShardedPipeline) -> None:
        self._weights, self._portal, self._pipeline = weights, portal, pipeline

    @property
    def version(self) -> int:
        """Version that new completions are sampled with."""
        return self._weights.version

    def push(self, version: int) -> None:
        """As `WeightSync.push`; the workers stamp the version from then on."""
        self._weights.push(version)
        self._portal.call(self._pipeline.announce, version)
