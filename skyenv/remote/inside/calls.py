"""The calls of a sandbox by their keys, kept where the sandbox is: no restart of a node makes one run twice.

A call is running or finished; whoever asks with a known key gets its answer. Finished calls are kept until the client
acknowledges them, the last 256 of them and at most 4 MiB in all (the newest always); of those that were let go the
keys of the last 512 are remembered, so that a request that was long on its way is refused and not run.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from .command import Reply

KEPT_CALLS = 256
KEPT_BYTES = 4 << 20
KEPT_KEYS = 512

Answer = tuple[dict[str, Any], bytes]


class Calls:
    """Who waits for which running call, and the answers of finished ones, oldest first."""

    def __init__(self) -> None:
        self._running: dict[str, list[Reply]] = {}
        self._finished: OrderedDict[str, Answer] = OrderedDict()
        self._size = 0
        self._dropped: OrderedDict[str, None] = OrderedDict()

    def start(self, key: str, reply: Reply) -> bool:
        """True when the key is new: the caller runs the call and hands its answer to `finish`."""
        if self.follow(key, reply):
            return False
        self._running[key] = [reply]
        return True

    def follow(self, key: str, reply: Reply) -> bool:
        """Answer `reply` with what the call came or comes to; False when the key is unknown."""
        if key in self._finished:
            reply(*self._finished[key])
        elif key in self._running:
            self._running[key].append(reply)
        elif key in self._dropped:
            reply({"error": {"code": "answered", "message": f"call {key!r} was answered and acknowledged"}}, b"")
        else:
            return False
        return True

    def finish(self, key: str, header: dict[str, Any], payload: bytes = b"") -> None:
        """Answer whoever waits, and keep the answer unless the node broke off before the call had all its input."""
        waiting = self._running.pop(key, [])
        if header.get("error", {}).get("code") != "cut":
            self._finished[key] = (header, payload)
            self._size += len(payload)
            while len(self._finished) > KEPT_CALLS or (self._size > KEPT_BYTES and len(self._finished) > 1):
                self.drop(next(iter(self._finished)))
        for reply in waiting:
            reply(header, payload)

    def drop(self, key: str) -> None:
        """Let a finished call go: its client has the answer."""
        if key in self._finished:
            self._size -= len(self._finished.pop(key)[1])
            self._dropped[key] = None
            if len(self._dropped) > KEPT_KEYS:
                self._dropped.popitem(last=False)
