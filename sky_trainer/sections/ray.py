"""The `ray:` section: what each role of `sky_trainer launch --ray` gets of a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sky_trainer.settings import check_least
from skyenv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RayConfig:
    """`ranks` train, the `launch.servers` sample, `workers` roll out (0: rank 0 does). Each is one bundle of a
    placement group of its role, with so many CPUs and GPUs: ranks packed, servers and workers spread.

    `rank_env`, `server_env`, `worker_env` are Ray's runtime environments of the roles, such as {uv: [...]}, {pip:
    [...]}, {env_vars: {...}}, so that their packages need not fit each other. `start_timeout` bounds in seconds the
    wait for room, and for each process to start.
    """

    ranks: int = 1
    rank_cpus: float = 1.0
    rank_gpus: float = 0.0
    server_cpus: float = 1.0
    server_gpus: float = 0.0
    workers: int = 0
    worker_cpus: float = 1.0
    rank_env: Mapping[str, Any] = field(default_factory=dict)
    server_env: Mapping[str, Any] = field(default_factory=dict)
    worker_env: Mapping[str, Any] = field(default_factory=dict)
    start_timeout: float = 600.0


def check_ray(ray: RayConfig, *, remote_engine: bool, stages: int = 0) -> None:
    """Raise ConfigError naming the field and the fix."""
    check_least(
        {
            "ray.ranks": (ray.ranks, 1),
            "ray.workers": (ray.workers, 0),
            "ray.rank_cpus": (ray.rank_cpus, 0),
            "ray.rank_gpus": (ray.rank_gpus, 0),
            "ray.server_cpus": (ray.server_cpus, 0),
            "ray.server_gpus": (ray.server_gpus, 0),
            "ray.worker_cpus": (ray.worker_cpus, 0),
            "ray.start_timeout": (ray.start_timeout, 1),
        }
    )
    if ray.workers and not remote_engine:
        raise ConfigError(
            "ray.workers roll out in processes of their own, but engine.kind is embedded; set it to vllm or sglang"
        )
    if ray.workers and stages:
        raise ConfigError(
            "ray.workers serve one set of tasks; run the stages one after another, or set ray.workers to 0"
        )
