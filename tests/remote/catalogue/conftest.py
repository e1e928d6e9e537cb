"""One node for each backend, shared by the whole catalogue."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", params=["local", pytest.param("docker", marks=pytest.mark.docker)])
def url(request: pytest.FixtureRequest) -> str:
    """A node of each backend that has sandboxes of its own, reached over a socket."""
    found: str = request.getfixturevalue(f"{request.param}_url")
    return found
