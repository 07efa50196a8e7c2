"""Traces: one set-up per process, spans, and the `traceparent` headers that join them across processes."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from opentelemetry import metrics, trace
from opentelemetry.context import Context, attach, detach
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExporter, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from observability.otlp_files import FileMetricExporter, FileSpanExporter

AttributeValue = str | int | float | bool | Sequence[str] | Sequence[int] | Sequence[float]
Headers = Mapping[str, str]

_tracer = trace.get_tracer("farflung")


class Telemetry:
    """The providers of this process. `shutdown` flushes what is still held."""

    def __init__(self, tracer_provider: TracerProvider | None, meter_provider: MeterProvider | None) -> None:
        self._tracer_provider = tracer_provider
        self._meter_provider = meter_provider

    def shutdown(self) -> None:
        if self._tracer_provider is not None:
            self._tracer_provider.shutdown()
        if self._meter_provider is not None:
            self._meter_provider.shutdown(timeout_millis=3000)


def configure(
    component: str, instance: str, *, endpoint: str = "", directory: Path | None = None, interval: float = 5.0
) -> Telemetry:
    """Send this process's spans and metrics to `endpoint` (OTLP/HTTP), else to files in `directory`, else nowhere.

    `OTEL_EXPORTER_OTLP_ENDPOINT` stands in for an empty `endpoint`. Metrics leave every `interval` seconds.
    """
    global _tracer
    endpoint = endpoint or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    spans: SpanExporter
    readings: MetricExporter
    if endpoint:
        spans = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
        readings = OTLPMetricExporter(endpoint=f"{endpoint.rstrip('/')}/v1/metrics")
    elif directory is not None:
        spans = FileSpanExporter(directory / f"traces-{instance}.jsonl")
        readings = FileMetricExporter(directory / f"metrics-{instance}.jsonl")
    else:
        return Telemetry(None, None)
    resource = Resource.create(
        {
            "service.name": f"farflung-{component}",
            "service.namespace": "farflung",
            "service.instance.id": instance,
            "host.name": socket.gethostname(),
        }
    )
    # No span is ever left out, so the sampler that looks at parents first would only cost.
    tracer_provider = TracerProvider(resource=resource, sampler=ALWAYS_ON)
    tracer_provider.add_span_processor(BatchSpanProcessor(spans, schedule_delay_millis=1000))
    meter_provider = MeterProvider(
        resource=resource,
        metric_readers=[PeriodicExportingMetricReader(readings, export_interval_millis=interval * 1000)],
    )
    trace.set_tracer_provider(tracer_provider)
    metrics.set_meter_provider(meter_provider)
    _tracer = tracer_provider.get_tracer("farflung")
    return Telemetry(tracer_provider, meter_provider)


def _context_of(headers: Headers | None) -> SpanContext | None:
    """The span that a W3C `traceparent` names: 00-{32 hex digits}-{16 hex digits}-{flags}.

    Read and written here and not by the SDK's propagator, which takes ten times as long and whose `tracestate` and
    baggage nobody uses.
    """
    parts = (headers.get("traceparent", "") if headers else "").split("-")
    if len(parts) != 4:
        return None
    try:
        trace_id, span_id, flags = (int(part, 16) for part in parts[1:])
    except ValueError:
        return None
    context = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))
    return context if context.is_valid else None


def _parent(headers: Headers | None) -> Context | None:
    context = _context_of(headers)
    return trace.set_span_in_context(NonRecordingSpan(context), Context()) if context is not None else None


def _links(links: Sequence[Headers]) -> list[Link]:
    return [Link(context) for context in map(_context_of, links) if context is not None]


@contextmanager
def span(
    name: str,
    *,
    parent: Headers | None = None,
    links: Sequence[Headers] = (),
    kind: SpanKind = SpanKind.INTERNAL,
    start_ns: int | None = None,
    **attributes: AttributeValue,
) -> Iterator[Span]:
    """A span around the block: child of `parent`'s headers if given, else of the current span.

    With `start_ns` (since the Unix epoch) it began earlier than the block. An exception that leaves the block is
    recorded on it.
    """
    current = _tracer.start_span(name, _parent(parent), kind, _named(attributes), _links(links), start_ns)
    token = attach(trace.set_span_in_context(current))
    try:
        yield current
    except Exception as error:
        current.record_exception(error)
        current.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))
        raise
    finally:
        detach(token)
        current.end()


def begin(
    name: str, *, parent: Headers | None = None, start_ns: int | None = None, **attributes: AttributeValue
) -> Span:
    """A span that somebody ends later, outside any block."""
    return _tracer.start_span(name, context=_parent(parent), start_time=start_ns, attributes=_named(attributes))


def root(name: str, **attributes: AttributeValue) -> Span:
    """A span that begins a trace of its own."""
    return _tracer.start_span(name, context=Context(), attributes=_named(attributes))


def headers(of: Span | None = None) -> dict[str, str]:
    """The `traceparent` header of `of`, or of the current span; empty when nothing is traced."""
    context = (of if of is not None else trace.get_current_span()).get_span_context()
    if not context.is_valid:
        return {}
    return {"traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"}


def fail(current: Span, reason: str) -> None:
    """Mark a span as failed."""
    current.set_status(Status(StatusCode.ERROR, reason))


def _named(attributes: Mapping[str, AttributeValue]) -> dict[str, AttributeValue]:
    return {f"farflung.{key}": value for key, value in attributes.items()}
