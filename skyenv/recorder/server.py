"""The endpoint: requests in, each session's answers out, over HTTP on loopback unless told otherwise.

A request names its session by its API key and by nothing else; an unknown key is refused, never a new session. Keys
are looked up by their digest, so how long that takes says nothing about them. An answer is recorded before its first
byte is sent; a client that hangs up meanwhile cancels the generation, and then nothing is recorded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from skyenv.core import Engine
from skyenv.errors import ConfigError, SkyEnvError
from skyenv.recorder.anthropic import Anthropic
from skyenv.recorder.chat import Chat
from skyenv.recorder.responses import Responses
from skyenv.recorder.session import RecordedSession, recordable
from skyenv.recorder.wire import Answer, Dialect, Refused, Request, encode
from skyenv.remote.listen import Listening, serve_app
from skyenv.renderer import Renderer
from skyenv.types import Limits, SamplingParams, Trajectory

MAX_BODY = 64 << 20
HUNG_UP = 499


class Recorder:
    """Serves sessions of one engine to agents. Raises ConfigError for a renderer that cannot be recorded with.

    `async with recorder.serve() as url`, then `with recorder.session(trajectory) as session`; a key is good until the
    session's block ends. The engine belongs to whoever opened it.
    """

    def __init__(self, engine: Engine, renderer: Renderer, *, model: str = "policy") -> None:
        if (why := recordable(renderer)) is not None:
            raise ConfigError(why)
        self._engine, self._renderer, self._model = engine, renderer, model
        self._sessions: dict[bytes, RecordedSession] = {}

    @contextmanager
    def session(
        self, trajectory: Trajectory, *, limits: Limits | None = None, sampling: SamplingParams | None = None
    ) -> Iterator[RecordedSession]:
        """Open a session that fills `trajectory`."""
        session = RecordedSession(self._engine, self._renderer, trajectory, limits=limits, sampling=sampling)
        digest = _digest(session.key)
        self._sessions[digest] = session
        try:
            yield session
        finally:
            del self._sessions[digest]
            session.close()

    @asynccontextmanager
    async def serve(self, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
        """Serve inside the block; yields the URL. Requests under way when it ends are cut. Port 0 picks a free one."""
        listening = Listening(host, port)
        listener, stop, ready = listening.bind(), anyio.Event(), anyio.Event()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(serve_app, self.app(), listening, listener, stop, lambda _url: ready.set())
                await ready.wait()
                try:
                    yield listening.url(listener)
                finally:
                    stop.set()
        finally:
            listener.close()

    def app(self) -> Starlette:
        """The ASGI application."""
        dialects: tuple[Dialect, ...] = (Chat(), Responses(), Anthropic())
        routes = [Route(dialect.path, _Endpoint(self, dialect), methods=["POST"]) for dialect in dialects]
        counting = Route("/v1/messages/count_tokens", _Counting(self, Anthropic()), methods=["POST"])
        models = [Route("/v1/models", self._models), Route("/v1/models/{name:path}", self._models)]
        sockets = Route(Responses.path, _no_socket, methods=["GET"])
        elsewhere = Route("/{path:path}", _nothing, methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
        return Starlette(routes=[*routes, counting, sockets, *models, elsewhere])

    def find(self, request: HttpRequest) -> RecordedSession:
        """The session whose key a request presents. Raises Refused."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        key = request.headers.get("x-api-key") or (token.strip() if scheme.lower() == "bearer" else "")
        session = self._sessions.get(_digest(key))
        if session is None:
            raise Refused(401, "invalid_api_key", "this key opens no session")
        return session

    async def _models(self, request: HttpRequest) -> Response:
        """The one model there is, in the words of both providers; clients that check its name get an answer."""
        name = request.path_params.get("name", self._model)
        model = {
            **{"id": self._model, "object": "model", "created": 0, "owned_by": "skyenv"},
            **{"type": "model", "display_name": self._model, "created_at": "1970-01-01T00:00:00Z"},
        }
        try:
            self.find(request)
            if name != self._model:
                message = f"there is no model {name!r}; the model here is {self._model!r}"
                raise Refused(404, "model_not_found", message)
        except Refused as refused:
            return _json(Chat().error(refused), refused.status)
        ends = {"has_more": False, "first_id": self._model, "last_id": self._model}
        return _json(model if "name" in request.path_params else {"object": "list", "data": [model], **ends})


class _Endpoint:
    """One dialect's path, as an ASGI application."""

    def __init__(self, recorder: Recorder, dialect: Dialect) -> None:
        self._recorder, self._dialect = recorder, dialect

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = HttpRequest(scope, receive)
        try:
            session = self._recorder.find(request)
            asked = self._dialect.read(await _body(request))
            response = await self.respond(session, asked, request)
        except ClientDisconnect:
            return
        except Refused as refused:
            response = _json(self._dialect.error(refused), refused.status)
        except SkyEnvError as error:
            response = _json(self._dialect.error(Refused(400, "invalid_request_error", str(error))), 400)
        await response(scope, receive, send)

    async def respond(self, session: RecordedSession, asked: Request, request: HttpRequest) -> Response:
        """The answer, or its cancellation by a client that went away."""
        answer: Answer | None = None
        failure: Refused | SkyEnvError | None = None
        async with anyio.create_task_group() as tasks:

            async def watch() -> None:
                while (await request.receive())["type"] != "http.disconnect":
                    pass
                tasks.cancel_scope.cancel()

            tasks.start_soon(watch)
            try:
                answer = await session.answer(asked)
            except (Refused, SkyEnvError) as error:  # as it is, not as a group's
                failure = error
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure
        if answer is None:
            return Response(status_code=HUNG_UP)
        if asked.stream:
            return StreamingResponse(encode(self._dialect.events(answer)), media_type="text/event-stream")
        return _json(self._dialect.write(answer))


class _Counting(_Endpoint):
    """How many tokens a request's history has."""

    async def respond(self, session: RecordedSession, asked: Request, request: HttpRequest) -> Response:
        return _json({"input_tokens": session.count_tokens(asked)})


async def _body(request: HttpRequest) -> dict[str, Any]:
    """The JSON object that a request carries. Raises Refused."""
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_BODY:
            raise Refused(413, "request_too_large", f"the request has more than {MAX_BODY} bytes")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Refused(400, "invalid_request_error", f"the request is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise Refused(400, "invalid_request_error", "the request must be a JSON object")
    return value


async def _no_socket(request: HttpRequest) -> Response:
    """What a client hears that would rather have a WebSocket, and then posts."""
    return _json(Chat().error(Refused(426, "upgrade_required", "there are no WebSockets here; use POST")), 426)


async def _nothing(request: HttpRequest) -> Response:
    """What is answered anywhere else."""
    paths = ", ".join(dialect.path for dialect in (Chat, Responses, Anthropic))
    message = f"there is no {request.method} {request.url.path} here; models are asked at {paths}"
    return _json(Chat().error(Refused(404, "not_found_error", message)), 404)


def _json(value: Any, status: int = 200) -> Response:
    """A response in JSON, all ASCII: values may hold half of a surrogate pair, which is text in JSON alone."""
    return Response(json.dumps(value), status, media_type="application/json")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
