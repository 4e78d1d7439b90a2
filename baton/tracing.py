"""Who this work is for: request ids, W3C trace contexts, and the last spans of this process.

Owns the two context variables that every log line and every outgoing call reads, and a bounded
in-memory ring of finished spans. Never exports by itself and never keeps what tenants wrote:
attributes pass `baton.redaction`. With tracing off a span costs one comparison.
"""

from __future__ import annotations

import re
import secrets
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from baton.redaction import redact

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, Span
    from opentelemetry.trace import Tracer

REQUEST_ID_METADATA: Final = "baton-request-id"
TRACEPARENT_METADATA: Final = "traceparent"
REQUEST_ID_CHARS_MAX: Final = 128

Attribute = str | int | float | bool
_TRACEPARENT: Final = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})"
    r"(?P<more>-.*)?",
    re.ASCII | re.DOTALL,
)
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9_.:\-]{1,128}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """A position in a trace: ids in lower-case hex (32 and 16 digits), and whether it is
    recorded.
    """

    trace_id: str
    span_id: str
    is_sampled: bool

    def child(self) -> TraceContext:
        """The same trace under a fresh span id."""
        return TraceContext(trace_id=self.trace_id, span_id=_span_id(), is_sampled=self.is_sampled)


_trace: ContextVar[TraceContext | None] = ContextVar("baton_trace", default=None)
_request_id: ContextVar[str | None] = ContextVar("baton_request_id", default=None)


def parse_traceparent(header: str | None) -> TraceContext | None:
    """The context of a W3C `traceparent`, or None for anything invalid (start a new trace then)."""
    match = _TRACEPARENT.fullmatch(header) if header is not None and len(header) <= 512 else None
    if match is None or match["version"] == "ff":
        return None
    if match["version"] == "00" and match["more"]:
        return None
    if not int(match["trace"], 16) or not int(match["span"], 16):
        return None
    is_sampled = bool(int(match["flags"], 16) & 1)
    return TraceContext(trace_id=match["trace"], span_id=match["span"], is_sampled=is_sampled)


def format_traceparent(context: TraceContext) -> str:
    """The version 00 `traceparent` of a context."""
    return f"00-{context.trace_id}-{context.span_id}-{'01' if context.is_sampled else '00'}"


def new_trace() -> TraceContext:
    """A sampled context of a fresh trace."""
    trace_id = secrets.token_hex(16)
    return TraceContext(trace_id=trace_id, span_id=_span_id(), is_sampled=True)


def _span_id() -> str:
    return f"{secrets.randbelow(2**64 - 1) + 1:016x}"


def current_trace() -> TraceContext | None:
    """The trace context of the running request, if any."""
    return _trace.get()


def current_request_id() -> str | None:
    """The internal id of the running request, if any."""
    return _request_id.get()


def is_request_id(text: str) -> bool:
    """True for 1 to 128 of the characters A-Z a-z 0-9 _ . : -"""
    return _REQUEST_ID.fullmatch(text) is not None


@contextmanager
def request_scope(request_id: str, trace: TraceContext) -> Iterator[None]:
    """Everything inside belongs to this request: logs and outgoing calls carry both ids."""
    request_token, trace_token = _request_id.set(request_id), _trace.set(trace)
    try:
        yield
    finally:
        _trace.reset(trace_token)
        _request_id.reset(request_token)


