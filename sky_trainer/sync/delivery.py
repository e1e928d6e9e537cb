"""The ways in which one server takes a version: files, a LoRA adapter as files, broadcast.

`prepare` and `settle` run on the trainer's thread, on every rank; `give` runs on the event loop of rank 0, for several
servers at a time. A version that was prepared can be given until the next one is prepared.
"""

from __future__ import annotations

import logging
import socket
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import anyio

from sky_trainer.sync.export import gather, named_weights
from sky_trainer.sync.files import VersionedFiles, write_checkpoint
from sky_trainer.sync.groups import Group, NcclGroup, TorchGroup
from sky_trainer.sync.ranks import is_main
from skyenv.engines.control import Rendezvous, SGLangControl, TensorMeta, VLLMControl
from skyenv.errors import ConfigError, EngineError, boundary

if TYPE_CHECKING:
    import torch

    from skyenv.engines.openai import OpenAIEngine

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Server:
    """One server: the engine that asks it for tokens and the control that updates it, both open."""

    engine: OpenAIEngine
    control: VLLMControl | SGLangControl

    @property
    def url(self) -> str:
        """Where it is."""
        return self.engine.url


class Delivery(Protocol):
    """How weights travel. `pauses`: generation is held meanwhile; `late`: a server may take a version at any time."""

    pauses: bool
    late: bool

    def prepare(self, version: int) -> None:
        """Make the trainer's weights as they are now ready to be taken. Collective over ranks."""
        ...

    async def give(self, server: Server, version: int) -> None:
        """Return once the server samples from the version that was prepared. Raises EngineError."""
        ...

    def settle(self) -> None:
        """Every server that lives has the version: let go of what is not needed any more."""
        ...


class DiskDelivery:
    """A whole checkpoint in a directory that servers reload."""

    pauses, late = True, True

    def __init__(self, model: Any, files: VersionedFiles) -> None:
        self._model, self._files = model, files

    def prepare(self, version: int) -> None:
        """Write safetensors; every rank takes part in gathering, rank 0 writes."""
        weights: dict[str, torch.Tensor] = {}
        for name, value in named_weights(self._model):
            if is_main():
                weights[name] = value.cpu()
        if is_main():
            with boundary(EngineError, f"the weights of version {version} could not be written"):
                written = self._files.begin(version)
                write_checkpoint(written, weights, _config(self._model))
                self._files.finish(written, version)

    async def give(self, server: Server, version: int) -> None:
        """Reload on the server."""
        await server.control.load_from_disk(self._files.server_path(version), version)

    def settle(self) -> None:
        """Remove old versions."""
        if is_main():
            self._files.forget_older()


class LoraDelivery:
    """The adapter alone, loaded under a name of its own for each version; requests under way keep theirs."""

    pauses, late = False, True

    def __init__(self, model: Any, files: VersionedFiles) -> None:
        if not hasattr(model, "peft_config"):
            raise ConfigError("engine.sync is lora, but the policy has no adapter; configure one, or write disk")
        if any(settings.modules_to_save for settings in model.peft_config.values()):
            raise ConfigError("engine.sync is lora, which carries adapters alone, and lora.whole is set; write disk")
        self._model, self._files = model, files
        self._run = uuid.uuid4().hex[:8]
        self._loaded: dict[str, list[str]] = {}

    def prepare(self, version: int) -> None:
        """Write the adapter in PEFT's own layout."""
        import torch

        with torch.no_grad():
            state = {
                name: gather(value.detach()).cpu()
                for name, value in self._model.state_dict(keep_vars=True).items()
                if ".lora_" in name and any(f".{adapter}." in name for adapter in self._model.active_adapters)
            }
        if is_main():
            with boundary(EngineError, f"the adapter of version {version} could not be written"):
                written = self._files.begin(version)
                self._model.save_pretrained(
                    written,
                    state_dict=state,
                    save_embedding_layers=False,
                    selected_adapters=list(self._model.active_adapters),
                )
                self._files.finish(written, version)

    async def give(self, server: Server, version: int) -> None:
        """Load it beside the one before, point new requests to it, unload the one before that."""
        name = f"policy-{self._run}-{version}"
        names = self._loaded.setdefault(server.url, [])
        await server.control.load_adapter(name, self._files.server_path(version))
        names.append(name)
        server.engine.adapter = name
        server.control.installed(version)
        while len(names) > 2:
            try:
                await server.control.unload_adapter(names.pop(0))
            except EngineError as error:
                logger.warning("an old adapter stays: %s", error)

    def settle(self) -> None:
        """Remove old versions."""
        if is_main():
            self._files.forget_older()


class BroadcastDelivery:
    """Tensors from the trainer's memory into the servers', one group a server, so that a dead one holds up no other."""

    pauses, late = True, False

    def __init__(self, model: Any, backend: Literal["nccl", "gloo"], address: str, timeout: float) -> None:
        self._model, self._backend, self._timeout = model, backend, timeout
        self._address = address or "127.0.0.1"
        self._groups: dict[str, tuple[Group, str]] = {}
        self._weights: dict[str, torch.Tensor] = {}

    def prepare(self, version: int) -> None:
        """Name the tensors; those of a sharded module are gathered into rank 0's memory."""
        for name, value in named_weights(self._model):
            if is_main():
                self._weights[name] = value

    async def give(self, server: Server, version: int) -> None:
        """Broadcast while the server receives. What fails takes the group with it; the next time forms another."""
        formed = self._groups.pop(server.url) if server.url in self._groups else await self._join(server)
        group, name = formed
        metas = [
            TensorMeta(name, str(value.dtype).removeprefix("torch."), tuple(value.shape))
            for name, value in self._weights.items()
        ]
        await server.control.begin_update()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_receive, server, metas, name)
            with boundary(EngineError, f"the weights could not be sent to {server.url}"):
                await anyio.to_thread.run_sync(group.send, list(self._weights.values()), abandon_on_cancel=True)
        await server.control.finish_update(version)
        self._groups[server.url] = formed

    async def _join(self, server: Server) -> tuple[Group, str]:
        """Form a group under a new name; both ends wait for each other."""
        name = f"skyenv-{uuid.uuid4().hex[:8]}"
        size = 1 + await server.control.workers()
        made: Group
        if isinstance(server.control, VLLMControl):
            made = nccl = NcclGroup(size)
            where = Rendezvous(self._address, 0, size, unique_id=nccl.unique_id)
        else:
            port = _free_port(self._address)
            made = TorchGroup(self._backend, self._address, port, size, name, self._timeout)
            where = Rendezvous(self._address, port, size, backend=self._backend, group=name)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.control.join, where)
            with boundary(EngineError, f"no transfer group with {server.url}"):
                await anyio.to_thread.run_sync(made.join, abandon_on_cancel=True)
        return made, name

    def settle(self) -> None:
        """Let go of gathered tensors."""
        self._weights = {}


async def _receive(server: Server, metas: list[TensorMeta], name: str) -> None:
    await server.control.receive(metas, group=name)


def _free_port(address: str) -> int:
    with socket.create_server((address, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _config(model: Any) -> Any:
    """The transformers configuration below any adapter."""
    return (model.get_base_model() if hasattr(model, "get_base_model") else model).config
