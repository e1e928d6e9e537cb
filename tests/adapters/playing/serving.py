"""An ASGI application on a free port, in a thread of this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import uvicorn

from skyenv.remote.listen import Listening


@contextmanager
def running(app: Any) -> Iterator[str]:
    """Its URL, while it is served."""
    listener = Listening(port=0).bind()
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5))
    thread = Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield Listening().url(listener)
    finally:
        server.should_exit = True
        thread.join()
