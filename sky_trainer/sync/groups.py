"""The sender's end of a transfer group: rank 0 of a group whose other ranks are one server's workers.

Nothing here imports a server's package. `TorchGroup` is what SGLang joins, over NCCL or Gloo; `NcclGroup` is what vLLM
joins, over torch's own binding of NCCL. Both block, so they are called in a thread. A group lasts like the process.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch


class Group(Protocol):
    """Rank 0 of a transfer group."""

    def join(self) -> None:
        """Return once every other rank is there."""
        ...

    def send(self, tensors: Iterable[torch.Tensor]) -> None:
        """Broadcast tensors one after another."""
        ...


class TorchGroup:
    """A torch process group beside the trainer's own, with its store at `address`:`port` in this process."""

    def __init__(
        self, backend: Literal["nccl", "gloo"], address: str, port: int, world_size: int, name: str, timeout: float
    ) -> None:
        self._backend, self._where, self._world_size = backend, f"tcp://{address}:{port}", world_size
        self._name, self._timeout = name, timedelta(seconds=timeout)
        self._group: Any = None

    def join(self) -> None:
        """As `torch.distributed.init_process_group`, without making it the default group."""
        from torch.distributed import distributed_c10d as c10d
        from torch.distributed.rendezvous import rendezvous

        met = rendezvous(self._where, 0, self._world_size, timeout=self._timeout)
        store, rank, size = next(met)
        store.set_timeout(self._timeout)
        new_group: Any = c10d._new_process_group_helper
        self._group, _ = new_group(
            size,
            rank,
            [],
            c10d.Backend(self._backend),
            c10d.PrefixStore(self._name, store),
            group_name=self._name,
            timeout=self._timeout,
        )
        c10d._world.pg_group_ranks[self._group] = {i: i for i in range(size)}

    def send(self, tensors: Iterable[torch.Tensor]) -> None:
        """Each tensor by one broadcast, from the GPU where NCCL carries it."""
        import torch
        import torch.distributed as dist

        device = torch.device("cuda") if self._backend == "nccl" else torch.device("cpu")
        for tensor in tensors:
            dist.broadcast(tensor.to(device).contiguous(), src=0, group=self._group)


class NcclGroup:
    """An NCCL communicator by a unique id that the server is told beforehand."""

    def __init__(self, world_size: int) -> None:
        import torch

        self._world_size = world_size
        self._id: bytes = torch.cuda.nccl.unique_id()
        self._comm: Any = None

    @property
    def unique_id(self) -> str:
        """The id in standard base64."""
        return base64.b64encode(self._id).decode()

    def join(self) -> None:
        """Form the communicator; every rank then reduces one element, as vLLM's workers do."""
        import torch

        self._comm = torch.cuda.nccl.init_rank(self._world_size, self._id, 0)
        one = torch.zeros(1, device="cuda")
        torch.cuda.nccl.all_reduce([one], [one], comms=[self._comm])
        torch.cuda.synchronize()

    def send(self, tensors: Iterable[torch.Tensor]) -> None:
        """Each tensor by one broadcast on the current stream."""
        import torch

        for tensor in tensors:
            torch.cuda.nccl.broadcast([tensor.to("cuda").contiguous()], 0, comms=[self._comm])
        torch.cuda.synchronize()
