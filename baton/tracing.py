"""Who this work is for: request ids, W3C trace contexts, and the spans of this process.

Owns the two context variables that every log line and every outgoing call reads, and this process's
tracing, which is set up once as logging is. Spans of every trace are measured; those of a trace
that nobody sampled are kept only if something fails in it. Never keeps what tenants wrote:
attributes pass `baton.redaction`. With tracing off a span costs one comparison.
"""

from __future__ import annotations

import asyncio
import atexit
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from baton.errors import ServiceError
from baton.redaction import redact
from baton.tracing_store import SPANS_MAX, Finished, SpanRecord, TraceStore

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Tracer

REQUEST_ID_METADATA: Final = "baton-request-id"
TRACEPARENT_METADATA: Final = "traceparent"
REQUEST_ID_CHARS_MAX: Final = 128

Attribute = str | int | float | bool
_TRACEPARENT: Final = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})"
    r"-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})"
    r"(?P<more>-.*)?",
    re.ASCII | re.DOTALL,
)
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9_.:\-]{1,128}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """A position in a trace: ids in lower-case hex (32 and 16 digits), and whether it is
    recorded. `is_new`: this process drew the trace id, and no span has `span_id`.
    """

    trace_id: str
    span_id: str
    is_sampled: bool
    is_new: bool = False

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


def new_trace(*, is_sampled: bool = True) -> TraceContext:
    """The context of a fresh trace; the first span under it is its root."""
    trace_id = secrets.token_hex(16)
    return TraceContext(trace_id=trace_id, span_id=_span_id(), is_sampled=is_sampled, is_new=True)


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
def request_scope(request_id: str, trace: TraceContext | None) -> Iterator[None]:
    """Everything inside belongs to this request: logs and outgoing calls carry both ids.

    Without a trace nothing inside is measured.
    """
    request_token, trace_token = _request_id.set(request_id), _trace.set(trace)
    try:
        yield
    finally:
        _trace.reset(trace_token)
        _request_id.reset(request_token)


@contextmanager
def continued_trace(trace: TraceContext) -> Iterator[None]:
    """Everything inside belongs to this trace; whose request it is stays as it was."""
    token = _trace.set(trace)
    try:
        yield
    finally:
        _trace.reset(token)


def outgoing_metadata() -> tuple[tuple[str, str], ...]:
    """The gRPC metadata that lets the callee continue this request and trace."""
    request_id, trace = _request_id.get(), _trace.get()
    pairs: list[tuple[str, str]] = []
    if request_id is not None:
        pairs.append((REQUEST_ID_METADATA, request_id))
    if trace is not None:
        pairs.append((TRACEPARENT_METADATA, format_traceparent(trace)))
    return tuple(pairs)


class OpenSpan:
    """A span being measured; with tracing off, one shared object that keeps nothing."""

    __slots__ = ("_error", "_span")

    def __init__(self, span: Any) -> None:
        self._span = span
        self._error: str | None = None

    @property
    def error(self) -> str | None:
        """Why the work failed: a reason or a type, never a message. None while it has not."""
        return self._error

    def set(self, **attributes: Attribute | None) -> None:
        """Adds attributes; forbidden names are redacted, None is left out."""
        if self._span is not None:
            given = {name: value for name, value in attributes.items() if value is not None}
            self._span.set_attributes(redact(given))

    def fail(self, reason: str) -> None:
        """The work failed: the whole trace is kept. `reason` is a word of ours, not a message."""
        if self._span is not None:
            self._error = reason


_NO_SPAN: Final = OpenSpan(None)


