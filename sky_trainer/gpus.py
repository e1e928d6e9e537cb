"""How many GPUs there are and how much memory each has: asked of torch, or told by whoever is elsewhere."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from skyenv.errors import ConfigError

GIB = 1 << 30
TYPES = MappingProxyType(
    {
        "RTX4090": 24,
        "A10G": 24,
        "L4": 24,
        "L40S": 48,
        "A100-40": 40,
        "A100": 80,
        "H100": 80,
        "H200": 141,
        "B200": 180,
        "MI300X": 192,
    }
)
"""Memory of an accelerator by its name, in 10^9 bytes."""
_ASSUMED = re.compile(r"(?:(\d+)x?)?([A-Za-z][\w-]*)?")


@dataclass(frozen=True, slots=True)
class Gpus:
    """`count` devices of `memory` bytes each. Without any GPU, `kind` none, the machine's memory stands for one."""

    name: str
    count: int
    memory: float
    kind: Literal["probed", "assumed", "none"]

    def describe(self) -> str:
        """One phrase."""
        return f"{self.count} x {self.name}, {self.memory / GIB:.0f} GiB each"


def assumed(text: str) -> Gpus:
    """Read `8`, `H100` or `8xH100`; one GPU, or an H100, where the other is not given. ConfigError for the rest."""
    found = _ASSUMED.fullmatch(text)
    kind = (found[2] or "H100").upper() if found else ""
    if not text or kind not in TYPES or (found and found[1] and int(found[1]) < 1):
        known = ", ".join(TYPES)
        raise ConfigError(f"--assume-gpu {text!r}: write a number, a type, or both as in 8xH100; types are {known}")
    assert found is not None
    return Gpus(kind, int(found[1] or 1), TYPES[kind] * 1e9, "assumed")


def probed() -> Gpus:
    """What torch sees; the machine's memory when that is no GPU."""
    import torch

    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory
        return Gpus(torch.cuda.get_device_name(0), torch.cuda.device_count(), memory, "probed")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Gpus("no GPU, the memory of this machine", 1, memory, "none")
