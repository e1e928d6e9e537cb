"""How the client's requests travel: one pool for all of them, and the one place where anything is sent again.

A failure is one of three kinds. *Never sent*: no connection could be made, or the server answered that it did nothing
and when to come back; any request may be sent again. *Maybe executed*: the connection broke or a proxy answered; only
a request that is idempotent, by its key or by nature, is sent again. *Executed*: the server's own refusal; final.
"""

from __future__ import annotations

import enum
import ssl
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal, Self

import anyio
import httpx
import tenacity

from skyenv.errors import ConfigError, SandboxError, SandboxProtocolError, SandboxUnavailable
from skyenv.remote.http1 import Answer, Broken, NotSent, Origin, Pool, Request
from skyenv.remote.protocol import ATTEMPT, KEY, MAX_WAIT, VERSION, VERSION_HEADER, decode_error
from skyenv.remote.tracing import trace_headers

Method = Literal["GET", "PUT", "POST", "DELETE"]
Headers = dict[str, str]
REQUEST_TIMEOUT = MAX_WAIT + 15.0
CONNECT_TIMEOUT = 15.0
FIRST_ATTEMPTS = 5
PATIENCE = 60.0
URLS_KEPT = 4096
_OURS = (b"host", b"content-length", b"transfer-encoding", b"connection")
_IDEMPOTENT_POSTS = ("/leases",)


class Fate(enum.Enum):
    """What may have become of a request that failed."""

    NEVER_SENT = "never sent"
    MAYBE_EXECUTED = "maybe executed"
    EXECUTED = "executed"


def fate_of(error: BaseException) -> Fate:
    """Classify the failure of a request."""
    if isinstance(error, SandboxUnavailable) and error.retry_after is not None:
        return Fate.MAYBE_EXECUTED if error.reason in ("proxy", "node_unreachable") else Fate.NEVER_SENT
    if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
        return Fate.NEVER_SENT
    return Fate.MAYBE_EXECUTED if isinstance(error, httpx.TransportError) else Fate.EXECUTED


def sender_to(url: str, token: str | None, verify: bool | str | Path = True, *, patience: float = PATIENCE) -> Sender:
    """What sends to a server. `verify`: a file of certificates to trust, or False to trust anybody.

    ConfigError when the URL is none or the file cannot be used.
    """
    parsed = httpx.URL(url) if url.startswith(("http://", "https://")) else None
    if parsed is None or not parsed.host:
        raise ConfigError(f"url {url!r}: must start with http:// or https:// and name a host")
    tls = tls_context(verify) if parsed.scheme == "https" else None
    transport = PoolTransport(Pool(tls, connect_timeout=CONNECT_TIMEOUT))
    return Sender(transport, url, {"authorization": f"Bearer {token}"} if token is not None else {}, patience=patience)


def tls_context(verify: bool | str | Path) -> ssl.SSLContext:
    """A context that trusts the system's certificates, those of a file, or, for False, anybody. ConfigError."""
    try:
        context = ssl.create_default_context(cafile=None if isinstance(verify, bool) else str(verify))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"verify {str(verify)!r}: not a file of certificates: {error}") from error
    if verify is False:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


class PoolTransport(httpx.AsyncBaseTransport):
    """httpx over our pool, which stays quick with a thousand requests at a time."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request; the answer's body is streamed."""
        url, secure = request.url, request.url.scheme == "https"
        origin = Origin(secure, url.host, url.port or (443 if secure else 80))
        stream = request.stream
        body = request.content if isinstance(stream, httpx.ByteStream) else stream
        headers = [header for header in request.headers.raw if header[0].lower() not in _OURS]
        timeout = request.extensions.get("timeout", {}).get("read") or REQUEST_TIMEOUT
        sent = Request(request.method.encode(), url.raw_path, headers, body)  # type: ignore[arg-type]
        exchange = self._pool.exchange(origin, sent, timeout=timeout)
        try:
            answer = await exchange.__aenter__()
        except NotSent as error:
            raise httpx.ConnectError(str(error), request=request) from error
        except Broken as error:
            raise httpx.ReadError(str(error), request=request) from error
        return httpx.Response(answer.status, headers=answer.headers, stream=_Body(exchange, answer))

    async def aclose(self) -> None:
        """Close every connection."""
        await self._pool.__aexit__()


