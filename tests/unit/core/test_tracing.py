"""Trace contexts follow W3C to the letter; spans stay few and clean."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.redaction import REDACTED
from baton.tracing import (
    Tracing,
    current_trace,
    format_traceparent,
    is_request_id,
    new_trace,
    outgoing_metadata,
    parse_traceparent,
    request_scope,
)

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"


def test_a_valid_header_reads_and_writes_back() -> None:
    """The example of the recommendation itself."""
    context = parse_traceparent(f"00-{TRACE}-{SPAN}-01")
    assert context is not None
    assert (context.trace_id, context.span_id, context.is_sampled) == (TRACE, SPAN, True)
    assert format_traceparent(context) == f"00-{TRACE}-{SPAN}-01"
    child = context.child()
    assert (child.trace_id, child.is_sampled) == (TRACE, True)
    assert child.span_id != SPAN


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "nonsense",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-0g",
        f"00-{TRACE}-{SPAN}-01\n",
        f"01-{TRACE}-{SPAN}-01-{'x' * 600}",
    ],
)
def test_an_invalid_header_starts_a_new_trace(header: str | None) -> None:
    """A caller's mistake must not stop the request."""
    assert parse_traceparent(header) is None


def test_a_later_version_is_read_as_far_as_known() -> None:
    """The recommendation promises that the first four fields stay."""
    context = parse_traceparent(f"cc-{TRACE}-{SPAN}-00-what-the-future-will-be-like")
    assert context is not None
    assert not context.is_sampled


@given(text=st.text(max_size=200))
def test_no_header_raises(text: str) -> None:
    """Headers come from outside."""
    context = parse_traceparent(text)
    assert context is None or parse_traceparent(format_traceparent(context)) == context


def test_spans_nest_under_the_callers_and_keep_their_order() -> None:
    """The tree of one request can be put together from the parts of every process."""
    tracing = Tracing("gateway")
    root = new_trace()
    with request_scope("r", root), tracing.span("outer", worker="d0") as outer:
        assert dict(outgoing_metadata())["traceparent"] != format_traceparent(root)
        with tracing.span("inner"):
            outer.set(output_tokens=3, prompt="never")
    inner, outer_record = tracing.records(root.trace_id)
    assert (inner.name, outer_record.name) == ("inner", "outer")
    assert outer_record.parent_span_id is None
    assert outer_record.trace_id == root.trace_id
    assert inner.parent_span_id == outer_record.span_id
    assert dict(outer_record.attributes) == {
        "worker": "d0",
        "output_tokens": 3,
        "prompt": REDACTED,
    }
    assert outer_record.duration_s >= inner.duration_s >= 0.0
    assert tracing.records("0" * 32) == ()
    assert current_trace() is None


def test_a_failed_span_names_the_type_and_never_the_message() -> None:
    """An exception's text may quote a prompt."""
    tracing = Tracing("gateway")

    def fail() -> None:
        with tracing.span("step"):
            raise ValueError("the secret prompt")

    with pytest.raises(ValueError, match="secret"):
        fail()
    (record,) = tracing.records()
    assert record.is_error
    assert "secret" not in repr(record)


def test_the_ring_is_bounded_and_off_means_nothing_is_kept() -> None:
    """A process that runs for months keeps the newest spans only."""
    tracing = Tracing("gateway", spans_max=3)
    for number in range(5):
        with tracing.span(f"s{number}"):
            pass
    assert [record.name for record in tracing.records()] == ["s2", "s3", "s4"]
    off = Tracing("gateway", is_enabled=False)
    with off.span("s") as span:
        span.set(a=1)
        assert current_trace() is None
    assert off.records() == ()


def test_the_parent_is_the_callers_span() -> None:
    """What another process began goes on under its span, not under a root of ours."""
    tracing = Tracing("decode")
    context = parse_traceparent(f"00-{TRACE}-{SPAN}-01")
    assert context is not None
    with request_scope("r", context), tracing.span("s"):
        pass
    (record,) = tracing.records(TRACE)
    assert record.parent_span_id == SPAN


def test_a_trace_nobody_sampled_is_kept_whole_once_something_fails_in_it() -> None:
    """The caller decided what is worth keeping; an error is worth it always."""
    tracing = Tracing("gateway")
    context = parse_traceparent(f"00-{TRACE}-{SPAN}-00")
    assert context is not None
    with request_scope("r", context), tracing.span("fine") as fine:
        inner = current_trace()
        assert inner is not None
        assert not inner.is_sampled
        assert fine.error is None
    assert tracing.records() == ()
    with request_scope("r", context), tracing.span("refused") as refused:
        refused.fail("QUEUE_FULL")
    with request_scope("r", context), tracing.span("after"):
        pass
    assert [record.name for record in tracing.records(TRACE)] == ["fine", "refused", "after"]
    assert [record.is_error for record in tracing.records(TRACE)] == [False, True, False]
    assert dict(tracing.records(TRACE)[1].attributes) == {"reason": "QUEUE_FULL"}


def test_a_span_of_the_past_has_the_times_it_was_given() -> None:
    """Steps are shared by many sequences: their spans are written when they are over."""
    tracing = Tracing("decode")
    context = parse_traceparent(f"00-{TRACE}-{SPAN}-01")
    tracing.record("step", context, (100.0, 100.5), index=1, nothing=None)
    (record,) = tracing.records(TRACE)
    assert (record.start_s, record.duration_s, record.parent_span_id) == (100.0, 0.5, SPAN)
    assert dict(record.attributes) == {"index": 1}


def test_a_trace_is_found_by_the_requests_id() -> None:
    """People have the id of a response, not of a trace."""
    tracing = Tracing("gateway")
    with tracing.span("request", request_id="r1", client_request_id="mine"):
        pass
    (record,) = tracing.records()
    assert tracing.trace_of("r1") == tracing.trace_of("mine") == record.trace_id
    assert tracing.trace_of("r2") is None


def test_request_ids_from_outside_fit_a_log_line() -> None:
    """Up to 128 plain characters, one more is too many."""
    assert is_request_id("a" * 128)
    assert not is_request_id("a" * 129)
    assert not is_request_id("")
    assert not is_request_id("a b")
    assert not is_request_id("a\n")
