"""OpenTelemetry tracing, from a request through the queue to the worker.

Uses the extra `otel` only if tracing is configured. A job's record carries W3C's trace context as a line of text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from core.extras import pip_install

Attributes = Mapping[str, str | bool | int | float | Sequence[str]]

_PATH = "/v1/traces"  # of an OTLP collector (OTLP/HTTP, "OTLP/HTTP Request")

_provider: Any = None
_tracer: Any = None


class TracesError(RuntimeError):
    """Tracing is configured, but its packages are not installed."""


def begin(url: str, part: str) -> None:
    """Export this process's spans to the OTLP collector at `url` (http://collector:4318); empty: tracing is off.

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
        raise TracesError(f"needs OpenTelemetry: {pip_install('otel')}") from error
    endpoint = url if url.endswith(_PATH) else url.rstrip("/") + _PATH
    _provider = TracerProvider(resource=Resource.create({"service.name": part}), shutdown_on_exit=False)
    _provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=5)))
    _tracer = _provider.get_tracer("diptych")


def end() -> None:
    """Export pending spans, for a few seconds at most. Nothing is traced afterwards."""
    global _provider, _tracer
    provider, _provider, _tracer = _provider, None, None
    if provider is not None:
        provider.force_flush(5000)
        provider.shutdown()


class Span:
    """A span. Does nothing while tracing is off."""

    def __init__(self, span: Any = None) -> None:
        self._span = span

    def name(self, name: str) -> None:
        if self._span is not None:
            self._span.update_name(name)

    def note(self, **attributes: str | int | float) -> None:
        """Set attributes; `job_id` becomes `diptych.job_id`."""
        self.set({f"diptych.{name}": value for name, value in attributes.items()})

    def set(self, attributes: Attributes) -> None:
        """Set attributes under names that are others', such as those of OpenTelemetry's semantic conventions."""
        if self._span is not None:
            self._span.set_attributes(attributes)

    def fail(self, reason: str) -> None:
        if self._span is not None:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, reason))


_NOTHING = Span()


@contextmanager
def span(
    name: str, kind: str = "internal", parent: str = "", conventional: Attributes | None = None,
    **attributes: str | int | float,
) -> Iterator[Span]:  # fmt: skip
    """Context: a span within the current one, or within `parent`, another process's traceparent.

    `kind`: internal, server, or consumer. `conventional` are attributes as for `Span.set`, which samplers see, others
    as for `Span.note`. An exception that leaves the context is recorded by its type only.
    """
    if _tracer is None:
        yield _NOTHING
        return
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = TraceContextTextMapPropagator().extract({"traceparent": parent}) if parent else None
    with _tracer.start_as_current_span(
        name, context=context, kind=SpanKind[kind.upper()], attributes=conventional, record_exception=False,
        set_status_on_exception=False,
    ) as begun:  # fmt: skip
        recorder = Span(begun)
        recorder.note(**attributes)
        try:
            yield recorder
        except BaseException as error:
            recorder.fail(type(error).__name__)
            raise


def current() -> str:
    """The traceparent (W3C Trace Context) of the current span; empty without one."""
    if _tracer is None:
        return ""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get("traceparent", "")
