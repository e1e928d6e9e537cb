"""Who of the trainer's processes does what only one of them does."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def is_main() -> bool:
    """Whether this is rank 0, or the only process."""
    import torch.distributed as dist

    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def share(value: T) -> T:
    """Rank 0's value on every rank. Collective."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
