"""The `launch:` section: inference servers that a run starts, watches and ends by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from sky_trainer.sections.engine import EngineConfig
from sky_trainer.sections.lora import LoraConfig
from sky_trainer.settings import check_least
from skyenv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """`servers` of the kind that `engine.kind` names are started for the run (0: none) and end with it.

    `environment` is the directory of the engine's own virtual environment; where it does not exist it is made with
    `installer` from `install`, requirements as pip takes them. `program` transformers: `sky_trainer serve-engine` of
    this environment instead, which speaks SGLang's dialect. `options` go onto each server's command line, `env` over
    its environment; `gpus` are the devices of each server, such as ["0,1", "2,3"]. A server must be ready within
    `ready_timeout` seconds; one that ends, or answers no health check for `health_timeout` seconds, is started again,
    at most `restarts` times. Their output goes to `logs`, a directory (default: engines in the run directory).
    """

    servers: int = 0
    program: Literal["engine", "transformers"] = "engine"
    environment: str = ""
    install: tuple[str, ...] = ()
    installer: Literal["uv", "pip"] = "uv"
    options: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    device: Literal["cuda", "cpu"] = "cuda"
    gpus: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    restarts: int = 3
    ready_timeout: float = 900.0
    health_timeout: float = 120.0
    logs: str = ""


def check_launch(launch: LaunchConfig, engine: EngineConfig) -> None:
    """Raise ConfigError naming the field and the fix."""
    check_least(
        {
            "launch.servers": (launch.servers, 0),
            "launch.restarts": (launch.restarts, 0),
            "launch.ready_timeout": (launch.ready_timeout, 1),
            "launch.health_timeout": (launch.health_timeout, 1),
        }
    )
    if not launch.servers:
        return
    if not engine.remote:
        raise ConfigError("launch.servers is set, but engine.kind is embedded; set engine.kind to vllm or sglang")
    if engine.urls:
        raise ConfigError("engine.urls names servers that run already; leave it empty, or set launch.servers to 0")
    if launch.program == "transformers" and engine.kind != "sglang":
        raise ConfigError("launch.program transformers speaks SGLang's dialect; set engine.kind to sglang")
    if launch.program == "engine" and not launch.environment:
        raise ConfigError(f"launch.environment is empty; name the directory of {engine.kind}'s own environment")
    if launch.gpus and len(launch.gpus) != launch.servers:
        raise ConfigError(f"launch.gpus names {len(launch.gpus)} sets of devices for {launch.servers} servers")
    if launch.install and not launch.environment:
        raise ConfigError("launch.install needs launch.environment, the directory to install into")


def check_delivery(engine: EngineConfig, lora: LoraConfig) -> None:
    """Raise ConfigError where adapters are to travel alone and cannot."""
    if engine.sync != "lora":
        return
    if not lora.rank:
        raise ConfigError("engine.sync is lora, but lora.rank is 0: there is no adapter; set it, or write disk")
    if lora.whole:
        raise ConfigError("engine.sync is lora, which carries adapters alone, and lora.whole is set; write disk")


def check_adapter_options(engine: EngineConfig, launch: LaunchConfig, lora: LoraConfig) -> None:
    """Raise ConfigError where a vLLM that the run starts would refuse the run's adapters."""
    if engine.sync != "lora" or engine.kind != "vllm":
        return
    if "--enable-lora" not in launch.options:
        raise ConfigError("launch.options: vLLM takes adapters with --enable-lora --max-loras 2 alone; add them")
    options = " ".join(launch.options).replace("=", " ").split()
    most = dict(pairwise(options)).get("--max-lora-rank", "16")
    if most.isdigit() and lora.rank > int(most):
        raise ConfigError(
            f"lora.rank is {lora.rank}, but vLLM takes up to {most}; add --max-lora-rank {lora.rank} to launch.options"
        )
