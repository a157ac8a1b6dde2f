"""Runs a trace collector for tests: it receives OpenTelemetry's OTLP over HTTP and stores the spans."""

from __future__ import annotations

import gzip
import http.server
import threading
from types import TracebackType
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """Listens while the context is open; what it was sent can be read afterwards too."""

    def __init__(self) -> None:
        self._requests: list[ExportTraceServiceRequest] = []
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                collector._requests.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

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
