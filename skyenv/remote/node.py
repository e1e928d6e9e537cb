"""The HTTP face of a `Node`, for this process or a socket (`skyenv.remote.serve`).

Handlers only translate between `protocol` and `sandboxes`; each request that changes something runs as a keyed call,
so a lost answer can be asked for again and nothing runs twice.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from skyenv.errors import ConfigError, SandboxLost, SandboxProtocolError, SkyEnvError
from skyenv.remote import backends
from skyenv.remote.answers import (
    answer_bug,
    answer_error,
    names_in,
    path_in,
    query_of,
    read_body,
    success,
    whole_number,
)
from skyenv.remote.backends import Backend
from skyenv.remote.calls import Call, CallLog, Result, Work
from skyenv.remote.metrics import CONTENT_TYPE
from skyenv.remote.overview import node_health, node_overview
from skyenv.remote.protocol import (
    ACK,
    KEY,
    MAX_COMMAND,
    MAX_JSON,
    MAX_WAIT,
    SECRET,
    CreateRequest,
    ExecParameters,
    GiB,
    PollParameters,
    PoolRequest,
    RollbackParameters,
    SnapshotParameters,
    TunnelParameters,
    parse_query,
    parse_request,
)
from skyenv.remote.sandboxes import Node
from skyenv.remote.session import Session
from skyenv.remote.tokens import Door, Tokens
from skyenv.remote.tunnels import Tunnels

MAX_UPLOAD = 4 * GiB


def create_app(backend: Backend, *, token: str | None = None, tunnels: Sequence[str] | None = ()) -> Starlette:
    """An application whose lifespan opens the backend and ends every sandbox; with `token`, only for who sends it.

    `tunnels` are the targets that ways out of sandboxes may have; see `tunnels.Tunnels`.
    """
    node = Node(backend, tunnels=Tunnels(tunnels))

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        async with node.open():
            yield

    app = app_for(node, Tokens([("client", token)]) if token is not None else None)
    app.router.lifespan_context = lifespan
    return app


def app_for(node: Node, tokens: Tokens | None = None) -> Starlette:
    """The application of a node that somebody else opens and closes; with `tokens`, only for who sends one of them."""
    app = Starlette(
        routes=_routes(),
        exception_handlers={SkyEnvError: answer_error, Exception: answer_bug},
    )
    app.state.node, app.state.metrics = node, node.metrics
    app.add_middleware(Door, tokens=tokens)
    return app


@asynccontextmanager
async def in_process(backend: str) -> AsyncIterator[Starlette]:
    """The application of a node that lives as long as the block. ConfigError when the backend cannot work here."""
    node = Node(backends.get(backend), tunnels=Tunnels(None))
    async with node.open():
        yield app_for(node)


def _routes() -> list[Route]:
    one = "/sandboxes/{name}"
    return [  # tried in this order: what is asked most comes first
        Route(one + "/exec", _exec, methods=["POST"]),
        Route("/health", _health, methods=["GET"]),
        Route("/metrics", _metrics, methods=["GET"]),
        Route("/sandboxes", _overview, methods=["GET"]),
        Route("/drain", _drain, methods=["POST"]),
        Route("/leases", _renew, methods=["POST"]),
        Route("/pools", _prefetch, methods=["POST"]),
        Route("/snapshots/{snapshot}", _delete_snapshot, methods=["DELETE"]),
        Route("/creations/{name}", _attach_creation, methods=["GET"]),
        Route(one, _create, methods=["PUT"]),
        Route(one, _delete, methods=["DELETE"]),
        Route(one + "/calls/{key}", _attach, methods=["GET"]),
        Route(one + "/poll", _poll, methods=["POST"]),
        Route(one + "/interrupt", _interrupt, methods=["POST"]),
        Route(one + "/kill", _kill, methods=["POST"]),
        Route(one + "/snapshot", _snapshot, methods=["POST"]),
        Route(one + "/pause", _pause, methods=["POST"]),
        Route(one + "/resume", _resume, methods=["POST"]),
        Route(one + "/tunnel", _tunnel, methods=["POST"]),
        Route(one + "/stats", _stats, methods=["GET"]),
        Route(one + "/rollback", _rollback, methods=["POST"]),
        Route(one + "/info", _info, methods=["GET"]),
        Route(one + "/entries", _entries, methods=["GET"]),
        Route(one + "/file", _read_file, methods=["GET"]),
        Route(one + "/file", _write_file, methods=["PUT"]),
        Route(one + "/file", _remove, methods=["DELETE"]),
        Route(one + "/archive", _download, methods=["GET"]),
        Route(one + "/archive", _upload, methods=["PUT"]),
    ]


def _node(request: Request) -> Node:
    node: Node = request.app.state.node
    return node


def _session(request: Request) -> Session:
    node, name = _node(request), request.path_params["name"]
    node.check_secret(name, request.headers.get(SECRET, ""))
    session = node.session(name)
    if answered := request.headers.get(ACK):
        session.acknowledge(answered)
    return session


def _success_of(result: Result) -> Response:
    return success(result.meta, result.body)


def _seconds(query: dict[str, str], default: float) -> float:
    """How long the client wants to wait. ConfigError when it is no number."""
    try:
        return max(0.0, min(MAX_WAIT, float(query.get("wait", default))))
    except ValueError:
        raise ConfigError("wait: not a number of seconds") from None


async def _await(call: Call, query: dict[str, str]) -> Response:
    """The call's result, or 202 when it goes on for longer than the client wants to wait."""
    result = await call.wait(_seconds(query, MAX_WAIT), query.get("state", ""))
    return success({"state": call.state}, status=202) if result is None else _success_of(result)


