"""Traces by OpenTelemetry, from a request through the queue to the worker: where they go, and what a span is.

Needs the extra `otel` where they are asked for, and loads nothing of it where they are not. Knows W3C's trace context
as a line of text, which is what a job's record carries; knows nothing of what is traced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_PATH = "/v1/traces"  # of an OTLP collector (OTLP/HTTP, "OTLP/HTTP Request")

_provider: Any = None
_tracer: Any = None


class TracesError(RuntimeError):
    """Traces are asked for, and what they need is not installed."""


def begin(url: str, part: str) -> None:
    """Send this process's spans to the OTLP collector at `url` (http://collector:4318); empty: nowhere.

    `part` names the process, as in `diptych-api`. Raises `TracesError`.
    """
    global _provider, _tracer
    if not url:
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise TracesError("needs OpenTelemetry; pip install '.[otel]' brings it") from error
    endpoint = url if url.endswith(_PATH) else url.rstrip("/") + _PATH
    _provider = TracerProvider(resource=Resource.create({"service.name": part}), shutdown_on_exit=False)
    _provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=5)))
    _tracer = _provider.get_tracer("diptych")


def end() -> None:
    """Send what is not sent yet, a few seconds long at most. Nothing is traced from here on."""
    global _provider, _tracer
    provider, _provider, _tracer = _provider, None, None
    if provider is not None:
        provider.force_flush(5000)
        provider.shutdown()


class Span:
    """What happens between two moments. Does nothing where nothing is traced."""

    def __init__(self, span: Any = None) -> None:
        self._span = span

    def name(self, name: str) -> None:
        if self._span is not None:
            self._span.update_name(name)

    def note(self, **attributes: str | int | float) -> None:
        """Attributes; `job_id` is told as `diptych.job_id`."""
        if self._span is not None:
            self._span.set_attributes({f"diptych.{name}": value for name, value in attributes.items()})

    def fail(self, why: str) -> None:
        if self._span is not None:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, why))


_NOTHING = Span()


@contextmanager
def span(name: str, kind: str = "internal", parent: str = "", **attributes: str | int | float) -> Iterator[Span]:
    """A span as long as the context, within the one that is open here, or of `parent`, another process's traceparent.

    `kind`: internal, server, or consumer. An error that leaves the context is noted by its type alone.
    """
    if _tracer is None:
        yield _NOTHING
        return
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = TraceContextTextMapPropagator().extract({"traceparent": parent}) if parent else None
    with _tracer.start_as_current_span(
        name, context=context, kind=SpanKind[kind.upper()], record_exception=False, set_status_on_exception=False
    ) as begun:
        made = Span(begun)
        made.note(**attributes)
        try:
            yield made
        except BaseException as error:
            made.fail(type(error).__name__)
            raise


def current() -> str:
    """The traceparent (W3C Trace Context) of the span that is open here; empty where there is none."""
    if _tracer is None:
        return ""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get("traceparent", "")
