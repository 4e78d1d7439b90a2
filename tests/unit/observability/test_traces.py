"""Spans: what is kept, how processes fit together, how the command line draws them."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from baton.cli.trace import BLOCKS, bar, summary, waterfall
from baton.metrics import Metrics
from baton.metrics_server import metrics_application
from baton.tracing import Tracing, format_traceparent, new_trace, record_span, span, start_tracing
from baton.tracing_sdk import ENDPOINT_VARIABLES, open_exporter
from baton.tracing_store import SPANS_PER_TRACE_MAX, Finished, SpanRecord, TraceStore
from baton.tracing_tree import TreeSpan, covered_s, in_order, process_spans, spans_of, steps


def record(trace_id: str = "t", *, is_error: bool = False, **attributes: object) -> SpanRecord:
    return SpanRecord(
        name="s",
        trace_id=trace_id,
        span_id="1",
        parent_span_id=None,
        start_s=0.0,
        start_wall_s=0.0,
        duration_s=1.0,
        is_error=is_error,
        attributes=attributes,
    )


def tree_span(
    name: str, start_s: float, end_s: float, parent: str | None = None, *, is_error: bool = False
) -> TreeSpan:
    return TreeSpan(
        process="p",
        name=name,
        span_id=name,
        parent_span_id=parent,
        start_s=start_s,
        duration_s=end_s - start_s,
        is_error=is_error,
        attributes={},
    )


# --- the store -----------------------------------------------------------------------------------


def test_whole_traces_leave_the_store_not_halves_of_them() -> None:
    """Half a trace misleads: the oldest goes as one."""
    store = TraceStore(spans_max=4)
    for trace_id in ("a", "a", "b", "b", "c"):
        store.add(Finished(record(trace_id)), is_sampled=True)
    assert [one.trace_id for one in store.all()] == ["b", "b", "c"]
    assert store.kept == 3
    assert store.of("a") == ()


def test_one_endless_trace_keeps_its_newest_spans_within_the_bound() -> None:
    """The bound holds for a single trace too."""
    store = TraceStore(spans_max=3)
    for number in range(5):
        store.add(Finished(record(number=number)), is_sampled=True)
    assert [one.attributes["number"] for one in store.all()] == [2, 3, 4]
    wide = TraceStore(spans_max=SPANS_PER_TRACE_MAX * 2)
    for _ in range(SPANS_PER_TRACE_MAX + 5):
        wide.add(Finished(record()), is_sampled=True)
    assert wide.kept == SPANS_PER_TRACE_MAX


@given(
    events=st.lists(st.tuples(st.sampled_from("abcd"), st.booleans(), st.booleans()), max_size=60)
)
def test_the_store_is_bounded_and_keeps_failures_whole(
    events: list[tuple[str, bool, bool]],
) -> None:
    """Whatever comes, in whatever order."""
    store = TraceStore(spans_max=8)
    for trace_id, is_sampled, is_error in events:
        kept = store.add(Finished(record(trace_id, is_error=is_error)), is_sampled=is_sampled)
        assert bool(kept) >= (is_sampled or is_error)
        assert store.kept <= 8
        assert store.kept == len(store.all())


class Exporter:
    """Takes spans as the SDK's batching exporter does."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.is_shut_down = False

    def on_end(self, one: Any) -> None:
        self.names.append(one.name)

    def shutdown(self) -> None:
        self.is_shut_down = True


def test_an_exporter_gets_what_is_kept_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans that were held back follow once their trace fails."""
    exporter = Exporter()
    monkeypatch.setattr("baton.tracing_sdk.open_exporter", lambda: exporter)
    tracing = Tracing("gateway", has_export=True)
    sampled, unsampled = new_trace(), new_trace(is_sampled=False)
    tracing.record("a", sampled, (0.0, 1.0))
    tracing.record("b", unsampled, (0.0, 1.0))
    assert exporter.names == ["a"]
    tracing.record("c", unsampled, (1.0, 2.0), failed="QUEUE_FULL")
    assert exporter.names == ["a", "b", "c"]
    tracing.flush()
    assert exporter.is_shut_down


def test_without_an_endpoint_there_is_no_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing leaves a process that nobody told where to."""
    for name in ENDPOINT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert open_exporter() is None


# --- the tree ------------------------------------------------------------------------------------


def test_processes_of_one_machine_share_a_clock() -> None:
    """The kernel gives all of them the same monotonic time: nothing is moved."""
    tracing = Tracing("gateway")
    root = new_trace()
    tracing.record("a", root, (100.0, 101.0))
    answer = process_spans(tracing, root.trace_id)
    other = process_spans(tracing, root.trace_id)
    other["processes"][0]["name"] = "decode-0"
    for one in other["processes"][0]["spans"]:
        one["start_s"] += 0.25
        one["span_id"] = "f" * 16
    answer["processes"] += other["processes"]
    first, second = spans_of(answer)
    assert (first.start_s, second.start_s) == (0.0, 0.25)
    assert (first.process, second.process) == ("gateway", "decode-0")


def process(name: str, clock: str, *spans: TreeSpan) -> dict[str, object]:
    return {
        "name": name,
        "clock": clock,
        "spans": [
            {
                "name": one.name,
                "span_id": one.span_id,
                "parent_span_id": one.parent_span_id,
                "start_s": one.start_s,
                "duration_s": one.duration_s,
                "is_error": one.is_error,
                "attributes": dict(one.attributes),
            }
            for one in spans
        ],
    }