async def _keyed(request: Request, calls: CallLog, work: Work) -> Response:
    key = request.headers.get(KEY)
    if not key:
        raise SandboxProtocolError(f"this request needs the header {KEY}")
    if calls.find(key) is not None:
        request.app.state.metrics.retried("call")
    return await _await(calls.start(key, work), query_of(request))


async def _health(request: Request) -> Response:
    return JSONResponse(node_health(_node(request)))


async def _metrics(request: Request) -> Response:
    return Response(_node(request).metrics.render(), media_type=CONTENT_TYPE)


async def _overview(request: Request) -> Response:
    return JSONResponse(await node_overview(_node(request)))


async def _renew(request: Request) -> Response:
    names = names_in(await read_body(request, MAX_JSON))
    return success({"lost": _node(request).renew(names)})


async def _create(request: Request) -> Response:
    node, name, query = _node(request), request.path_params["name"], query_of(request)
    secret = request.headers.get(SECRET, "")
    wanted = parse_request(CreateRequest, await read_body(request, MAX_JSON))
    node.check_secret(name, secret)
    wait = query.get("queue") != "0"
    call = node.calls.start(name, lambda name: node.create(name, wanted, secret=secret, wait=wait))
    return await _await(call, query)


async def _prefetch(request: Request) -> Response:
    """Answered when the image is there, or with 202 before that; the pool fills in the background."""
    node, wanted = _node(request), parse_request(PoolRequest, await read_body(request, MAX_JSON))
    return await _keyed(request, node.calls, lambda _key: node.prefetch(wanted))


async def _delete(request: Request) -> Response:
    node, name = _node(request), request.path_params["name"]
    node.check_secret(name, request.headers.get(SECRET, ""))
    return _success_of(await node.delete(name))


async def _drain(request: Request) -> Response:
    """Take no new sandboxes; with `wait`, answer once the last one is gone or after so many seconds."""
    node, query = _node(request), query_of(request)
    await node.drain()
    await node.admission.emptied(_seconds(query, 0.0))
    return JSONResponse({"draining": True, "sandboxes": node.admission.used})


async def _attach(request: Request) -> Response:
    session, key = _session(request), request.path_params["key"]
    return await _await(session.calls.start(key, session.follow), query_of(request))


