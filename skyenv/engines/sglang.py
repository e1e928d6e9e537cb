"""Control of an SGLang server. See `skyenv.engines.control`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skyenv.engines.controlled import ControlledServer, PauseMode, Rendezvous, TensorMeta
from skyenv.errors import ConfigError, EngineError


class SGLangControl(ControlledServer):
    """SGLang 0.5.23 or later. See `EngineControl`."""

    _frozen = False

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Hold generation; there is no `wait`."""
        modes = {"abort": "abort", "keep": "in_place", "recompute": "retract"}
        if mode not in modes:
            raise ConfigError("pause: SGLang knows no 'wait'; not paused, it finishes requests before it takes weights")
        await self.holding("/pause_generation", body={"mode": modes[mode]})
        self._frozen = mode == "keep"
        if mode == "abort":
            await self.take_back()

    async def resume(self) -> None:
        """Go on generating."""
        await self.call("POST", "/continue_generation", body={})
        self.release()
        self._frozen = False

    async def abort(self, request_id: str = "") -> None:
        """End one request or all."""
        body = {"rid": request_id} if request_id else {"abort_all": True}
        await self.call("POST", "/abort_request", body=body)

    async def reported_version(self) -> str:
        """What `/model_info` tells."""
        return str((await self.call("GET", "/model_info"))["weight_version"])

    async def load_from_disk(self, path: str, version: int) -> None:
        """Load in place on every worker."""
        await self._update("/update_weights_from_disk", {"model_path": path, **self._update_options(version)})
        self.installed(version)

    async def load_adapter(self, name: str, path: str) -> None:
        """Needs `--enable-lora` and its bounds on rank and targets."""
        await self._update("/load_lora_adapter", {"lora_name": name, "lora_path": path})

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter."""
        await self._update("/unload_lora_adapter", {"lora_name": name})

    async def workers(self) -> int:
        """Ranks of tensor parallelism; data-parallel servers take no transfers."""
        return int((await self.call("GET", "/server_info"))["tp_size"])

    async def join(self, where: Rendezvous) -> None:
        """Form a torch process group."""
        if where.unique_id:
            raise ConfigError("rendezvous.unique_id: SGLang meets at an address and a port")
        body = {
            "master_address": where.address,
            "master_port": where.port,
            "rank_offset": where.rank_offset,
            "world_size": where.world_size,
            "group_name": where.group,
            "backend": where.backend,
        }
        await self._update("/init_weights_update_group", body)

    async def begin_update(self) -> None:
        """Make weights that are packed in place loadable."""
        await self._update("/begin_weight_update", {})

    async def receive(self, tensors: Sequence[TensorMeta], *, group: str = "skyenv") -> None:
        """Take tensors over the group."""
        body = {
            "names": [tensor.name for tensor in tensors],
            "dtypes": [tensor.dtype for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
            "group_name": group,
            "flush_cache": not self._frozen,
        }
        await self._update("/update_weights_from_distributed", body)

    async def finish_update(self, version: int) -> None:
        """Finalise, then name the version."""
        await self._update("/end_weight_update", {})
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._update("/update_weight_version", body)
        self.installed(version)

    async def leave(self, *, group: str = "skyenv") -> None:
        """Dissolve the process group."""
        await self._update("/destroy_weights_update_group", {"group_name": group})

    async def sleep(self) -> None:
        """Needs `--enable-memory-saver`."""
        await self.call("POST", "/release_memory_occupation", body={}, slow=True)

    async def wake(self) -> None:
        """Take the memory back."""
        await self.call("POST", "/resume_memory_occupation", body={}, slow=True)

    def _update_options(self, version: int) -> dict[str, Any]:
        """SGLang keeps the prefix cache of frozen requests, or refuses the update."""
        return {"weight_version": str(version), "flush_cache": not self._frozen}

    async def _update(self, path: str, body: dict[str, Any]) -> None:
        answer = await self.call("POST", path, body=body, slow=True)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineError(f"{self.url}{path}: {answer.get('message') or answer.get('error_message') or 'refused'}")
