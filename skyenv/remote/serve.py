"""A node server as a process: a `Node`, its HTTP face, and the signals that end both."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from skyenv.errors import ConfigError
from skyenv.remote import backends
from skyenv.remote.listen import Listening, run, serve_app, watch_signals
from skyenv.remote.node import app_for
from skyenv.remote.sandboxes import Node
from skyenv.remote.tasks import background_tasks
from skyenv.remote.tokens import Tokens

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How `serve` works. A host that is not loopback needs a token.

    With `state`, a directory, sandboxes outlive a server that was killed: the next one with the same takes them over.
    """

    listening: Listening = field(default_factory=Listening)
    token: str | None = None
    token_file: Path | None = None
    backend: str = "local"
    state: Path | None = None
    max_sandboxes: int = 1024

    def __post_init__(self) -> None:
        if self.token is not None and not self.token:
            raise ConfigError("token: must not be empty")
        if self.max_sandboxes < 1:
            raise ConfigError(f"max_sandboxes: {self.max_sandboxes} is not at least 1")
        if self.token is None and self.token_file is None and not self.listening.loopback:
            raise ConfigError(f"host {self.listening.host} is reachable from other machines; pass a token")

    def tokens(self) -> Tokens:
        """Who may ask. ConfigError when the file is wrong."""
        return Tokens([("client", self.token)] if self.token is not None else [], self.token_file)


def serve(options: ServeOptions, *, on_ready: Callable[[str], None] = LOG.info) -> None:
    """Serve until SIGINT or SIGTERM, then end every sandbox and return. `on_ready` gets the URL once it listens.

    ConfigError when the address cannot be bound or the backend cannot work here.
    """
    run(_serve, options, on_ready)


async def _serve(options: ServeOptions, on_ready: Callable[[str], None]) -> None:
    backend = backends.get(options.backend, state=options.state)
    node, tokens = Node(backend, max_sandboxes=options.max_sandboxes), options.tokens()
    with options.listening.bind() as listener:
        async with background_tasks() as group:
            stop = anyio.Event()
            await group.start(watch_signals, stop.set, tokens.reload)
            async with node.open():
                group.start_soon(_close_when, stop, node)
                await serve_app(app_for(node, tokens or None), options.listening, listener, stop, on_ready)


async def _close_when(stop: anyio.Event, node: Node) -> None:
    await stop.wait()
    node.close_sessions()