class _Body(httpx.AsyncByteStream):
    """The body of an answer; closing it ends the exchange."""

    def __init__(self, exchange: AbstractAsyncContextManager[Answer], answer: Answer) -> None:
        self._exchange = exchange
        self._answer = answer

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for part in self._answer.chunks():
                yield part
        except Broken as error:
            raise httpx.ReadError(str(error)) from error

    async def aclose(self) -> None:
        await self._exchange.__aexit__(None, None, None)


class Sender:
    """Sends requests until an answer comes, for `patience` seconds where coming back helps. Owns its transport.

    Requests go to the transport as they are: no cookies, redirects or other features of a whole httpx client, which
    would cost more than the rest of the way to the server.
    """

    def __init__(
        self, transport: httpx.AsyncBaseTransport, base: str, headers: Headers, *, patience: float = PATIENCE
    ) -> None:
        self._transport = transport
        self._patience = patience
        self._base = base.rstrip("/")
        self._url = lru_cache(URLS_KEPT)(partial(_joined, self._base))  # httpx looks at every character of a URL
        self._headers = {VERSION_HEADER: VERSION, **headers}
        self._answered = False
        self._silent_since: float | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_details: object) -> None:
        await self._transport.aclose()

    async def send(
        self, method: Method, path: str, body: bytes = b"", headers: Headers | None = None, *,
        timeout: float | None = None,
    ) -> httpx.Response:  # fmt: skip
        """One request and its answer; an error answer is raised as what it means.

        `timeout` bounds each wait for the server (None: `REQUEST_TIMEOUT`). SandboxUnavailable when it cannot be
        reached, SandboxError when the connection breaks again and again, else what the server said.
        """
        all_headers = {**self._headers, **trace_headers(), **(headers or {})}
        timeout = REQUEST_TIMEOUT if timeout is None else timeout
        try:
            return await self._once(method, path, body, all_headers, timeout)
        except (httpx.TransportError, SandboxUnavailable) as error:
            first = error
        try:
            return await self._again(first, method, path, body, all_headers, timeout)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise SandboxUnavailable(f"cannot reach {self._base}: {error}") from error
        except httpx.TransportError as error:
            raise SandboxError(f"the connection to {self._base} broke: {error!r}") from error

    async def _once(self, method: Method, path: str, body: bytes, headers: Headers, timeout: float) -> httpx.Response:
        request = httpx.Request(
            method, self._url(path), headers=headers, content=body, extensions={"timeout": {"read": timeout}}
        )
        try:
            response = await self._transport.handle_async_request(request)
            try:
                await response.aread()
            finally:
                await response.aclose()
        except httpx.TransportError:
            self._silent_since = self._silent_since or anyio.current_time()
            raise
        except httpx.HTTPError as error:
            raise SandboxProtocolError(f"{method} {path}: {error!r}") from error
        self._answered, self._silent_since = True, None
        if response.status_code >= 300:
            raise decode_error(response.content, response.status_code)
        return response

    async def _again(
        self, first: Exception, method: Method, path: str, body: bytes, headers: Headers, timeout: float
    ) -> httpx.Response:
        repeatable = method != "POST" or KEY in headers or path in _IDEMPOTENT_POSTS
        failed: list[Exception] = [first]

        def may_repeat(error: BaseException) -> bool:
            fate = fate_of(error)
            return fate is Fate.NEVER_SENT or (fate is Fate.MAYBE_EXECUTED and repeatable)

        async def attempt() -> httpx.Response:
            if failed:
                raise failed.pop()
            number = retrying.statistics["attempt_number"]
            return await self._once(method, path, body, {**headers, ATTEMPT: str(number)}, timeout)

        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(may_repeat), wait=_pause, stop=self._enough, sleep=anyio.sleep,
            reraise=True,
        )  # fmt: skip
        response: httpx.Response = await retrying(attempt)
        return response

    def _enough(self, state: tenacity.RetryCallState) -> bool:
        """A server that never answered is given up soon; one that fell silent gets `patience` once for all requests."""
        if not self._answered:
            return state.attempt_number >= FIRST_ATTEMPTS
        silent = anyio.current_time() - self._silent_since if self._silent_since is not None else 0.0
        return max(silent, state.seconds_since_start or 0.0) > self._patience


def _joined(base: str, path: str) -> httpx.URL:
    return httpx.URL(base + path)


def _pause(state: tenacity.RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome else None
    backoff: float = tenacity.wait_random_exponential(multiplier=0.1, max=2.0)(state)
    return max(backoff, error.retry_after or 0.0) if isinstance(error, SandboxUnavailable) else backoff
