"""The node server: the HTTP face of a `Node`, in this process or on a socket.

Handlers only translate between `protocol` and `sandboxes`; each request that changes something runs as a keyed call,
so a lost answer can be asked for again and nothing runs twice.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import anyio
import anyio.to_thread
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from skyenv.errors import ConfigError, SandboxError, SandboxProtocolError, SkyEnvError
from skyenv.remote import backends
from skyenv.remote.backends import Backend
from skyenv.remote.protocol import (
    KEY,
    MAX_WAIT,
    META,
    STATUS,
    ExecParameters,
    PollParameters,
    WireError,
    decode_query,
    encode_error,
    encode_meta,
    parse_create,
    parse_query,
)
from skyenv.remote.sandboxes import Node
from skyenv.remote.session import Call, CallLog, Result, Session, Work
from skyenv.remote.tasks import background_tasks

LOG = logging.getLogger(__name__)
GRACE = 2
KEEP_ALIVE = 75


def create_app(backend: Backend, *, token: str | None = None) -> Starlette:
    """An application whose lifespan opens the backend and ends every sandbox; with `token`, only for who sends it."""
    node = Node(backend)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        async with node.open():
            yield

    app = app_for(node, token)
    app.router.lifespan_context = lifespan
    return app


def app_for(node: Node, token: str | None = None) -> Starlette:
    """The application of a node that somebody else opens and closes."""
    app = Starlette(
        routes=_routes(),
        exception_handlers={SkyEnvError: _answer_error, Exception: _answer_bug},
    )
    app.state.node = node
    if token is not None:
        app.add_middleware(TokenCheck, token=token)
    return app


@asynccontextmanager
async def in_process(backend: str) -> AsyncIterator[Starlette]:
    """The application of a node that lives as long as the block. ConfigError when the backend cannot work here."""
    node = Node(backends.get(backend))
    async with node.open():
        yield app_for(node)


class TokenCheck:
    """Lets requests through that carry the node's token, compared in constant time."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401, or hand the request on."""
        if scope["type"] == "http":
            sent = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(sent, self._expected):
                await _error_response(
                    WireError(code="unauthorized", message="token is missing or wrong; pass token= to connect")
                )(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _routes() -> list[Route]:
    one = "/sandboxes/{name}"
    return [
        Route("/health", _health, methods=["GET"]),
        Route("/leases", _renew, methods=["POST"]),
        Route("/snapshots/{snapshot}", _delete_snapshot, methods=["DELETE"]),
        Route("/creations/{name}", _attach_creation, methods=["GET"]),
        Route(one, _create, methods=["PUT"]),
        Route(one, _delete, methods=["DELETE"]),
        Route(one + "/calls/{key}", _attach, methods=["GET"]),
        Route(one + "/exec", _exec, methods=["POST"]),
        Route(one + "/poll", _poll, methods=["POST"]),
        Route(one + "/interrupt", _interrupt, methods=["POST"]),
        Route(one + "/kill", _kill, methods=["POST"]),
        Route(one + "/snapshot", _snapshot, methods=["POST"]),
        Route(one + "/info", _info, methods=["GET"]),
        Route(one + "/entries", _entries, methods=["GET"]),
        Route(one + "/file", _read_file, methods=["GET"]),
        Route(one + "/file", _write_file, methods=["PUT"]),
        Route(one + "/file", _remove, methods=["DELETE"]),
        Route(one + "/archive", _download, methods=["GET"]),
        Route(one + "/archive", _upload, methods=["PUT"]),
    ]


def _error_response(error: WireError) -> Response:
    headers = {"retry-after": str(error.retry_after)} if error.retry_after is not None else None
    return Response(error.model_dump_json(), STATUS[error.code], headers=headers, media_type="application/json")


async def _answer_error(_request: Request, error: Exception) -> Response:
    known = error if isinstance(error, SkyEnvError) else SandboxError(str(error))
    return _error_response(encode_error(known))


async def _answer_bug(request: Request, error: Exception) -> Response:
    LOG.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _error_response(WireError(code="internal", message=f"{type(error).__name__}: {error}"))


def _node(request: Request) -> Node:
    node: Node = request.app.state.node
    return node


def _session(request: Request) -> Session:
    return _node(request).session(request.path_params["name"])


def _query(request: Request) -> dict[str, str]:
    return decode_query(request.scope["query_string"])


def _path(query: dict[str, str]) -> str:
    if "path" not in query:
        raise SandboxProtocolError("the query has no 'path'")
    return query["path"]


def _number(query: dict[str, str], name: str) -> int | None:
    if name not in query:
        return None
    if not query[name].isdigit():
        raise ConfigError(f"{name}: not a whole number of at least 0")
    return int(query[name])


def _names(text: str | bytes) -> list[str]:
    try:
        names = json.loads(text)
    except ValueError:
        names = None
    if not isinstance(names, list):
        raise SandboxProtocolError("a JSON list of names is wanted")
    return [str(name) for name in names]


def _success(result: Result) -> Response:
    return Response(result.body, headers={META: encode_meta(result.meta)}, media_type="application/octet-stream")


async def _await(call: Call, query: dict[str, str]) -> Response:
    """The call's result, or 202 when it goes on for longer than the client wants to wait."""
    try:
        wait = min(MAX_WAIT, float(query.get("wait", MAX_WAIT)))
    except ValueError:
        raise ConfigError("wait: not a number of seconds") from None
    result = await call.wait(wait)
    return Response(status_code=202) if result is None else _success(result)


async def _keyed(request: Request, calls: CallLog, work: Work) -> Response:
    key = request.headers.get(KEY)
    if not key:
        raise SandboxProtocolError(f"this request needs the header {KEY}")
    return await _await(calls.start(key, work), _query(request))


async def _health(request: Request) -> Response:
    return JSONResponse(_node(request).describe())


async def _renew(request: Request) -> Response:
    return _success(Result({"lost": _node(request).renew(_names(await request.body()))}))


async def _create(request: Request) -> Response:
    node, name = _node(request), request.path_params["name"]
    wanted = parse_create(await request.body())
    return await _await(node.calls.start(name, lambda _key: node.create(name, wanted)), _query(request))


async def _delete(request: Request) -> Response:
    return _success(await _node(request).delete(request.path_params["name"]))


async def _attach(request: Request) -> Response:
    session, key = _session(request), request.path_params["key"]
    return await _await(session.calls.start(key, session.follow), _query(request))


async def _attach_creation(request: Request) -> Response:
    name = request.path_params["name"]
    call = _node(request).calls.find(name)
    if call is None:
        raise SandboxProtocolError(f"no creation of {name!r} is known")
    return await _await(call, _query(request))


async def _exec(request: Request) -> Response:
    session, parameters = _session(request), parse_query(ExecParameters, _query(request))
    command = await request.body()
    return await _keyed(request, session.calls, lambda key: session.exec(key, command, parameters))


async def _poll(request: Request) -> Response:
    session, parameters = _session(request), parse_query(PollParameters, _query(request))
    typed = await request.body()
    return await _keyed(request, session.calls, lambda key: session.poll(key, parameters.soft_timeout, typed))


async def _interrupt(request: Request) -> Response:
    session = _session(request)
    return await _keyed(request, session.calls, session.interrupt)


async def _kill(request: Request) -> Response:
    session = _session(request)
    return await _keyed(request, session.calls, session.kill_processes)


async def _snapshot(request: Request) -> Response:
    node, session = _node(request), _session(request)
    return await _keyed(request, session.calls, lambda _key: node.snapshot(session.name))


async def _delete_snapshot(request: Request) -> Response:
    await _node(request).backend.delete_snapshot(request.path_params["snapshot"])
    return _success(Result({}))


async def _info(request: Request) -> Response:
    return _success(await _session(request).info(_path(_query(request))))


async def _entries(request: Request) -> Response:
    query = _query(request)
    entries = await _session(request).list_dir(_path(query), _number(query, "depth") or 1)
    return _success(Result({}, json.dumps(entries).encode()))


async def _read_file(request: Request) -> Response:
    query, session = _query(request), _session(request)
    offset, limit = _number(query, "offset") or 0, _number(query, "max_bytes")
    return _success(Result({}, await session.read_file(_path(query), offset, limit)))


async def _write_file(request: Request) -> Response:
    query, session = _query(request), _session(request)
    path, expected, data = _path(query), _number(query, "expected_bytes"), await request.body()
    if expected is not None and expected > len(data):
        raise SandboxProtocolError("expected_bytes is larger than the body")
    return await _keyed(request, session.calls, lambda key: session.write_file(key, path, data, expected))


async def _remove(request: Request) -> Response:
    session, path = _session(request), _path(_query(request))
    return await _keyed(request, session.calls, lambda key: session.remove(key, path))


async def _download(request: Request) -> Response:
    query = _query(request)
    exclude = _names(query.get("exclude", "[]"))
    return _success(Result({}, await _session(request).download(_path(query), exclude)))


async def _upload(request: Request) -> Response:
    session, path, archive = _session(request), _path(_query(request)), await request.body()
    return await _keyed(request, session.calls, lambda key: session.upload(key, path, archive))


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How `serve` listens. Port 0 picks a free one; a host that is not loopback needs a token."""

    host: str = "127.0.0.1"
    port: int = 8765
    token: str | None = None
    backend: str = "local"

    def __post_init__(self) -> None:
        if self.token is not None and not self.token:
            raise ConfigError("token: must not be empty")
        if self.token is None and not _is_loopback(self.host):
            raise ConfigError(f"host {self.host} is reachable from other machines; pass a token")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


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


def serve(options: ServeOptions, *, on_ready: Callable[[str], None] = LOG.info) -> None:
    """Serve until SIGINT or SIGTERM, then end every sandbox and return. `on_ready` gets the URL once it listens.

    ConfigError when the address cannot be bound or the backend cannot work here.
    """
    anyio.run(_serve, options, on_ready)


async def _serve(options: ServeOptions, on_ready: Callable[[str], None]) -> None:
    node = Node(backends.get(options.backend))
    with _listen(options) as listener:
        host, port = listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        async with background_tasks() as group:
            stop = anyio.Event()
            await group.start(_watch_signals, stop)
            async with node.open():
                config = uvicorn.Config(
                    app_for(node, options.token), lifespan="off", log_config=None, access_log=False,
                    timeout_keep_alive=KEEP_ALIVE, timeout_graceful_shutdown=GRACE,
                )  # fmt: skip
                server = _Server(config, lambda: on_ready(url))
                group.start_soon(_stop_when, stop, server, node)
                if not stop.is_set():
                    await server.serve(sockets=[listener])


def _listen(options: ServeOptions) -> socket.socket:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        listener = socket.create_server((options.host, options.port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"host {options.host}, port {options.port}: {error}") from error
    # Connections inherit it; without it Nagle's algorithm holds every answer with a body back for 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


async def _watch_signals(
    stop: anyio.Event, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED
) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        async for _number in signals:
            stop.set()


async def _stop_when(stop: anyio.Event, server: _Server, node: Node) -> None:
    await stop.wait()
    node.close_sessions()
    server.should_exit = True
