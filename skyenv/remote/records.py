"""What a backend keeps with a sandbox for the next node server."""

from __future__ import annotations

import time

from skyenv.remote.backends import Record
from skyenv.remote.protocol import CreateRequest

LEAST_SLACK = 1.0


def lease_slack(ttl: float) -> float:
    """By how much a noted lease may be out of date, in seconds."""
    return max(LEAST_SLACK, ttl / 8)


def lease_end(used: float, ttl: float) -> float:
    """When a lease ends that was noted when the sandbox was used at `used`."""
    return used + ttl + lease_slack(ttl)


def new_record(name: str, request: CreateRequest, secret: str | None) -> Record:
    """What is kept with a sandbox that starts now."""
    return {
        "name": name,
        "ttl": request.spec.ttl,
        "freeze_after": request.spec.freeze_after,
        "expires": lease_end(time.monotonic(), request.spec.ttl),
        "request": request.model_dump(mode="json", exclude_unset=True),
        "created": time.time(),
        "secret": secret,
    }
