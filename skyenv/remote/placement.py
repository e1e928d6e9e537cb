"""On which node a sandbox should start: rendezvous hashing with bounded load. Pure: no clock, no I/O, no state.

Every gateway that sees the same nodes comes to the same order. An image keeps its node until that node leaves, is full
or carries more than its share, so images stay where they are cached, and when one of N nodes leaves or comes only the
images of that node move.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

FACTOR = 1.25
ALLOWANCE = 0.25
NEAR = 3


@dataclass(frozen=True, slots=True)
class Seats:
    """What placement knows of a node: how many sandboxes it takes and has, who waits, what it need not pull."""

    name: str
    slots: int
    used: int = 0
    queued: int = 0
    images: frozenset[str] = field(default_factory=frozenset)


def weight(key: str, node: Seats) -> float:
    """How much `node` is the place for `key`; shares are in proportion to slots."""
    hashed = hashlib.blake2b(f"{node.name}\0{key}".encode("utf-8", "backslashreplace"), digest_size=8).digest()
    chance = (int.from_bytes(hashed, "big") + 0.5) / 2**64
    return -node.slots / math.log(chance)


def order(key: str, nodes: Iterable[Seats], image: str | None = None) -> list[Seats]:
    """Nodes in the order in which they should be asked for a sandbox; `key` is what wants to stay together.

    First those that carry no more than their share, by rendezvous, of the nearest `NEAR` those that hold `image`
    first; then others with room, the emptiest first; then full ones, the shortest queue first. A node may always carry
    `ALLOWANCE` of its slots, and beyond that `FACTOR` times the average.
    """
    ranked = sorted((node for node in nodes if node.slots > 0), key=lambda node: -weight(key, node))
    share = FACTOR * (sum(node.used for node in ranked) + 1) / max(1, sum(node.slots for node in ranked))
    bound = max(ALLOWANCE, share)
    within = [node for node in ranked if node.used < node.slots and node.used < bound * node.slots]
    near = [node for node in within[:NEAR] if image is not None and image in node.images]
    over = sorted(
        (node for node in ranked if node.used < node.slots and node not in within),
        key=lambda node: node.used / node.slots,
    )
    full = sorted((node for node in ranked if node.used >= node.slots), key=lambda node: node.queued / node.slots)
    return near + [node for node in within if node not in near] + over + full
