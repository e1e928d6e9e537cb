"""The gateway: one address in front of any number of nodes. It keeps nothing that another gateway would miss.

Creations are placed (`placement`), everything else follows the node in the sandbox's id. Nodes come and go by their
heartbeats. Requests for one sandbox are passed through without being understood; the only ones that are read are
creations, lease renewals, and the answers in which a node tells an id.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import anyio
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from skyenv.errors import ConfigError, SandboxLost, SandboxProtocolError, SandboxUnavailable, SkyEnvError
from skyenv.remote.answers import error_answer, names_in, query_of, success
from skyenv.remote.fleet import Fleet, Member
from skyenv.remote.http1 import Answer, Broken, Header, Pool
from skyenv.remote.metrics import CONTENT_TYPE, Metrics
from skyenv.remote.overview import merge
from skyenv.remote.placement import order
from skyenv.remote.protocol import (
    ATTEMPT,
    MAX_JSON,
    META,
    VERSION,
    NodeReport,
    check_name,
    decode_error,
    decode_meta,
    encode_error,
    encode_query,
    join_id,
    split_id,
)
from skyenv.remote.relay import ANSWER_TIMEOUT, ClientGone, Inquiry, Relay, pass_back, passed_on, whole_body
from skyenv.remote.tokens import Door, Tokens

SEARCH_TIMEOUT = 3.0
NO_NODES_RETRY = 1.0


class _Ask(NamedTuple):
    """A request as ASGI hands it over."""

    scope: Scope
    receive: Receive
    send: Send


class Gateway:
    """The application for clients. Whoever made `fleet` and `relay` owns them."""

    def __init__(self, fleet: Fleet, relay: Relay) -> None:
        self._fleet = fleet
        self._relay = relay
        self.metrics = Metrics()
        self.metrics.watch(fleet.census)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; an error of ours is an answer."""
        ask = _Ask(scope, receive, send)
        try:
            await self._answer(ask)
        except SkyEnvError as error:
            known = encode_error(error)
            self.metrics.answered(known)
            await error_answer(known)(scope, receive, send)
        except ClientGone:
            return

    async def _answer(self, ask: _Ask) -> None:
        parts: list[str] = [*ask.scope["path"].split("/"), ""]
        method, kind, rest = ask.scope["method"], parts[1], parts[2:-1]
        if kind == "sandboxes" and rest:
            plain = len(rest) == 1 and not split_id(rest[0])[1]
            if plain and method == "PUT":
                await self._create(ask, rest[0])
            elif plain and method == "DELETE":
                await (await self._delete_anywhere(ask, check_name(rest[0])))(*ask)
            else:
                await self._pass_on(ask, kind, rest)
        elif kind in ("creations", "snapshots") and len(rest) == 1:
            await self._pass_on(ask, kind, rest)
        else:
            response = await self._own(ask, method, "/".join(parts[1:-1]))
            await response(*ask)

    async def _own(self, ask: _Ask, method: str, path: str) -> Response:
        if (method, path) == ("POST", "leases"):
            return await self._renew(ask)
        if (method, path) == ("POST", "pools"):
            return await self._prefetch(ask)
        if (method, path) == ("GET", "health"):
            return JSONResponse(self._health())
        if (method, path) == ("GET", "nodes"):
            return JSONResponse(self._fleet.describe())
        if (method, path) == ("GET", "nodes/targets"):
            return JSONResponse(self._targets())
        if (method, path) == ("GET", "sandboxes"):
            return JSONResponse(await self._overview())
        if (method, path) == ("GET", "metrics"):
            return Response(self.metrics.render(), media_type=CONTENT_TYPE)
        return Response("there is nothing at this address\n", 404)

    def _health(self) -> dict[str, Any]:
        nodes = self._fleet.describe()
        alive = [node for node in nodes if node["answers"]]
        return {
            "gateway": True,
            "version": VERSION,
            "nodes": len(alive),
            "silent_nodes": len(nodes) - len(alive),
            "sandboxes": sum(node["used"] for node in alive),
            "max_sandboxes": sum(node["slots"] for node in alive),
        }

    async def _overview(self) -> dict[str, Any]:
        """What all nodes say of themselves; one that does not answer now is told as silent."""
        said: dict[str, bytes] = {}

        async def look(node: Member) -> None:
            with contextlib.suppress(SandboxUnavailable, Broken):
                inquiry = Inquiry(b"GET", b"/sandboxes", [])
                async with self._relay.ask(node, inquiry, timeout=SEARCH_TIMEOUT) as answer:
                    if answer.status == 200:
                        said[node.name] = await answer.read()

        async with anyio.create_task_group() as group:
            for node in self._fleet.answering():
                group.start_soon(look, node)
        known = [str(node["name"]) for node in self._fleet.describe()]
        return merge(said.items(), [name for name in known if name not in said])

    def _targets(self) -> list[dict[str, Any]]:
        """The nodes as Prometheus' `http_sd_config` wants them."""
        return [
            {
                "targets": [member.origin.netloc],
                "labels": {"node": member.name, "__scheme__": "https" if member.origin.secure else "http"},
            }
            for member in self._fleet.answering()
        ]

    async def _pass_on(self, ask: _Ask, kind: str, rest: Sequence[str]) -> None:
        """A request about something that is on a node, to that node."""
        name, node_name = split_id(rest[0])
        if not node_name:
            raise SandboxLost(f"{rest[0]!r} does not say on which node it is", reason="node_lost")
        node = self._fleet.find(node_name)
        raw: bytes = ask.scope["raw_path"]
        prefix = f"/{kind}/{rest[0]}".encode()
        if not raw.startswith(prefix):
            raise SandboxProtocolError("ids are sent as they are, without any escapes")
        tail = raw[len(prefix) :]
        target = b"/%b/%b%b" % (kind.encode(), name.encode(), tail)
        if query := ask.scope["query_string"]:
            target += b"?" + query
        inquiry = Inquiry(ask.scope["method"].encode(), target, passed_on(ask.scope))
        tells = kind == "creations" or rest[-1] in ("snapshot", "rollback", "fork") or target.find(b"/calls/") > 0
        with self.metrics.timed("forward"):
            await self._relay.forward(node, inquiry, *ask, _naming(node_name) if tells else None)

    async def _create(self, ask: _Ask, name: str) -> None:
        body = await whole_body(ask.receive, MAX_JSON)
        wanted = _object(body)
        query = query_of(Request(ask.scope))
        headers = passed_on(ask.scope)
        creation = _Creation(self._fleet, self._relay, check_name(name), query, headers)
        snapshot, image = wanted.get("snapshot"), wanted.get("image")
        if isinstance(snapshot, str):
            node_name = split_id(snapshot)[1]
            if not node_name:
                raise ConfigError(f"snapshot {snapshot!r}: does not say on which node it is")
            await creation.on(self._fleet.find(node_name), body, ask.send)
            return
        if _attempt(headers) > 1 and (found := await creation.find()) is not None:
            await creation.on(found, body, ask.send)
            return
        await creation.somewhere(body, image if isinstance(image, str) else None, ask.send)

    async def _delete_anywhere(self, ask: _Ask, name: str) -> Response:
        """Delete what a client gave up before it heard where it is; a creation that arrives later is refused there."""
        inquiry = Inquiry(b"DELETE", f"/sandboxes/{name}".encode(), passed_on(ask.scope))

        async def delete(node: Member) -> None:
            with contextlib.suppress(SandboxUnavailable):
                async with self._relay.ask(node, inquiry, timeout=SEARCH_TIMEOUT):
                    return

        async with anyio.create_task_group() as group:
            for node in self._fleet.answering():
                group.start_soon(delete, node)
        return success({})

    async def _prefetch(self, ask: _Ask) -> Response:
        """Have warm sandboxes where those who open them will be sent: at the image's or snapshot's node, or spread."""
        wanted = _object(await whole_body(ask.receive, MAX_JSON))
        image, snapshot, headers = wanted.get("image"), wanted.get("snapshot"), passed_on(ask.scope)
        seats = order(str(image or snapshot or ""), self._fleet.open_seats(), image)
        if isinstance(snapshot, str):
            seats = [self._fleet.find(split_id(snapshot)[1]).seats]
        elif isinstance(image, str):
            seats = seats[:1]
        if not seats:
            raise SandboxUnavailable("no node takes sandboxes now", NO_NODES_RETRY, reason="no_nodes")
        count = wanted.get("count", 0)
        share = -(-count // len(seats)) if isinstance(count, int) and count > 0 else count
        for seat in seats:
            inquiry = Inquiry(b"POST", b"/pools?wait=0", headers)
            body = json.dumps({**wanted, "count": share}).encode()
            async with self._relay.ask(self._fleet.find(seat.name), inquiry, body, timeout=ANSWER_TIMEOUT) as answer:
                if answer.status >= 300:
                    raise decode_error(await answer.read(), answer.status)
        return success({})

    async def _renew(self, ask: _Ask) -> Response:
        """Renew leases on every node that is concerned; a node that does not answer now does not lose them."""
        by_node: dict[str, list[str]] = {}
        for identifier in names_in(await whole_body(ask.receive, MAX_JSON)):
            name, node_name = split_id(identifier)
            by_node.setdefault(node_name, []).append(name)
        lost: list[str] = []

        async def renew(node_name: str, names: list[str]) -> None:
            inquiry = Inquiry(b"POST", b"/leases", [])
            try:
                node = self._fleet.find(node_name)
                async with self._relay.ask(node, inquiry, json.dumps(names).encode(), timeout=SEARCH_TIMEOUT) as answer:
                    gone = decode_meta(_header(answer, META)).get("lost", [])
            except SandboxLost:
                gone = names
            except (SandboxUnavailable, SandboxProtocolError, Broken):
                gone = []
            lost.extend(join_id(name, node_name) for name in gone)

        async with anyio.create_task_group() as group:
            for node_name, names in by_node.items():
                group.start_soon(renew, node_name, names)
        return success({"lost": lost})


class _Creation:
    """One creation on its way to a node."""

    def __init__(self, fleet: Fleet, relay: Relay, name: str, query: Mapping[str, str], headers: list[Header]) -> None:
        self._fleet = fleet
        self._relay = relay
        self._name = name
        self._query = query
        self._headers = headers
        self._refusals: list[SandboxUnavailable] = []

    async def find(self) -> Member | None:
        """The node where an earlier attempt has begun."""
        found: list[Member] = []

        async def look(node: Member) -> None:
            inquiry = Inquiry(b"GET", f"/creations/{self._name}?wait=0".encode(), self._headers)
            try:
                async with self._relay.ask(node, inquiry, timeout=SEARCH_TIMEOUT) as answer:
                    if answer.status in (200, 202):
                        found.append(node)
            except SandboxUnavailable:
                return

        async with anyio.create_task_group() as group:
            for node in self._fleet.answering():
                group.start_soon(look, node)
        return found[0] if found else None

    async def on(self, node: Member, body: bytes, send: Send) -> None:
        """Create on this node; what it says is the answer."""
        if not await self._try(node, body, send, queue=True):
            raise self._refusals[-1]

    async def somewhere(self, body: bytes, image: str | None, send: Send) -> None:
        """Create on the best node that takes it; when none has room, wait in the shortest queue."""
        seats = order(image or self._name, self._fleet.open_seats(), image)
        for queue in (False, True):
            for seat in sorted(seats, key=lambda seat: seat.queued / seat.slots) if queue else seats:
                if queue or seat.used < seat.slots:
                    node = self._fleet.find(seat.name)
                    if await self._try(node, body, send, queue=queue):
                        return
        if not self._refusals:
            raise SandboxUnavailable("no node takes sandboxes now", NO_NODES_RETRY, reason="no_nodes")
        raise min(self._refusals, key=lambda refusal: refusal.retry_after or NO_NODES_RETRY)

    async def _try(self, node: Member, body: bytes, send: Send, *, queue: bool) -> bool:
        """Ask one node and pass its answer back; False when it refuses for now, which is noted."""
        query = encode_query(**(dict(self._query) | {"queue": str(int(queue))}))
        inquiry = Inquiry(b"PUT", f"/sandboxes/{self._name}?{query}".encode(), self._headers)
        try:
            async with self._relay.ask(node, inquiry, body, timeout=ANSWER_TIMEOUT) as answer:
                if answer.status in (429, 503, 507):
                    refusal = decode_error(await answer.read(), answer.status)
                    if isinstance(refusal, SandboxUnavailable):
                        self._refusals.append(refusal)
                        return False
                    raise refusal
                if answer.status < 300:
                    self._fleet.assume_one_more(node.name)
                await pass_back(answer, send, _naming(node.name, identifier=self._name))
                return True
        except SandboxUnavailable as error:
            if not isinstance(error.__cause__, Broken):  # nothing was sent: another node may try
                self._refusals.append(error)
                return False
            raise


def _naming(node: str, identifier: str = "") -> Any:
    """An edit of meta that makes the node's ids ours."""

    def edit(meta: dict[str, Any]) -> dict[str, Any]:
        plain = {"id": identifier, **meta} if identifier else meta
        return plain | {key: join_id(str(plain[key]), node) for key in ("id", "snapshot") if key in plain}

    return edit


def _object(body: bytes) -> dict[str, Any]:
    try:
        wanted = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"body: not JSON: {error}") from error
    if not isinstance(wanted, dict):
        raise ConfigError("body: a JSON object is wanted")
    return wanted


