"""Sockets, TLS, signals and uvicorn: what every server of ours does the same way."""

from __future__ import annotations

import asyncio
import ipaddress
import resource
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import uvicorn
from anyio.abc import TaskStatus
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from skyenv.errors import ConfigError

GRACE = 2
KEEP_ALIVE = 75
MAX_HEAD = 64 << 10
HEAD_TIMEOUT = 30.0
BACKLOG = 2048
DESCRIPTORS = 1 << 16


@dataclass(frozen=True, slots=True)
class Listening:
    """Where a server listens. Port 0 picks a free one; with a certificate and its key (PEM files) it speaks TLS."""

    host: str = "127.0.0.1"
    port: int = 8765
    certificate: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("TLS needs both a certificate and its key")
        for path in (self.certificate, self.key):
            if path is not None and not path.is_file():
                raise ConfigError(f"TLS: there is no file {path}")

    @property
    def loopback(self) -> bool:
        """Whether only this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def bind(self) -> socket.socket:
        """The listening socket. ConfigError when the address cannot be had."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            listener = socket.create_server((self.host, self.port), family=family, backlog=BACKLOG)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"host {self.host}, port {self.port}: {error}") from error
        # Connections inherit it; without it Nagle's algorithm holds every answer with a body back for 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener

    def url(self, listener: socket.socket) -> str:
        """The URL at which a bound server answers."""
        host, port = listener.getsockname()[:2]
        scheme = "https" if self.certificate else "http"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class _BoundedHead(HttpToolsProtocol):
    """Refuses a request whose line and headers go on after `MAX_HEAD` bytes or are not there in `HEAD_TIMEOUT` seconds.

    uvicorn itself bounds neither.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._in_head, self._head_bytes = False, 0
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._patience = self.loop.call_later(HEAD_TIMEOUT, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._calm()
        super().connection_lost(exc)

    def _calm(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def on_message_begin(self) -> None:
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._calm()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD:
            self.send_400_response("The request's headers are too large.")
        elif self._in_head and self._patience is None:
            self._patience = self.loop.call_later(HEAD_TIMEOUT, self.transport.close)


class _Server(uvicorn.Server):
    """uvicorn that leaves signals to us and tells when it listens."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()


async def serve_app(
    app: ASGIApp, listening: Listening, listener: socket.socket, stop: anyio.Event, on_ready: Callable[[str], None]
) -> None:
    """Serve on a bound socket until `stop` is set or it is cancelled; requests under way then get `GRACE` seconds.

    `on_ready` gets the URL once it listens. ConfigError when the certificate is none.
    """
    config = uvicorn.Config(
        app, lifespan="off", log_config=None, access_log=False, http=_BoundedHead, ws="none",
        server_header=False, date_header=False, proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE, timeout_graceful_shutdown=GRACE,
        ssl_certfile=listening.certificate, ssl_keyfile=listening.key,
    )  # fmt: skip
    try:
        config.load()
    except ssl.SSLError as error:
        raise ConfigError(f"TLS: {listening.certificate} and {listening.key} are not a certificate and key") from error
    server = _Server(config, lambda: on_ready(listening.url(listener)))
    async with anyio.create_task_group() as group:

        async def end() -> None:
            try:
                await stop.wait()
            finally:
                server.should_exit = True

        group.start_soon(end)
        if not stop.is_set():
            with anyio.CancelScope(shield=True):  # cancelled, it would leave its sockets with the event loop
                await server.serve(sockets=[listener])
        group.cancel_scope.cancel()


async def watch_signals(
    on_stop: Callable[[int], None],
    on_reload: Callable[[], None],
    *,
    task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Call `on_stop` with each SIGINT and SIGTERM and `on_reload` for SIGHUP, until cancelled."""
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
        task_status.started()
        async for number in signals:
            if number == signal.SIGHUP:
                on_reload()
            else:
                on_stop(number)


def allow_descriptors() -> None:
    """Let this process and its launcher have as many descriptors as they may: each sandbox takes one of either."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def run(function: Callable[..., Any], *arguments: Any) -> None:
    """Run a server's main function on the fastest loop there is."""
    allow_descriptors()
    anyio.run(function, *arguments, backend_options={"use_uvloop": True})
