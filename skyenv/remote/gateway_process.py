"""A gateway as a process: a `Fleet`, the application in front of it, and the signals that end both."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from skyenv.errors import ConfigError
from skyenv.remote.fleet import FORGET, SILENCE, Fleet
from skyenv.remote.gateway import gateway_app
from skyenv.remote.http1 import Pool
from skyenv.remote.listen import Listening, run, serve_app, watch_signals
from skyenv.remote.sending import tls_context
from skyenv.remote.tasks import background_tasks
from skyenv.remote.tokens import Tokens
from skyenv.remote.tracing import tracing

LOG = logging.getLogger(__name__)
CONNECT_TIMEOUT = 3.0


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """How a gateway works. A host that is not loopback needs client tokens; nodes always need the join token.

    `silence`, `forget`: see `fleet`. `ca` is a file of certificates to trust when a node speaks TLS. Spans go to
    `otlp_endpoint`, when there is one.
    """

    join_token: str
    listening: Listening = field(default_factory=lambda: Listening(port=8764))
    token: str | None = None
    token_file: Path | None = None
    silence: float = SILENCE
    forget: float = FORGET
    ca: Path | None = None
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        if not self.join_token or self.token == "":
            raise ConfigError("token, join token: must not be empty")
        if self.token is None and self.token_file is None and not self.listening.loopback:
            raise ConfigError(f"host {self.listening.host} is reachable from other machines; pass a token")
        if not 0 < self.silence <= self.forget:
            raise ConfigError("silence must be more than 0 and forget at least as much")

    def tokens(self) -> Tokens | None:
        """Who may ask; None for anybody on this machine. ConfigError when the file is wrong."""
        fixed = [("client", self.token)] if self.token is not None else []
        return Tokens(fixed, self.token_file) if fixed or self.token_file is not None else None


def serve_gateway(options: GatewayOptions, *, on_ready: Callable[[str], None] = LOG.info) -> None:
    """Serve until SIGINT or SIGTERM; sandboxes live on. `on_ready` gets the URL once it listens.

    ConfigError when the address cannot be bound.
    """
    run(_serve, options, on_ready)


async def _serve(options: GatewayOptions, on_ready: Callable[[str], None]) -> None:
    tokens, stop = options.tokens(), anyio.Event()
    tls = tls_context(options.ca or True)
    with options.listening.bind() as listener:
        async with background_tasks() as group, Pool(tls, connect_timeout=CONNECT_TIMEOUT) as pool:
            await group.start(watch_signals, lambda _number: stop.set(), tokens.reload if tokens else _ignore)
            fleet = Fleet(options.silence, options.forget)
            app = gateway_app(fleet, pool, clients=tokens, join_token=options.join_token)
            async with tracing(options.otlp_endpoint, "skyenv-gateway") as traced:
                await serve_app(traced(app), options.listening, listener, stop, on_ready)


def _ignore() -> None:
    return None
