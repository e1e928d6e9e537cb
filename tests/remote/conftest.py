"""Real node servers for the tests: one process for each kind and session, reached over a socket."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from node_processes import SERVE, SERVE_ROOTLESS, served


@pytest.fixture(scope="session")
def local_url() -> Iterator[str]:
    with served(SERVE, "local") as (_process, url):
        yield url


@pytest.fixture(scope="session")
def rootless_url() -> Iterator[str]:
    with served(SERVE_ROOTLESS) as (_process, url):
        yield url


@pytest.fixture(scope="session")
def process_url() -> Iterator[str]:
    with served(SERVE, "process") as (_process, url):
        yield url
