"""Runs a trace collector for tests: it receives OpenTelemetry's OTLP over HTTP and stores the spans."""

from __future__ import annotations

import gzip
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.http_server import Handler, LocalServer


class Collector(LocalServer):
    """Listens while the context is open; what it was sent can be read afterwards too."""

    def __init__(self) -> None:
        self._requests: list[ExportTraceServiceRequest] = []
        collector = self

        class Traces(Handler):
            def respond(self) -> None:
                assert self.path == "/v1/traces"
                body = self.body()
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                collector._requests.append(ExportTraceServiceRequest.FromString(body))
                self.answer(200)

        super().__init__(Traces)

    def spans(self, service: str = "") -> list[Any]:
        """Every span, of one service or of all."""
        return [
            span
            for request in self._requests
            for resource in request.resource_spans
            if not service or service == _service(resource)
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    @property
    def services(self) -> set[str]:
        return {_service(resource) for request in self._requests for resource in request.resource_spans}


def _service(resource: Any) -> str:
    found = {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
    return found["service.name"]
