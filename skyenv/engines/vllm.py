"""Control of a vLLM server. See `skyenv.engines.control`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skyenv.engines.controlled import ControlledServer, PauseMode, Rendezvous, TensorMeta


class VLLMControl(ControlledServer):
    """vLLM 0.31 or later, started with `VLLM_SERVER_DEV_MODE=1`, and with `--weight-transfer-config` for transfers.

    See `EngineControl`. With tied embeddings a reload on a CPU keeps the old output head (`docs/engines.md`).
    """

    _recompute = False

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Hold generation."""
        query = {"mode": "keep" if mode == "recompute" else mode}
        await self.holding("/pause", query=query, slow=mode == "wait")
        self._recompute = mode == "recompute"
        if mode == "abort":
            await self.take_back()

    async def resume(self) -> None:
        """Go on generating."""
        await self.call("POST", "/resume")
        self.release()
        self._recompute = False

    async def abort(self, request_id: str = "") -> None:
        """End one request or all."""
        await self.call("POST", "/abort_requests", body={"request_ids": [request_id] if request_id else []})

    async def reported_version(self) -> str:
        """What `/weight_info` tells."""
        return str((await self.call("GET", "/weight_info"))["weight_version"])

    async def load_from_disk(self, path: str, version: int) -> None:
        """Reload in place on every worker."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        await self.call("POST", "/collective_rpc", body=body, slow=True)
        await self.call("POST", "/update_weight_version", body={"new_version": str(version)})
        await self._forget_prefixes()
        self.installed(version)

    async def load_adapter(self, name: str, path: str) -> None:
        """Needs `--enable-lora` and `VLLM_ALLOW_RUNTIME_LORA_UPDATING=True`."""
        await self.call("POST", "/v1/load_lora_adapter", body={"lora_name": name, "lora_path": path}, slow=True)

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter."""
        await self.call("POST", "/v1/unload_lora_adapter", body={"lora_name": name})

    async def workers(self) -> int:
        """Ranks over tensor, pipeline and data parallelism."""
        return int((await self.call("GET", "/get_world_size"))["world_size"])

    async def join(self, where: Rendezvous) -> None:
        """The server's own backend is what it was started with."""
        store = {"master_address": where.address, "master_port": where.port}
        info: dict[str, Any] = {"nccl_unique_id_b64": where.unique_id} if where.unique_id else dict(store)
        info |= {"rank_offset": where.rank_offset, "world_size": where.world_size}
        if where.packed:
            info["packed"] = True
        await self.call("POST", "/init_weight_transfer_engine", body={"init_info": info}, slow=True)

    async def begin_update(self) -> None:
        """Prepare a reload layer by layer."""
        await self.call("POST", "/start_weight_update", slow=True)

    async def receive(self, tensors: Sequence[TensorMeta], *, group: str = "skyenv") -> None:
        """Take tensors; `group` is not vLLM's to choose."""
        info = {
            "names": [tensor.name for tensor in tensors],
            "dtype_names": [tensor.dtype for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
        }
        await self.call("POST", "/update_weights", body={"update_info": info}, slow=True)

    async def finish_update(self, version: int) -> None:
        """Finish the reload."""
        await self.call("POST", "/finish_weight_update", body={"weight_version": str(version)}, slow=True)
        await self._forget_prefixes()
        self.installed(version)

    async def leave(self, *, group: str = "skyenv") -> None:
        """Nothing to do: the next `join` replaces the group."""

    async def sleep(self) -> None:
        """Needs `--enable-sleep-mode`."""
        await self.call("POST", "/sleep", query={"level": 2}, slow=True)

    async def wake(self) -> None:
        """Weights first, cache with them."""
        await self.call("POST", "/wake_up", slow=True)

    async def _forget_prefixes(self) -> None:
        """Cached states of the old weights must not serve new requests."""
        query = {"reset_running_requests": "true"} if self._recompute else None
        await self.call("POST", "/reset_prefix_cache", query=query, slow=True)
