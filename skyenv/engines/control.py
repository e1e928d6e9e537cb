"""What a trainer says to an inference server beside asking it for tokens: stop, go on, take these weights.

One `EngineControl` a server, for vLLM (started with `VLLM_SERVER_DEV_MODE=1`) and for SGLang. An update is: `pause`,
`load_from_disk` or a transfer (`join` once; `begin_update`, `receive`, `finish_update` each time), `resume`. After a
successful update the control notes the version, tells it to the server, and writes it on the engine it was made for, so
that completions which start later carry it. A control that failed in the middle of an update leaves the server as it
is: the caller decides whether that server may go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

import httpx

from skyenv.engines.controlled import PauseMode, Rendezvous, TensorMeta
from skyenv.engines.openai import OpenAIEngine
from skyenv.engines.sglang import SGLangControl
from skyenv.engines.vllm import VLLMControl
from skyenv.errors import ConfigError

__all__ = ["EngineControl", "PauseMode", "Rendezvous", "SGLangControl", "TensorMeta", "VLLMControl", "control_of"]


class EngineControl(Protocol):
    """Control of one inference server, open inside `async with`. Calls raise EngineError or EngineUnavailable."""

    @property
    def url(self) -> str:
        """Where the server is."""
        ...

    @property
    def version(self) -> int:
        """Version of the last update that succeeded through this control; 0 before any."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def healthy(self) -> bool:
        """Whether the server answers its health page."""
        ...

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Hold generation; what becomes of running requests is the mode's. ConfigError when the server lacks it."""
        ...

    async def resume(self) -> None:
        """Go on generating; harmless when nothing is paused."""
        ...

    async def abort(self, request_id: str = "") -> None:
        """End one request, or all of them, with what they have. Unknown ids are ignored."""
        ...

    async def reported_version(self) -> str:
        """The version that the server itself tells; what it says before the first update is its own matter."""
        ...

    async def load_from_disk(self, path: str, version: int) -> None:
        """Take the weights of the checkpoint in the directory `path`, which the server must see under that name."""
        ...

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter from `path` under a new name; an engine's `adapter` then chooses it."""
        ...

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter."""
        ...

    async def workers(self) -> int:
        """How many ranks of a transfer's group the server takes."""
        ...

    async def join(self, where: Rendezvous) -> None:
        """Form the transfer group; returns once all ranks are there, so the sender joins meanwhile."""
        ...

    async def begin_update(self) -> None:
        """Make the weights of the model ready to be overwritten."""
        ...

    async def receive(self, tensors: Sequence[TensorMeta], *, group: str = "skyenv") -> None:
        """Take tensors that the sender broadcasts from rank 0 in this order meanwhile; may be called several times."""
        ...

    async def finish_update(self, version: int) -> None:
        """Put the received weights to use, forget cached prefixes of the old ones, and note the version."""
        ...

    async def leave(self, *, group: str = "skyenv") -> None:
        """Dissolve the transfer group, where the server knows how to."""
        ...

    async def sleep(self) -> None:
        """Free the accelerator memory of weights and cache; requests and updates must wait for `wake`."""
        ...

    async def wake(self) -> None:
        """Take the memory back. What the weights are then is undefined until the next update."""
        ...


def control_of(
    engine: OpenAIEngine,
    *,
    timeout: float = 30.0,
    update_timeout: float = 600.0,
    transport: httpx.AsyncBaseTransport | None = None,
) -> EngineControl:
    """The control of an engine's server; open it with `async with`.

    `timeout` bounds each quick call, `update_timeout` each that moves weights or waits for requests, in seconds. The
    engine must know what its server is: open it, or name its flavour. ConfigError for a server that takes no weights.
    """
    if engine.flavour == "vllm":
        return VLLMControl(engine, timeout=timeout, update_timeout=update_timeout, transport=transport)
    if engine.flavour == "sglang":
        return SGLangControl(engine, timeout=timeout, update_timeout=update_timeout, transport=transport)
    raise ConfigError(f"engine.flavour: {engine.flavour!r} takes no weights; open the engine, or name vllm or sglang")
