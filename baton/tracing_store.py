"""The finished spans of one process, in memory, by trace: the last ones, whole traces at a time.

Owns the bound and the rule of what is kept: every span of a sampled trace, and every span of any
trace in which something failed here. Pure; used from one thread.

Invariant: never more than `spans_max` spans are kept, nor as many again held back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

SPANS_MAX: Final = 8192
SPANS_PER_TRACE_MAX: Final = 1024
REQUEST_ID_ATTRIBUTES: Final = ("request_id", "client_request_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanRecord:
    """One finished span. `start_s` is on the monotonic clock of the host it ran on, `start_wall_s`
    is for display, `duration_s` is what may be compared.
    """

    name: str
    trace_id: str
    span_id: str
    parent_span_id: str | None
    start_s: float
    start_wall_s: float
    duration_s: float
    is_error: bool
    attributes: Mapping[str, object]

    def to_json(self) -> dict[str, Any]:
        """For `/debug/traces`; ids, times and attributes that passed redaction."""
        return {
            "name": self.name,
            "trace_id": self.trace_id,
            "span_id": self.span_id,
            "parent_span_id": self.parent_span_id,
            "start_s": round(self.start_s, 6),
            "duration_s": round(self.duration_s, 6),
            "is_error": self.is_error,
            "attributes": dict(self.attributes),
        }


@dataclass(frozen=True, slots=True)
class Finished:
    """A span and what an exporter wants of it; `exported` is None where nothing is exported."""

    record: SpanRecord
    exported: object = None


@dataclass(slots=True)
class _Traces:
    """Traces in the order they began here, at most `spans_max` spans in all."""

    spans_max: int
    spans: int = 0
    by_id: OrderedDict[str, list[Finished]] = field(default_factory=OrderedDict)

    def add(self, item: Finished) -> None:
        found = self.by_id.setdefault(item.record.trace_id, [])
        if len(found) >= SPANS_PER_TRACE_MAX:
            return
        found.append(item)
        self.spans += 1
        while self.spans > self.spans_max:
            if len(self.by_id) == 1:
                found.pop(0)
                self.spans -= 1
            else:
                self.spans -= len(self.by_id.popitem(last=False)[1])

    def take(self, trace_id: str) -> list[Finished]:
        found = self.by_id.pop(trace_id, [])
        self.spans -= len(found)
        return found


class TraceStore:
    """See the module."""

    def __init__(self, spans_max: int = SPANS_MAX) -> None:
        assert spans_max > 0, spans_max
        self._kept = _Traces(spans_max)
        self._held_back = _Traces(spans_max)

    def add(self, item: Finished, *, is_sampled: bool) -> list[Finished]:
        """Keeps the span, or holds it back; returns what is kept from now on, for an exporter."""
        record = item.record
        if not (is_sampled or record.is_error or record.trace_id in self._kept.by_id):
            self._held_back.add(item)
            return []
        kept = [*self._held_back.take(record.trace_id), item]
        for one in kept:
            self._kept.add(one)
        return kept

    @property
    def kept(self) -> int:
        """How many spans are kept."""
        return self._kept.spans

    def all(self) -> tuple[SpanRecord, ...]:
        """Every kept span, trace by trace."""
        return tuple(item.record for found in self._kept.by_id.values() for item in found)

    def of(self, trace_id: str) -> tuple[SpanRecord, ...]:
        """The kept spans of one trace, in the order they ended."""
        return tuple(item.record for item in self._kept.by_id.get(trace_id, ()))

    def trace_of(self, request_id: str) -> str | None:
        """The newest trace with a span of this request."""
        for trace_id, found in reversed(self._kept.by_id.items()):
            for item in found:
                attributes = item.record.attributes
                if any(attributes.get(name) == request_id for name in REQUEST_ID_ATTRIBUTES):
                    return trace_id
        return None
