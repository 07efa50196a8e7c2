"""OTLP as JSON lines in files, for machines without a collector. Jaeger's UI opens the trace files as they are."""

from __future__ import annotations

import base64
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

MAX_BYTES = 256 * 1024 * 1024
"""A file that has grown to this size is kept as `.1` and begun anew."""


class _Lines:
    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._lock = threading.Lock()

    def append(self, record: dict[str, Any]) -> bool:
        """One line more; False when the disk refuses, which must never stop what is being observed."""
        line = msgspec.json.encode(record) + b"\n"
        with self._lock:
            try:
                if self._path.exists() and self._path.stat().st_size > MAX_BYTES:
                    self._path.replace(self._path.with_suffix(self._path.suffix + ".1"))
                with self._path.open("ab") as file:
                    file.write(line)
            except OSError:
                return False
        return True


class FileSpanExporter(SpanExporter):
    """Appends each batch of spans to `path` as one line of OTLP JSON.

    Spans are many, so they are turned into OTLP's JSON form directly: by way of protobuf messages, as the SDK encodes
    them for the network, a span costs ten times as much.
    """

    def __init__(self, path: Path) -> None:
        self._lines = _Lines(path)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        by_scope: dict[str, list[dict[str, Any]]] = {}
        for span in spans:
            scope = span.instrumentation_scope.name if span.instrumentation_scope else ""
            by_scope.setdefault(scope, []).append(_span(span))
        record = {
            "resourceSpans": [
                {
                    "resource": {"attributes": _attributes(spans[0].resource.attributes) if spans else []},
                    "scopeSpans": [{"scope": {"name": scope}, "spans": found} for scope, found in by_scope.items()],
                }
            ]
        }
        return SpanExportResult.SUCCESS if self._lines.append(record) else SpanExportResult.FAILURE

    def shutdown(self) -> None:
        return None

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True


def _span(span: ReadableSpan) -> dict[str, Any]:
    """One span as OTLP's JSON form has it: ids in hex, times as decimal strings, enums as numbers."""
    context = span.get_span_context()
    record: dict[str, Any] = {
        "traceId": f"{context.trace_id:032x}" if context else "",
        "spanId": f"{context.span_id:016x}" if context else "",
        "name": span.name,
        "kind": span.kind.value + 1,
        "startTimeUnixNano": str(span.start_time),
        "endTimeUnixNano": str(span.end_time),
        "attributes": _attributes(span.attributes),
        "status": {"code": span.status.status_code.value},
    }
    if span.parent is not None:
        record["parentSpanId"] = f"{span.parent.span_id:016x}"
    if span.status.description:
        record["status"]["message"] = span.status.description
    if span.links:
        record["links"] = [
            {"traceId": f"{link.context.trace_id:032x}", "spanId": f"{link.context.span_id:016x}"}
            for link in span.links
        ]
    if span.events:
        record["events"] = [
            {"name": event.name, "timeUnixNano": str(event.timestamp), "attributes": _attributes(event.attributes)}
            for event in span.events
        ]
    return record


def _attributes(attributes: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in (attributes or {}).items()]


def _value(value: object) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list | tuple):
        return {"arrayValue": {"values": [_value(item) for item in value]}}
    return {"stringValue": str(value)}


class FileMetricExporter(MetricExporter):
    """Appends each collection of metrics to `path` as one line of OTLP JSON."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._lines = _Lines(path)

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> MetricExportResult:
        record = _plain(encode_metrics(metrics_data))
        return MetricExportResult.SUCCESS if self._lines.append(record) else MetricExportResult.FAILURE

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        return None

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return True


def _plain(message: Message) -> dict[str, Any]:
    return dict(_hex_ids(MessageToDict(message, use_integers_for_enums=True)))


def _hex_ids(value: Any) -> Any:
    """OTLP's JSON form writes trace and span ids in hex, where protobuf's would use base64."""
    if isinstance(value, dict):
        return {
            key: base64.b64decode(item).hex() if key in ("traceId", "spanId", "parentSpanId") else _hex_ids(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_hex_ids(item) for item in value]
    return value
