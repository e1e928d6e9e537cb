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
_ASSUMED = re.compile(r"(?:(\d+)x(?=\d))?(?:(\d+)x?)?([A-Za-z][\w-]*)?")


@dataclass(frozen=True, slots=True)
class Gpus:
    """`count` devices of `memory` bytes each, in `machines` with as many each.

    Without any GPU, `kind` none, the machine's memory stands for one.
    """

    name: str
    count: int
    memory: float
    kind: Literal["probed", "assumed", "none"]
    machines: int = 1

    def describe(self) -> str:
        """One phrase."""
        many = f" in {self.machines} machines" if self.machines > 1 else ""
        return f"{self.count} x {self.name}{many}, {self.memory / GIB:.0f} GiB each"


def assumed(text: str) -> Gpus:
    """Read `8`, `H100`, `8xH100`, or `2x8xH100` for two machines; one GPU, or an H100, where the other is not given.

    ConfigError for the rest.
    """
    found = _ASSUMED.fullmatch(text)
    kind = (found[3] or "H100").upper() if found else ""
    machines, each = (int(found[1] or 1), int(found[2] or 1)) if found else (0, 0)
    if not text or kind not in TYPES or not machines * each:
        raise ConfigError(
            f"--assume-gpu {text!r}: write a number, a type, both as in 8xH100, or machines as well as in 2x8xH100;"
            f" types are {', '.join(TYPES)}"
        )
    return Gpus(kind, machines * each, TYPES[kind] * 1e9, "assumed", machines)


def probed() -> Gpus:
    """What torch sees; the machine's memory when that is no GPU."""
    import torch

    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory
        return Gpus(torch.cuda.get_device_name(0), torch.cuda.device_count(), memory, "probed")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Gpus("no GPU, the memory of this machine", 1, memory, "none")
