"""Ctrl-C while heavy libraries are imported.

Imports run destructors and callbacks in which Python drops an exception after printing it, so an interrupt that lands
there would be lost and the command would go on.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt at the end of the block when one came inside it; a second one is raised at once.

    For the main thread.
    """
    came = 0

    def remember(signum: int, frame: FrameType | None) -> None:
        nonlocal came
        came += 1
        if came > 1:
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if came:
        raise KeyboardInterrupt
