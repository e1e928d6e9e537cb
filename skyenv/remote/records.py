"""What a backend keeps with a sandbox for the next node server."""

from __future__ import annotations

import time

from skyenv.remote.backends import Record
from skyenv.remote.protocol import CreateRequest
from skyenv.remote.session import lease_end


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
