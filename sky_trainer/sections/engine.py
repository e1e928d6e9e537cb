"""The `engine:` section: what samples, and how new weights reach it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sky_trainer.settings import check_least
from skyenv.errors import ConfigError

Sync = Literal["auto", "shared", "copy", "disk", "nccl", "gloo", "lora"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What samples: the policy in this process (`embedded`), or the servers at `urls`, which are `kind` all of them.

    `model` "" is the servers' first; `token` is their bearer token, else OPENAI_API_KEY. `sync` shared: the trainer's
    own module samples; copy: a copy of it in this process; disk: files in `directory` (default: `weights` in the run
    directory), which servers may see as `server_directory`; nccl: broadcast from GPU to GPU, with gloo in its place
    for SGLang on CPUs, met at `address`, this machine's name for the servers; lora: the adapter alone, as files; auto:
    shared, copy where rollouts run ahead of the trainer, or disk. `pause` is what becomes of requests
    under way during an update, see `skyenv.engines.control.PauseMode`; `sync_timeout` bounds it in seconds,
    `request_timeout` one generation. `probe_bound`: after each update a probe's logprobs may differ by so much on
    average between a server and the trainer; 0 compares with a bound of the model's precision, negative not at all.
    """

    kind: Literal["embedded", "vllm", "sglang"] = "embedded"
    urls: tuple[str, ...] = ()
    model: str = ""
    token: str | None = None
    sync: Sync = "auto"
    directory: str = ""
    server_directory: str = ""
    pause: Literal["abort", "keep", "recompute", "wait"] = "abort"
    sync_timeout: float = 600.0
    request_timeout: float = 600.0
    address: str = ""
    probe_bound: float = 0.0

    @property
    def remote(self) -> bool:
        """Whether servers sample."""
        return self.kind != "embedded"


def check_engine(engine: EngineConfig, *, launched: bool = False) -> None:
    """Raise ConfigError naming the field and the fix. `launched`: the run starts its servers, which have no URL yet."""
    check_least(
        {"engine.sync_timeout": (engine.sync_timeout, 1), "engine.request_timeout": (engine.request_timeout, 1)}
    )
    if not engine.remote:
        _check_embedded(engine)
        return
    if not engine.urls and not launched:
        raise ConfigError(
            f"engine.urls is empty; name at least one {engine.kind} server, such as http://127.0.0.1:8000,"
            " or let the run start them with launch.servers"
        )
    for url in engine.urls:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"engine.urls: {url!r} must start with http:// or https://")
    if len(set(engine.urls)) < len(engine.urls):
        raise ConfigError("engine.urls names a server twice; each takes its weights once")
    if engine.sync in ("shared", "copy"):
        raise ConfigError(
            f"engine.sync is {engine.sync}, which needs engine.kind embedded; a server takes disk, nccl, lora"
        )
    if engine.sync == "gloo" and engine.kind == "vllm":
        raise ConfigError("engine.sync is gloo, which vLLM does not know; write disk, or nccl on GPUs")
    if engine.pause == "wait" and engine.kind == "sglang":
        raise ConfigError("engine.pause is wait, which SGLang does not know; write abort, keep or recompute")


def _check_embedded(engine: EngineConfig) -> None:
    if engine.urls:
        raise ConfigError("engine.urls is set, but engine.kind is embedded; set engine.kind to vllm or sglang")
    if engine.sync not in ("auto", "shared", "copy"):
        raise ConfigError(f"engine.sync is {engine.sync}, which needs servers; set engine.kind and engine.urls")
