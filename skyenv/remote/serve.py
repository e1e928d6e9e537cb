"""A node server as a process: a `Node`, its HTTP face, its heartbeats, and the signals that end them."""

from __future__ import annotations

import logging
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

from skyenv.errors import ConfigError
from skyenv.remote import backends
from skyenv.remote.admission import Admission
from skyenv.remote.fleet import origin_of
from skyenv.remote.heartbeat import Heartbeat
from skyenv.remote.listen import Listening, run, serve_app, watch_signals
from skyenv.remote.node import app_for
from skyenv.remote.overview import node_report
from skyenv.remote.protocol import check_node_name
from skyenv.remote.sandboxes import Node
from skyenv.remote.sending import tls_context
from skyenv.remote.tasks import background_tasks
from skyenv.remote.tokens import Tokens
from skyenv.remote.tracing import tracing
from skyenv.remote.tunnels import Tunnels

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How `serve` works. A host that is not loopback needs a token.

    With `state`, a directory, sandboxes outlive a server that was killed: the next one with the same takes them over.
    `gateways` are told about this node as `name`, reachable at `url`; both sides prove themselves by `join_token`. `ca`
    is a file of certificates to trust when a gateway speaks TLS. On SIGTERM the node takes no new sandboxes and
    waits up to `drain_timeout` seconds until the last one is gone; a second signal, and SIGINT, end it at once.
    `backend_options` go to `backends.get`; spans go to `otlp_endpoint`, when there is one.

    With `allow_egress` clients may ask for the machine's network (`network="host"`), over which sandboxes reach this
    server too, so it needs tokens; only backend 'local' has that. `tunnels` are addresses, HOST:PORT or HOST:*, that a
    port of a sandbox's loopback may lead to when its client asks for it.
    """

    listening: Listening = field(default_factory=Listening)
    token: str | None = None
    token_file: Path | None = None
    backend: str = "local"
    backend_options: dict[str, Any] = field(default_factory=dict)
    state: Path | None = None
    slots: int = 1024
    queue: int = 1024
    queue_timeout: float = 300.0
    drain_timeout: float = 0.0
    gateways: tuple[str, ...] = ()
    name: str | None = None
    join_token: str | None = None
    url: str | None = None
    ca: Path | None = None
    allow_egress: bool = False
    tunnels: tuple[str, ...] = ()
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        if self.token is not None and not self.token:
            raise ConfigError("token: must not be empty")
        anybody = self.token is None and self.token_file is None and self.join_token is None
        if anybody and not self.listening.loopback:
            raise ConfigError(f"host {self.listening.host} is reachable from other machines; pass a token")
        if self.slots < 1 or self.queue < 0 or self.queue_timeout <= 0 or self.drain_timeout < 0:
            raise ConfigError("slots must be at least 1, queue and drain_timeout 0, queue_timeout more than 0")
        if self.allow_egress and (anybody or self.backend not in ("local", "oci")):
            raise ConfigError("--allow-egress: needs --token or --token-file, and backend 'local' or 'oci'")
        if self.gateways:
            self._check_gateways()

    def _check_gateways(self) -> None:
        if self.name is None or self.join_token is None:
            raise ConfigError("a node of a gateway needs --name and --join-token-file")
        check_node_name(self.name)
        for url in (*self.gateways, *([self.url] if self.url else [])):
            origin_of(url)
        if self.url is None and self.listening.host in ("0.0.0.0", "::"):
            raise ConfigError(f"host {self.listening.host} is no address to be found at; pass --url http://HOST:PORT")

    def tokens(self) -> Tokens | None:
        """Who may ask; None for anybody on this machine. ConfigError when the file is wrong."""
        fixed = [("client", self.token)] if self.token is not None else []
        fixed += [("gateway", self.join_token)] if self.join_token is not None else []
        return Tokens(fixed, self.token_file) if fixed or self.token_file is not None else None

    def make_node(self) -> Node:
        """The node, not yet open."""
        options = self.backend_options | ({"state": self.state} if self.state is not None else {})
        backend = backends.get(self.backend, **options)
        admission = Admission(
            self.slots, self.queue, self.queue_timeout, disk=self.state or Path(tempfile.gettempdir())
        )
        return Node(backend, admission=admission, allow_egress=self.allow_egress, tunnels=Tunnels(self.tunnels))

    def heartbeat(self, node: Node, url: str) -> Heartbeat | None:
        """What tells the gateways; None when there are none."""
        if not self.gateways or self.name is None or self.join_token is None:
            return None
        address = self.url or url
        secure = any(gateway.startswith("https://") for gateway in self.gateways)
        tls = tls_context(self.ca or True) if secure else None
        return Heartbeat(
            self.name, self.gateways, self.join_token, lambda instance: node_report(node, instance, address), tls
        )


def serve(options: ServeOptions, *, on_ready: Callable[[str], None] = LOG.info) -> None:
    """Serve until SIGINT or SIGTERM, then end every sandbox and return. `on_ready` gets the URL once it listens.

    ConfigError when the address cannot be bound or the backend cannot work here.
    """
    run(_serve, options, on_ready)


async def _serve(options: ServeOptions, on_ready: Callable[[str], None]) -> None:
    node, tokens = options.make_node(), options.tokens()
    with options.listening.bind() as listener:
        heartbeat = options.heartbeat(node, options.listening.url(listener))
        async with background_tasks() as group:
            ending = _Ending(node, heartbeat, options.drain_timeout)
            await group.start(watch_signals, ending.signal, tokens.reload if tokens else _ignore)
            async with node.open(), background_tasks() as telling:
                if heartbeat is not None:
                    telling.start_soon(heartbeat.run)
                group.start_soon(ending.run)
                async with tracing(options.otlp_endpoint, "skyenv-node") as traced:
                    app = traced(app_for(node, tokens))
                    await serve_app(app, options.listening, listener, ending.stop, on_ready)


def _ignore() -> None:
    return None


class _Ending:
    """From the first signal to the end of the node."""

    def __init__(self, node: Node, heartbeat: Heartbeat | None, drain_timeout: float) -> None:
        self.stop = anyio.Event()
        self._node = node
        self._heartbeat = heartbeat
        self._drain_timeout = drain_timeout
        self._draining = anyio.Event()

    def signal(self, number: int) -> None:
        """SIGTERM drains first; another signal ends it now."""
        if number == signal.SIGTERM and self._drain_timeout and not self._draining.is_set():
            self._node.admission.drain()
            self._draining.set()
            if self._heartbeat is not None:
                self._heartbeat.hurry()
        else:
            self._end()

    def _end(self) -> None:
        self._node.close_sessions()
        self.stop.set()

    async def run(self) -> None:
        """End the node once it is drained, or when that takes too long."""
        await self._draining.wait()
        await self._node.drain()
        await self._node.admission.emptied(self._drain_timeout)
        self._end()