def _attempt(headers: list[Header]) -> int:
    value = next((value for name, value in headers if name == ATTEMPT.encode()), b"1")
    return int(value) if value.isdigit() else 1


def _header(answer: Answer, name: str) -> str | None:
    return next((value.decode("latin-1") for key, value in answer.headers if key == name.encode()), None)


class Registry:
    """The application for nodes: `POST /nodes/{name}` is a heartbeat, `DELETE` a goodbye, `.../drain` a drain."""

    def __init__(self, fleet: Fleet, relay: Relay) -> None:
        self._fleet = fleet
        self._relay = relay

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            await self._answer(_Ask(scope, receive, send))
        except SkyEnvError as error:
            await error_answer(encode_error(error))(scope, receive, send)
        except ClientGone:
            return

    async def _answer(self, ask: _Ask) -> None:
        name, _slash, verb = ask.scope["path"].removeprefix("/nodes/").partition("/")
        if verb == "drain" and ask.scope["method"] == "POST":
            target = b"/drain?" + ask.scope["query_string"]
            await self._relay.forward(self._fleet.find(name), Inquiry(b"POST", target, []), *ask)
            return
        body = await whole_body(ask.receive, MAX_JSON)
        if ask.scope["method"] == "DELETE":
            self._fleet.leave(name, body.decode("utf-8", "replace"))
        else:
            try:
                self._fleet.report(name, NodeReport.model_validate_json(body))
            except ValueError as error:
                raise ConfigError(f"heartbeat: {error}") from error
        await JSONResponse({"interval": self._fleet.interval, "version": VERSION})(*ask)


def gateway_app(fleet: Fleet, pool: Pool, *, clients: Tokens | None, join_token: str) -> ASGIApp:
    """Everything behind one port: nodes come in with the join token, clients with theirs (None: anybody)."""
    relay = Relay(fleet, pool, join_token)
    for_nodes = Door(Registry(fleet, relay), Tokens([("node", join_token)]))
    for_clients = Door(Gateway(fleet, relay), clients)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        is_nodes = scope["method"] != "GET" and scope["path"].startswith("/nodes/")
        await (for_nodes if is_nodes else for_clients)(scope, receive, send)

    return app