class Tracing:
    """The spans of one service: measures them and keeps the last `spans_max` in memory.

    `is_enabled` False keeps nothing and imports nothing. `has_export`: also hand kept spans to an
    OTLP exporter, if the environment names an endpoint.
    """

    def __init__(
        self,
        service: str,
        *,
        is_enabled: bool = True,
        spans_max: int = SPANS_MAX,
        has_export: bool = False,
    ) -> None:
        self.service = service
        self._store = TraceStore(spans_max)
        self._tracer: Tracer | None = None
        self._exporter: SpanProcessor | None = None
        if is_enabled:
            from baton.tracing_sdk import open_exporter, open_tracer

            self._tracer = open_tracer(service)
            self._exporter = open_exporter() if has_export else None

    def records(self, trace_id: str | None = None) -> tuple[SpanRecord, ...]:
        """Kept spans in the order they ended; of one trace if `trace_id` is given."""
        return self._store.all() if trace_id is None else self._store.of(trace_id)

    @property
    def kept(self) -> int:
        """How many spans are kept now."""
        return self._store.kept

    def trace_of(self, request_id: str) -> str | None:
        """The id of the newest trace that has a span of this request."""
        return self._store.trace_of(request_id)

    @contextmanager
    def span(self, name: str, **attributes: Attribute | None) -> Iterator[OpenSpan]:
        """Measures the block as a child of the current context, which it becomes."""
        if self._tracer is None:
            yield _NO_SPAN
            return
        parent = _trace.get() or new_trace()
        start_s = time.monotonic()
        span, context = self._started(self._tracer, name, parent, start_s)
        token = _trace.set(context)
        opened = OpenSpan(span)
        opened.set(**attributes)
        try:
            yield opened
        except ServiceError as error:
            opened.fail(error.reason.value)
            raise
        except asyncio.CancelledError:
            opened.fail("CANCELLED")
            raise
        except Exception as error:
            # The message may quote what a tenant wrote: the type alone says enough here.
            opened.fail(type(error).__name__)
            raise
        finally:
            _trace.reset(token)
            times = (start_s, time.monotonic())
            self._ended(opened, span, times, is_sampled=context.is_sampled)

    def record(
        self,
        name: str,
        parent: TraceContext | None,
        times_s: tuple[float, float],
        *,
        failed: str | None = None,
        **attributes: Attribute | None,
    ) -> None:
        """Adds a span that began and ended at these monotonic times, under `parent`."""
        if self._tracer is None or parent is None:
            return
        span, context = self._started(self._tracer, name, parent, times_s[0])
        opened = OpenSpan(span)
        opened.set(**attributes)
        if failed is not None:
            opened.fail(failed)
        self._ended(opened, span, times_s, is_sampled=context.is_sampled)

    def _started(
        self, tracer: Tracer, name: str, parent: TraceContext, start_s: float
    ) -> tuple[Any, TraceContext]:
        from baton.tracing_sdk import forced_trace_id

        forced = forced_trace_id.set(int(parent.trace_id, 16) if parent.is_new else None)
        try:
            span = tracer.start_span(
                name, context=_sdk_context(parent), start_time=_wall_ns(start_s)
            )
        finally:
            forced_trace_id.reset(forced)
        span_id = f"{span.get_span_context().span_id:016x}"
        return span, TraceContext(
            trace_id=parent.trace_id, span_id=span_id, is_sampled=parent.is_sampled
        )

    def _ended(
        self, opened: OpenSpan, span: Any, times_s: tuple[float, float], *, is_sampled: bool
    ) -> None:
        from opentelemetry.trace import StatusCode

        if opened.error is not None:
            span.set_attribute("reason", opened.error)
            span.set_status(StatusCode.ERROR, opened.error)
        # The length comes from the monotonic clock: wall time may jump inside the span.
        span.end(end_time=span.start_time + round(max(times_s[1] - times_s[0], 0.0) * 1e9))
        record = _record(span, times_s)
        exported = None if self._exporter is None else span
        for kept in self._store.add(Finished(record, exported), is_sampled=is_sampled):
            if self._exporter is not None and kept.exported is not None:
                self._exporter.on_end(kept.exported)  # type: ignore[arg-type]  # an SDK span

    def flush(self) -> None:
        """Hands what is left to the exporter and ends it."""
        if self._exporter is not None:
            self._exporter.shutdown()


def _sdk_context(parent: TraceContext) -> Context:
    """The parent as the SDK wants it; empty for a root."""
    from opentelemetry import trace as otel
    from opentelemetry.context import Context

    if parent.is_new:
        return Context()
    remote = otel.SpanContext(
        int(parent.trace_id, 16),
        int(parent.span_id, 16),
        is_remote=True,
        trace_flags=otel.TraceFlags(otel.TraceFlags.SAMPLED),
    )
    return otel.set_span_in_context(otel.NonRecordingSpan(remote), Context())


def _wall_ns(monotonic_s: float) -> int:
    return time.time_ns() - round((time.monotonic() - monotonic_s) * 1e9)


def _record(span: Any, times_s: tuple[float, float]) -> SpanRecord:
    ids = span.get_span_context()
    return SpanRecord(
        name=span.name,
        trace_id=f"{ids.trace_id:032x}",
        span_id=f"{ids.span_id:016x}",
        parent_span_id=f"{span.parent.span_id:016x}" if span.parent is not None else None,
        start_s=times_s[0],
        start_wall_s=span.start_time / 1e9,
        duration_s=max(times_s[1] - times_s[0], 0.0),
        is_error=not span.status.is_ok and not span.status.is_unset,
        attributes=dict(span.attributes or {}),
    )


_process: Tracing = Tracing("unknown", is_enabled=False)


def start_tracing(service: str, *, is_enabled: bool = True) -> Tracing:
    """Sets up this process's tracing; call once, beside `configure_logging`."""
    global _process
    _process = Tracing(service, is_enabled=is_enabled, has_export=True)
    # The exporter sends in batches: what is left goes out when the process ends.
    atexit.register(_process.flush)
    return _process


def process_tracing() -> Tracing:
    """This process's tracing; off until `start_tracing`."""
    return _process


@contextmanager
def span(name: str, **attributes: Attribute | None) -> Iterator[OpenSpan]:
    """Measures the block in this process's tracing; see `Tracing.span`. Outside of any trace
    nothing is measured.
    """
    if _trace.get() is None:
        yield _NO_SPAN
        return
    with _process.span(name, **attributes) as opened:
        yield opened


def record_span(
    name: str,
    parent: TraceContext | None,
    times_s: tuple[float, float],
    *,
    failed: str | None = None,
    **attributes: Attribute | None,
) -> None:
    """Adds a span of the past to this process's tracing; see `Tracing.record`."""
    _process.record(name, parent, times_s, failed=failed, **attributes)
