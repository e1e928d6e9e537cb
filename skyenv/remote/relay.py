"""One request of a client, passed on to a node, and the node's answer, passed back while it arrives.

Nothing large is held: a body of unknown or large size is streamed, and so is every answer, at the pace of whoever takes
it. When the client goes away the request to the node is given up.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
from starlette.types import Receive, Scope, Send

from skyenv.errors import SandboxProtocolError, SandboxUnavailable
from skyenv.remote.fleet import Fleet, Member
from skyenv.remote.http1 import Answer, Broken, Header, NotSent, Pool, Request
from skyenv.remote.protocol import MAX_WAIT, META, decode_meta, encode_meta
from skyenv.remote.tasks import background_tasks

WHOLE = 64 << 10
ANSWER_TIMEOUT = MAX_WAIT + 10.0
TRANSFER_TIMEOUT = 660.0
_HOP = frozenset(
    (b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"proxy-authorization")
)
_OWN = _HOP | {b"host", b"content-length", b"authorization", b"expect"}
Edit = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Inquiry:
    """What a node is asked: target as it is sent to it, headers without the client's own token."""

    method: bytes
    target: bytes
    headers: list[Header]


def passed_on(scope: Scope) -> list[Header]:
    """The headers of a request that concern the node."""
    return [header for header in scope["headers"] if header[0] not in _OWN]


class ClientGone(Exception):
    """The client closed its connection in the middle of its request."""


class Relay:
    """Passes requests on to the nodes of a fleet, as the holder of `join_token`."""

    def __init__(self, fleet: Fleet, pool: Pool, join_token: str) -> None:
        self._fleet = fleet
        self._pool = pool
        self._authorization = (b"authorization", f"Bearer {join_token}".encode())

    @asynccontextmanager
    async def ask(
        self, node: Member, inquiry: Inquiry, body: bytes | AsyncIterator[bytes] = b"", *, timeout: float
    ) -> AsyncIterator[Answer]:
        """The node's answer, readable inside the block. SandboxUnavailable when it does not answer."""
        request = Request(inquiry.method, inquiry.target, [self._authorization, *inquiry.headers], body)
        async with AsyncExitStack() as stack:
            try:
                exchange = self._pool.exchange(node.origin, request, timeout=timeout)
                answer = await stack.enter_async_context(exchange)
            except (NotSent, Broken) as error:
                if isinstance(error, NotSent):
                    self._fleet.suspect(node.name)
                message = f"node {node.name!r} does not answer: {error}"
                raise SandboxUnavailable(message, 0.5, reason="node_unreachable") from error
            yield answer

    async def forward(
        self, node: Member, inquiry: Inquiry, scope: Scope, receive: Receive, send: Send, edit: Edit | None = None
    ) -> None:
        """Ask the node what the client asked, and answer with what it says, its meta changed by `edit`."""
        body, streamed = await body_of(scope, receive)
        timeout = TRANSFER_TIMEOUT if streamed or inquiry.method == b"GET" else ANSWER_TIMEOUT
        if streamed:
            try:
                async with self.ask(node, inquiry, body, timeout=timeout) as answer:
                    await pass_back(answer, send, edit)
            except ClientGone:
                return
        else:
            async with background_tasks() as group:
                group.start_soon(_end_when_gone, receive, group.cancel_scope)
                async with self.ask(node, inquiry, body, timeout=timeout) as answer:
                    await pass_back(answer, send, edit)


async def body_of(scope: Scope, receive: Receive) -> tuple[bytes | AsyncIterator[bytes], bool]:
    """The body, whole when it is known to be small; else a stream, and True."""
    length = next((value for name, value in scope["headers"] if name == b"content-length"), None)
    chunked = any(name == b"transfer-encoding" for name, _value in scope["headers"])
    if chunked or (length is not None and int(length) > WHOLE):
        return _stream(receive), True
    return (b"" if length is None else await whole_body(receive, WHOLE)), False


async def whole_body(receive: Receive, limit: int) -> bytes:
    """The whole body. SandboxProtocolError, answered with 413, when it is larger than `limit` bytes."""
    parts: list[bytes] = []
    size = 0
    async for part in _stream(receive):
        size += len(part)
        if size > limit:
            raise SandboxProtocolError(f"the body is larger than {limit} bytes", reason="too_large")
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def _stream(receive: Receive) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        if part := message.get("body", b""):
            yield part
        more = message.get("more_body", False)


async def _end_when_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
    scope.cancel()


async def pass_back(answer: Answer, send: Send, edit: Edit | None = None) -> None:
    """Answer the client with the node's answer. An answer that breaks off midway breaks off here too."""
    headers = [header for header in answer.headers if header[0] not in _HOP]
    if edit is not None:
        headers = [_edited(header, edit) for header in headers]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    if answer.arrived:
        await send({"type": "http.response.body", "body": await answer.read()})
        return
    try:
        async for part in answer.chunks():
            await send({"type": "http.response.body", "body": part, "more_body": True})
    except Broken:
        return
    await send({"type": "http.response.body", "body": b""})


def _edited(header: Header, edit: Edit) -> Header:
    if header[0] != META.encode():
        return header
    return header[0], encode_meta(edit(decode_meta(header[1].decode("latin-1")))).encode()
