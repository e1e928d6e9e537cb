"""One node server for all tests of this folder, on a portal, so that it is started once."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from skyenv.core import SandboxProvider
from skyenv.portal import Portal
from skyenv.remote.client import connect


class Sandboxes:
    """Runs coroutine functions that take the shared provider."""

    def __init__(self, portal: Portal, provider: SandboxProvider) -> None:
        self._portal = portal
        self.provider = provider

    def run(self, function: Callable[[SandboxProvider], Coroutine[Any, Any, Any]]) -> Any:
        actor = self._portal.actor()
        try:
            return actor.call(lambda: function(self.provider))
        finally:
            actor.close()


@pytest.fixture(scope="session")
def sandboxes() -> Iterator[Sandboxes]:
    with Portal() as portal, portal.enter(connect()) as provider:
        yield Sandboxes(portal, provider)
