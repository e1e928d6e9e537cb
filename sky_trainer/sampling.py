"""What a training run samples with: its engine, wherever that runs, the rollout workers if any, and their weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anyio.from_thread import BlockingPortal

from sky_trainer.config import Config
from sky_trainer.opening import opened_engine
from sky_trainer.rollouts import opened
from sky_trainer.sharding import AnnouncedWeights
from sky_trainer.starting import policy_source
from sky_trainer.supervise import launched
from sky_trainer.sync.ranks import share
from sky_trainer.weights import WeightSync
from skyenv.core import Engine
from skyenv.renderer import Renderer
from skyenv.vector.sharded import ShardedPipeline

if TYPE_CHECKING:
    from sky_trainer.cluster import Cluster
    from sky_trainer.display import Display


@dataclass(frozen=True, slots=True)
class Sampling:
    """Open for the run. `workers`: roll out there instead of in this process."""

    engine: Engine
    weights: WeightSync
    workers: ShardedPipeline | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run samples: on the loop of this process, told of on this display, over this cluster if there is one."""

    portal: BlockingPortal
    display: Display
    cluster: Cluster | None = None


def shared_urls(config: Config) -> Config:
    """The configuration with the URLs of the servers that rank 0 started, on the other ranks; collective."""
    if not config.launch.servers:
        return config
    return dataclasses.replace(config, engine=dataclasses.replace(config.engine, urls=share(())))


@contextmanager
def opened_sampling(config: Config, place: Place, model: Any, renderer: Renderer) -> Iterator[Sampling]:
    """Start the servers that the configuration asks for, connect to them, and start the workers of a cluster.

    Call it on rank 0 once `starting_policy` has returned: servers start from that, and the other ranks hear where
    (`shared_urls`). Raises as `opened_engine` does.
    """
    portal, cluster, policy = place.portal, place.cluster, policy_source(config)
    with ExitStack() as stack:
        launching = launched if cluster is None else cluster.launched
        launch = stack.enter_context(launching(config, policy, place.display.stage))
        if config.launch.servers:
            share(launch.config.engine.urls)
        engine, direct = stack.enter_context(opened_engine(launch.config, portal, model, renderer))
        weights = launch.patient(direct)
        if cluster is None or not config.ray.workers:
            yield Sampling(engine, weights)
            return
        workers = stack.enter_context(opened(portal, cluster.pipeline(launch.config, policy, place.display.event)))
        yield Sampling(engine, AnnouncedWeights(weights, portal, workers), workers)
