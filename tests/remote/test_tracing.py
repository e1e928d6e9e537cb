"""Spans of real servers, received by a collector in this process."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import anyio
import pytest
from fleet_processes import fleet_in
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import TracerProvider

from skyenv.errors import ConfigError
from skyenv.remote.client import connect
from skyenv.remote.tracing import tracing

Collected = list[tuple[str, Span]]


@pytest.fixture
def collector() -> Iterator[tuple[str, Collected]]:
    """The URL of an OTLP receiver, and what it received: services and spans."""
    collected: Collected = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                names = [a.value.string_value for a in resource.resource.attributes if a.key == "service.name"]
                for scope in resource.scope_spans:
                    collected.extend((names[0], span) for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_arguments: object) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Receiver) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/traces", collected
        finally:
            server.shutdown()
            thread.join()


def attributes(span: Span) -> dict[str, object]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


async def test_a_trace_goes_from_the_client_through_the_gateway_to_the_node(
    collector: tuple[str, Collected], tmp_path: Path
) -> None:
    endpoint, collected = collector
    tracer = TracerProvider().get_tracer("test")
    with fleet_in(tmp_path) as fleet:
        fleet.gateway("--otlp-endpoint", endpoint)
        fleet.node("one", "--otlp-endpoint", endpoint)
        async with connect(fleet.url, patience=30) as client:
            with tracer.start_as_current_span("trajectory") as trajectory:
                async with client.sandbox() as box:
                    await box.exec("echo the-command-itself; exit 3")
                    await box.exec("true")
        await anyio.to_thread.run_sync(fleet.end, "one")
        await anyio.to_thread.run_sync(fleet.end, "gateway")
    mine = trajectory.get_span_context()
    spans = [(service, span) for service, span in collected if span.trace_id == mine.trace_id.to_bytes(16, "big")]
    at_gateway = {span.span_id: span for service, span in spans if service == "skyenv-gateway"}
    at_node = [span for service, span in spans if service == "skyenv-node"]
    assert sorted({span.name for span in at_gateway.values()}) == ["create", "delete", "exec"]
    assert all(span.parent_span_id == mine.span_id.to_bytes(8, "big") for span in at_gateway.values())
    assert [at_gateway[span.parent_span_id].name for span in at_node] == [span.name for span in at_node]
    first, second = sorted(
        (span for span in at_node if span.name == "exec"), key=lambda span: span.start_time_unix_nano
    )
    assert attributes(first)["skyenv.exit_code"] == 3
    assert attributes(second)["skyenv.exit_code"] == 0
    assert attributes(first)["skyenv.call"] != attributes(second)["skyenv.call"]
    assert box.name.startswith(str(attributes(first)["skyenv.sandbox"]))
    assert "the-command-itself" not in json.dumps([str(span) for _service, span in collected])


async def test_an_endpoint_that_is_no_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="http"):
        async with tracing("localhost:4318", "x"):
            pass