def test_another_machines_clock_is_anchored_by_its_tightest_call() -> None:
    """Its times mean nothing here; that a call lies inside its caller's span does."""
    here = process(
        "gateway", "x", tree_span("root", 50.0, 60.0), tree_span("call", 51.0, 55.0, "root")
    )
    there = process(
        "decode", "y", tree_span("serve", 7000.0, 7003.0, "call"),
        tree_span("step", 7001.0, 7002.0, "serve"),
    )  # fmt: skip
    spans = {one.name: one for one in spans_of({"processes": [here, there]})}
    assert spans["root"].start_s == 0.0
    assert spans["serve"].start_s == pytest.approx(1.5)
    assert spans["step"].start_s == pytest.approx(2.5)


def test_what_is_not_a_trace_is_refused() -> None:
    """The command line may be pointed at anything."""
    with pytest.raises(ValueError, match="list of processes"):
        spans_of({"error": "no"})
    with pytest.raises(ValueError, match="lacks"):
        spans_of({"processes": [{"name": "x", "clock": "y", "spans": [{"name": "z"}]}]})
    assert spans_of({"processes": []}) == ()


def test_children_stand_below_their_parents_in_time_order() -> None:
    """A span whose parent was not kept is shown, as a root."""
    spans = [
        tree_span("root", 0.0, 9.0),
        tree_span("b", 5.0, 6.0, "root"),
        tree_span("a", 1.0, 2.0, "root"),
        tree_span("a1", 1.0, 1.5, "a"),
        tree_span("orphan", 3.0, 4.0, "gone"),
    ]
    spans.sort(key=lambda one: one.start_s)
    shown = [(depth, one.name) for depth, one in in_order(spans)]
    assert shown == [(0, "root"), (1, "a"), (2, "a1"), (1, "b"), (0, "orphan")]
    spans.append(tree_span("request", 0.0, 9.0))
    assert "request" not in {one.name for one in steps(spans)}


def test_coverage_counts_overlaps_once_and_nothing_outside() -> None:
    """It is what the promise of 98% is measured by."""
    spans = [tree_span("a", -1.0, 2.0), tree_span("b", 1.0, 3.0), tree_span("c", 5.0, 9.0)]
    assert covered_s(spans, 0.0, 6.0) == pytest.approx(4.0)
    assert covered_s([], 0.0, 6.0) == 0.0


@given(
    ends=st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), max_size=20),
)
def test_coverage_never_exceeds_the_whole(ends: list[tuple[float, float]]) -> None:
    """Union of intervals, whatever the intervals."""
    spans = [tree_span(str(i), min(e), max(e)) for i, e in enumerate(ends)]
    covered = covered_s(spans, 2.0, 8.0)
    assert 0.0 <= covered <= 6.0 + 1e-9
    assert covered <= sum(one.duration_s for one in spans) + 1e-9


# --- drawing -------------------------------------------------------------------------------------


def test_a_bar_begins_where_it_should_and_never_leaves_its_cells() -> None:
    """Even something too short to see is drawn."""
    assert bar(0.0, 1.0, 10) == BLOCKS[8] * 10
    assert bar(0.5, 1.0, 10) == " " * 5 + BLOCKS[8] * 5
    assert bar(0.3, 0.3, 10) == " " * 3 + BLOCKS[1]
    assert len(bar(1.0, 1.0, 10)) == 10


@given(first=st.floats(0, 1), last=st.floats(0, 1), cells=st.integers(1, 80))
def test_bars_fit(first: float, last: float, cells: int) -> None:
    """No line of the waterfall is wider than its column."""
    drawn = bar(min(first, last), max(first, last), cells)
    assert 1 <= len(drawn) <= cells


def test_the_waterfall_names_every_span_with_its_times() -> None:
    """What a person reads when a request was slow."""
    spans = [tree_span("request", 0.0, 0.4), tree_span("open", 0.1, 0.2, "request", is_error=True)]
    out = io.StringIO()
    Console(file=out, width=100, color_system=None).print(waterfall(spans, 20))
    lines = out.getvalue().splitlines()
    assert "400.0 ms" in lines[1]
    assert "  open" in lines[2]
    assert "100.0 ms" in lines[2]
    assert "25.0%" in summary({"trace_id": "t"}, spans)


# --- over HTTP -----------------------------------------------------------------------------------


async def test_a_process_answers_for_its_own_spans() -> None:
    """By the trace's id and by the request's; anything else is not there."""
    start_tracing("merger")
    try:
        trace = new_trace()
        record_span("step", trace, (1.0, 2.0), request_id="r1")
        application = metrics_application(Metrics("merger"), lambda: True)
        transport = httpx.ASGITransport(application)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            for wanted in (trace.trace_id, "r1"):
                answer = (await client.get(f"/debug/traces/{wanted}")).json()
                assert answer["trace_id"] == trace.trace_id
                (own,) = answer["processes"]
                assert (own["service"], own["spans"][0]["name"]) == ("merger", "step")
            for wanted in ("nothing", "x" * 300):
                assert (await client.get(f"/debug/traces/{wanted}")).status_code == 404
    finally:
        start_tracing("unknown", is_enabled=False)


def test_outside_a_trace_nothing_is_measured() -> None:
    """Heartbeats and timers belong to no request: their spans would push out those that do."""
    tracing = start_tracing("gateway")
    try:
        with span("alone") as opened:
            assert opened.error is None
        assert tracing.records() == ()
    finally:
        start_tracing("unknown", is_enabled=False)


def test_a_spans_json_holds_times_names_and_attributes_alone() -> None:
    """Nothing else leaves the process."""
    shown = replace(record(tokens=3), parent_span_id="2").to_json()
    assert set(shown) == {
        "name", "trace_id", "span_id", "parent_span_id", "start_s", "duration_s", "is_error",
        "attributes",
    }  # fmt: skip
    assert format_traceparent(new_trace()).startswith("00-")