async def _attach_creation(request: Request) -> Response:
    name = request.path_params["name"]
    _node(request).check_secret(name, request.headers.get(SECRET, ""))
    call = _node(request).calls.find(name)
    if call is None and _node(request).holds(name):
        return success({})  # a former server made it
    if call is None:
        raise SandboxLost(f"no creation of {name!r} is known", reason="node_lost")
    return await _await(call, query_of(request))


async def _exec(request: Request) -> Response:
    session, parameters = _session(request), parse_query(ExecParameters, query_of(request))
    command = await read_body(request, MAX_COMMAND)
    return await _keyed(request, session.calls, lambda key: session.exec(key, command, parameters))


async def _poll(request: Request) -> Response:
    session, parameters = _session(request), parse_query(PollParameters, query_of(request))
    typed = await read_body(request, MAX_COMMAND)
    return await _keyed(request, session.calls, lambda key: session.poll(key, parameters, typed))


async def _interrupt(request: Request) -> Response:
    session = _session(request)
    return await _keyed(request, session.calls, session.interrupt)


async def _kill(request: Request) -> Response:
    session = _session(request)
    return await _keyed(request, session.calls, session.kill_processes)


async def _pause(request: Request) -> Response:
    await _session(request).freeze()
    return success({})


async def _resume(request: Request) -> Response:
    await _session(request).thaw()
    return success({})


async def _stats(request: Request) -> Response:
    session = _node(request).session(request.path_params["name"], use=False)
    return success(asdict(await session.stats()))


async def _snapshot(request: Request) -> Response:
    node, session = _node(request), _session(request)
    wanted = parse_query(SnapshotParameters, query_of(request))
    return await _keyed(request, session.calls, lambda _key: node.snapshot(session.name, wanted))


async def _rollback(request: Request) -> Response:
    node, session = _node(request), _session(request)
    wanted = parse_query(RollbackParameters, query_of(request))
    return await _keyed(request, session.calls, lambda _key: node.rollback(session.name, wanted))


async def _tunnel(request: Request) -> Response:
    node, session = _node(request), _session(request)
    wanted = parse_query(TunnelParameters, query_of(request))
    return await _keyed(request, session.calls, lambda key: node.tunnels.open(session, key, wanted, node.group))


async def _delete_snapshot(request: Request) -> Response:
    await _node(request).snapshots.forget(request.path_params["snapshot"])
    return success({})


async def _info(request: Request) -> Response:
    return _success_of(await _session(request).info(path_in(query_of(request))))


async def _entries(request: Request) -> Response:
    query = query_of(request)
    entries = await _session(request).list_dir(path_in(query), whole_number(query, "depth") or 1)
    return success({}, json.dumps(entries).encode())


async def _read_file(request: Request) -> Response:
    query, session = query_of(request), _session(request)
    offset, limit = whole_number(query, "offset") or 0, whole_number(query, "max_bytes")
    return success({}, await session.read_file(path_in(query), offset, limit))


async def _write_file(request: Request) -> Response:
    query, session = query_of(request), _session(request)
    path, expected = path_in(query), whole_number(query, "expected_bytes")
    data = await read_body(request, MAX_UPLOAD)
    if expected is not None and expected > len(data):
        raise SandboxProtocolError("expected_bytes is larger than the body")
    return await _keyed(request, session.calls, lambda key: session.write_file(key, path, data, expected))


async def _remove(request: Request) -> Response:
    session, path = _session(request), path_in(query_of(request))
    return await _keyed(request, session.calls, lambda key: session.remove(key, path))


async def _download(request: Request) -> Response:
    query = query_of(request)
    exclude = names_in(query.get("exclude", "[]"))
    return success({}, await _session(request).download(path_in(query), exclude))


async def _upload(request: Request) -> Response:
    session, path = _session(request), path_in(query_of(request))
    archive = await read_body(request, MAX_UPLOAD)
    return await _keyed(request, session.calls, lambda key: session.upload(key, path, archive))
