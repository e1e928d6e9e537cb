"""OpenTelemetry, for who wants it: a span for each request to a server, sent by OTLP over HTTP. Needs the extra `otel`.

A request's `traceparent` header is the span's parent, and what a gateway passes on names the gateway's span, so a
trajectory's own span, the gateway and the node make one trace. Spans carry ids and numbers, never a command, its output
or a path. Where tracing is off, nothing of it is in a request's way.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skyenv.errors import ConfigError, SandboxProtocolError
from skyenv.remote.protocol import KEY, META, decode_meta

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

SHUTDOWN_TIMEOUT = 5.0
_PARENT = b"traceparent"
_NUMBERS = ("exit_code", "seconds", "timed_out", "oom", "session_restarted", "output_bytes")

Wrap = Callable[[ASGIApp], ASGIApp]


def trace_headers() -> dict[str, str]:
    """The headers that make a request part of the current trace; none unless this program uses OpenTelemetry."""
    if "opentelemetry.trace" not in sys.modules:
        return {}
    from opentelemetry import propagate

    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier


@asynccontextmanager
async def tracing(endpoint: str | None, service: str) -> AsyncIterator[Wrap]:
    """How to wrap an application so that its requests are traced to `endpoint`; with None, not at all.

    Spans that wait are sent when the block ends. ConfigError when the packages are missing or it is no URL.
    """
    if endpoint is None:
        yield lambda app: app
        return
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"otlp endpoint {endpoint!r}: must start with http:// or https://")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError("tracing needs OpenTelemetry: pip install 'skyenv[otel]'") from error
    provider = TracerProvider(resource=Resource.create({"service.name": service}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=SHUTDOWN_TIMEOUT)))
    tracer = provider.get_tracer("skyenv")
    try:
        yield lambda app: Traced(app, tracer)
    finally:
        with anyio.CancelScope(shield=True), anyio.move_on_after(SHUTDOWN_TIMEOUT):
            await anyio.to_thread.run_sync(provider.shutdown, abandon_on_cancel=True)


class Traced:
    """An application whose requests about sandboxes are spans."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._app = app
        self._tracer = tracer
        self._propagator = TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, one span, named after what is done: create, exec, snapshot, ..."""
        described = _describe(scope)
        if described is None:
            await self._app(scope, receive, send)
            return
        from opentelemetry.trace import SpanKind, set_span_in_context

        name, attributes = described
        headers = [(key, value) for key, value in scope["headers"] if key != _PARENT]
        carrier = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
        parent = self._propagator.extract(carrier)
        with self._tracer.start_as_current_span(name, parent, SpanKind.SERVER, attributes) as span:
            onward: dict[str, str] = {}
            self._propagator.inject(onward, set_span_in_context(span))
            headers += [(key.encode(), value.encode()) for key, value in onward.items() if key.encode() == _PARENT]

            async def watched(message: Message) -> None:
                if message["type"] == "http.response.start":
                    _note(span, message)
                await send(message)

            await self._app({**scope, "headers": headers}, receive, watched)


def _describe(scope: Scope) -> tuple[str, dict[str, Any]] | None:
    """A span's name and attributes; None for what is not about one sandbox."""
    if scope["type"] != "http":
        return None
    parts: list[str] = scope["path"].split("/")
    if parts[1] != "sandboxes" or len(parts) < 3:
        return None
    if len(parts) == 3:
        name = {"PUT": "create", "DELETE": "delete"}.get(scope["method"], "look")
    else:
        name = parts[3] if scope["method"] != "GET" else f"{parts[3]} (read)"
    attributes: dict[str, Any] = {"skyenv.sandbox": parts[2]}
    key = next((value for header, value in scope["headers"] if header == KEY.encode()), None)
    if key is not None:
        attributes["skyenv.call"] = key.decode("latin-1")
    return name, attributes


def _note(span: Span, message: Message) -> None:
    from opentelemetry.trace import StatusCode

    status: int = message["status"]
    span.set_attribute("http.response.status_code", status)
    if status >= 400:
        span.set_status(StatusCode.ERROR)
    meta = next((value for header, value in message["headers"] if header == META.encode()), None)
    if meta is not None:
        try:
            said = decode_meta(meta.decode("latin-1"))
        except SandboxProtocolError:
            return
        for name in _NUMBERS:
            if isinstance(value := said.get(name), (bool, int, float)):
                span.set_attribute(f"skyenv.{name}", value)
