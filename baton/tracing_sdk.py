"""OpenTelemetry's SDK behind `baton.tracing`: ids, provider and the optional OTLP export.

Owns the tracer of one process. Never installs a global provider: that belongs to whoever embeds
us. Without OTEL_EXPORTER_OTLP_ENDPOINT nothing is exported and no exporter is imported.
"""

from __future__ import annotations

import os
from contextvars import ContextVar
from typing import Any, Final

import structlog
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Tracer

ENDPOINT_VARIABLES: Final = (
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
)

_log = structlog.stdlib.get_logger("baton.tracing")

forced_trace_id: ContextVar[int | None] = ContextVar("baton_forced_trace_id", default=None)
"""The trace id of the next root span, which the caller drew already."""


class _Ids(RandomIdGenerator):
    """Random ids, but for a root whose trace id stands."""

    def generate_trace_id(self) -> int:
        return forced_trace_id.get() or super().generate_trace_id()


def open_tracer(service: str) -> Tracer:
    """An SDK tracer that records everything: what is kept is decided when a span has ended."""
    provider = TracerProvider(
        sampler=ALWAYS_ON,
        resource=Resource({"service.name": f"baton-{service}"}),
        id_generator=_Ids(),
        shutdown_on_exit=False,
    )
    return provider.get_tracer("baton")


def open_exporter() -> SpanProcessor | None:
    """A batching OTLP exporter if an endpoint is set and the extra `otlp` is installed."""
    if not any(os.environ.get(name) for name in ENDPOINT_VARIABLES):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    except ImportError:
        _log.warning("otlp_export_off", hint="pip install 'baton-serving[otlp]'")
        return None
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter: Any = OTLPSpanExporter()
    return BatchSpanProcessor(exporter)
