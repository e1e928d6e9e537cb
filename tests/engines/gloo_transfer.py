"""A weight transfer of vLLM's over Gloo: loaded into its workers, where NCCL has no device to run on.

Everything but the tensors' own way is vLLM's: the endpoints, the checks of what they are sent, the order of calls, the
layerwise reload. Named on the command line as `--worker-extension-cls`, which imports it in time to register it.
"""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory  # type: ignore[import-not-found]
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine  # type: ignore[import-not-found]

GROUP, PATIENCE = "transfer", timedelta(seconds=120)


class GlooWeightTransferEngine(NCCLWeightTransferEngine):  # type: ignore[misc]
    """Receives one tensor after another, as the unpacked NCCL transfer does."""

    def init_transfer_engine(self, init_info: Any) -> None:
        """Join the group whose rank 0 is the trainer."""
        where = f"tcp://{init_info.master_address}:{init_info.master_port}"
        store, rank, size = next(rendezvous(where, init_info.rank_offset, init_info.world_size))
        new_group: Any = c10d._new_process_group_helper
        prefixed = c10d.PrefixStore(GROUP, store)
        group, _ = new_group(size, rank, [], c10d.Backend("gloo"), prefixed, group_name=GROUP, timeout=PATIENCE)
        c10d._world.pg_group_ranks[group] = {i: i for i in range(size)}
        self.model_update_group = SimpleNamespace(group=group)

    def receive_weights(self, update_info: Any) -> None:
        """Broadcast by broadcast into the model's own loader."""
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            weight = torch.empty(shape, dtype=getattr(torch, dtype))
            dist.broadcast(weight, src=0, group=self.model_update_group.group)
            self.model.load_weights([(name, weight)])


WeightTransferEngineFactory.register_engine("gloo", GlooWeightTransferEngine)


class Extension:
    """Nothing beyond the import."""