def outgoing_metadata() -> tuple[tuple[str, str], ...]:
    """The gRPC metadata that lets the callee continue this request and trace."""
    request_id, trace = _request_id.get(), _trace.get()
    pairs: list[tuple[str, str]] = []
    if request_id is not None:
        pairs.append((REQUEST_ID_METADATA, request_id))
    if trace is not None:
        pairs.append((TRACEPARENT_METADATA, format_traceparent(trace)))
    return tuple(pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanRecord:
    """One finished span. `start_wall_s` is for display, `duration_s` is what may be compared."""

    name: str
    trace_id: str
    span_id: str
    parent_span_id: str | None
    start_wall_s: float
    duration_s: float
    is_error: bool
    attributes: Mapping[str, object]


class OpenSpan:
    """A span being measured; with tracing off, one shared object that keeps nothing."""

    __slots__ = ("_span",)

    def __init__(self, span: Span | None) -> None:
        self._span = span

    def set(self, **attributes: Attribute) -> None:
        """Adds attributes; forbidden names are redacted."""
        if self._span is not None:
            self._span.set_attributes(redact(attributes))


_NO_SPAN: Final = OpenSpan(None)


class Tracing:
    """The spans of one service: measures them and keeps the last `spans_max` in memory.

    `is_enabled` False keeps nothing and imports nothing.
    """

    def __init__(self, service: str, *, is_enabled: bool = True, spans_max: int = 2048) -> None:
        assert spans_max > 0, spans_max
        self._records: deque[SpanRecord] = deque(maxlen=spans_max)
        self._tracer = _tracer(service, self._records) if is_enabled else None

    def records(self, trace_id: str | None = None) -> tuple[SpanRecord, ...]:
        """Finished spans, oldest first; of one trace if `trace_id` is given."""
        return tuple(r for r in self._records if trace_id is None or r.trace_id == trace_id)

    @contextmanager
    def span(self, name: str, **attributes: Attribute) -> Iterator[OpenSpan]:
        """Measures the block as a child of the current context, which it becomes."""
        parent = _trace.get()
        if self._tracer is None or (parent is not None and not parent.is_sampled):
            yield _NO_SPAN
            return
        with _recorded(self._tracer, name, parent) as span:
            span.set(**attributes)
            yield span


@contextmanager
def _recorded(tracer: Tracer, name: str, parent: TraceContext | None) -> Iterator[OpenSpan]:
    from opentelemetry import trace as otel
    from opentelemetry.context import Context

    context = Context()
    if parent is not None:
        remote = otel.SpanContext(
            int(parent.trace_id, 16),
            int(parent.span_id, 16),
            is_remote=True,
            trace_flags=otel.TraceFlags(otel.TraceFlags.SAMPLED),
        )
        context = otel.set_span_in_context(otel.NonRecordingSpan(remote), context)
    start_wall_ns, start_ns = time.time_ns(), time.monotonic_ns()
    span = tracer.start_span(name, context=context, start_time=start_wall_ns)
    ids = span.get_span_context()
    token = _trace.set(
        TraceContext(
            trace_id=f"{ids.trace_id:032x}", span_id=f"{ids.span_id:016x}", is_sampled=True
        )
    )
    try:
        yield OpenSpan(span)  # type: ignore[arg-type]  # the SDK's tracer starts SDK spans
    except Exception as error:
        # The message may quote what a tenant wrote: the type alone says enough here.
        span.set_status(otel.StatusCode.ERROR, type(error).__name__)
        raise
    finally:
        _trace.reset(token)
        # The length comes from the monotonic clock: wall time may jump inside the span.
        span.end(end_time=start_wall_ns + time.monotonic_ns() - start_ns)


def _tracer(service: str, records: deque[SpanRecord]) -> Tracer:
    """An SDK tracer of its own provider: the global one belongs to whoever embeds us."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON

    class RingProcessor(SpanProcessor):
        """Keeps finished spans as plain records."""

        def on_end(self, span: ReadableSpan) -> None:
            records.append(_record(span))

    provider = TracerProvider(
        sampler=ALWAYS_ON,
        resource=Resource({"service.name": f"baton-{service}"}),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(RingProcessor())
    return provider.get_tracer("baton")


def _record(span: ReadableSpan) -> SpanRecord:
    ids = span.get_span_context()
    assert ids is not None
    assert span.start_time is not None
    assert span.end_time is not None
    return SpanRecord(
        name=span.name,
        trace_id=f"{ids.trace_id:032x}",
        span_id=f"{ids.span_id:016x}",
        parent_span_id=f"{span.parent.span_id:016x}" if span.parent is not None else None,
        start_wall_s=span.start_time / 1e9,
        duration_s=max(span.end_time - span.start_time, 0) / 1e9,
        is_error=not span.status.is_ok and not span.status.is_unset,
        attributes=dict(span.attributes or {}),
    )
