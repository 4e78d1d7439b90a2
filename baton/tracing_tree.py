"""One trace put together from several processes: a common clock, and who is inside whom.

Owns the JSON form of a process's spans, the alignment of their clocks and the tree. Pure but for
`process_spans`, which reads this host's boot id.

On one machine the kernel gives all processes the same monotonic clock. Spans of another machine are
moved so that each call lies in the middle of the span that made it: half of what the call took
beyond the callee's own work was the way there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from baton.tracing import Tracing

BOOT_ID_PATH: Final = Path("/proc/sys/kernel/random/boot_id")
CONTAINERS: Final = frozenset({"request", "sequence", "decode"})
"""Spans that last as long as what is in them: they explain nothing by themselves."""


@functools.cache
def _clock_id() -> str:
    """Names the monotonic clock: the same text means comparable times."""
    try:
        return BOOT_ID_PATH.read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"


def process_spans(tracing: Tracing, trace_id: str) -> dict[str, Any]:
    """What this process kept of one trace, as `/debug/traces/{id}` answers."""
    return {
        "trace_id": trace_id,
        "processes": [
            {
                "service": tracing.service,
                "name": tracing.service,
                "clock": _clock_id(),
                "spans": [record.to_json() for record in tracing.records(trace_id)],
            }
        ],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeSpan:
    """A span on the common clock; `start_s` counts from the begin of the trace."""

    process: str
    name: str
    span_id: str
    parent_span_id: str | None
    start_s: float
    duration_s: float
    is_error: bool
    attributes: Mapping[str, Any]

    @property
    def end_s(self) -> float:
        """Where it ends."""
        return self.start_s + self.duration_s


def spans_of(answer: Mapping[str, Any]) -> tuple[TreeSpan, ...]:
    """The spans of a gathered trace on one clock, the first at 0, by start.

    Raises ValueError for an answer that is none.
    """
    processes = answer.get("processes")
    if not isinstance(processes, list):
        raise ValueError("a trace has a list of processes")
    groups: dict[str, list[TreeSpan]] = {}
    for process in processes:
        read = [_span(str(process.get("name")), one) for one in process.get("spans", ())]
        groups.setdefault(str(process.get("clock")), []).extend(read)
    spans = _on_one_clock(list(groups.values()))
    if not spans:
        return ()
    begin_s = min(span.start_s for span in spans)
    moved = (replace(span, start_s=span.start_s - begin_s) for span in spans)
    return tuple(sorted(moved, key=lambda span: (span.start_s, -span.duration_s)))


def _span(process: str, one: Mapping[str, Any]) -> TreeSpan:
    try:
        return TreeSpan(
            process=process,
            name=str(one["name"]),
            span_id=str(one["span_id"]),
            parent_span_id=one["parent_span_id"],
            start_s=float(one["start_s"]),
            duration_s=float(one["duration_s"]),
            is_error=bool(one["is_error"]),
            attributes=dict(one["attributes"]),
        )
    except (KeyError, TypeError) as error:
        raise ValueError("a span lacks a name, an id or a time") from error


def _on_one_clock(groups: Sequence[list[TreeSpan]]) -> list[TreeSpan]:
    """All spans on the first group's clock; a group without a call to anchor it keeps its own."""
    placed: list[TreeSpan] = list(groups[0]) if groups else []
    waiting = list(groups[1:])
    while waiting:
        by_id = {span.span_id: span for span in placed}
        anchored = next((g for g in waiting if any(s.parent_span_id in by_id for s in g)), None)
        group = anchored if anchored is not None else waiting[0]
        waiting.remove(group)
        shift_s = _shift_s(group, by_id)
        placed += [replace(span, start_s=span.start_s + shift_s) for span in group]
    return placed


def _shift_s(group: Sequence[TreeSpan], by_id: Mapping[str, TreeSpan]) -> float:
    """How far the group's clock is off: the tightest call says it best."""
    best: tuple[float, float] | None = None
    for span in group:
        caller = by_id.get(span.parent_span_id or "")
        if caller is None:
            continue
        slack_s = caller.duration_s - span.duration_s
        shift_s = caller.start_s + slack_s / 2 - span.start_s
        if best is None or abs(slack_s) < best[0]:
            best = (abs(slack_s), shift_s)
    return 0.0 if best is None else best[1]


def in_order(spans: Sequence[TreeSpan]) -> Iterator[tuple[int, TreeSpan]]:
    """(depth, span) from the roots down, siblings by start; a span whose parent was not kept is a
    root.
    """
    known = {span.span_id for span in spans}
    children: dict[str | None, list[TreeSpan]] = {}
    for span in spans:
        parent = span.parent_span_id if span.parent_span_id in known else None
        children.setdefault(parent, []).append(span)
    stack = [(0, span) for span in reversed(children.get(None, []))]
    while stack:
        depth, span = stack.pop()
        yield depth, span
        stack += [(depth + 1, child) for child in reversed(children.get(span.span_id, []))]


def covered_s(spans: Sequence[TreeSpan], first_s: float, end_s: float) -> float:
    """Seconds of [first_s, end_s) in which at least one of the spans was under way."""
    total_s, reached_s = 0.0, first_s
    for span in sorted(spans, key=lambda span: span.start_s):
        begin_s, until_s = max(span.start_s, reached_s), min(span.end_s, end_s)
        if until_s > begin_s:
            total_s += until_s - begin_s
            reached_s = until_s
    return total_s


def steps(spans: Sequence[TreeSpan]) -> tuple[TreeSpan, ...]:
    """The spans that say what was done, without those that only hold others together."""
    return tuple(span for span in spans if span.name not in CONTAINERS)
