"""Observability: what clients choose never becomes a metric's label, and one trace has one root."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from tests.cases.door import reset
from tests.cases.replay import CHAT, MODEL, Replay, chat
from tests.cases.waiting import together, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

CLIENT_SPAN = "00f067aa0ba902b7"
SERVED = 12
REFUSED = 150
NEW_SERIES_MAX = 30


def series(replay: Replay) -> int:
    """How many series all processes show together."""
    return sum(len(replay.samples(part)) for part in replay.parts())


def test_c98_client_chosen_values_make_no_series(calm: Replay) -> None:
    """Observability: unknown models, paths, keys, users and ids leave the pages as long as before.

    llm-d-router#1625, litellm#39136: each made series that were never dropped.
    """
    calm.call(CHAT, chat("hi", max_tokens=1))
    calm.call(CHAT, {**chat("hi"), "model": "typo"})
    calm.call("/nowhere")
    calm.call(CHAT, {}, key="bad")
    before = series(calm)
    for index in range(REFUSED):
        assert calm.call(CHAT, {**chat("hi"), "model": f"typo-{index}"}).status == 404
        assert calm.call(f"/nowhere/{index}").status == 404
        assert calm.call(CHAT, {}, key=f"bad-{index}").status == 401
    for index in range(SERVED):
        names = {
            "X-Request-Id": f"r{index}",
            "X-Session": f"s{index}",
            "User-Agent": f"a{index}",
        }
        body = chat("hi", max_tokens=1, user=f"u{index}")
        assert calm.call(CHAT, body, headers=names).status == 200
    assert series(calm) - before <= NEW_SERIES_MAX


def test_c98_a_model_name_cannot_write_metrics(calm: Replay) -> None:
    """Observability: line ends and quotes in a name stay out of the page."""
    body = {**chat("hi"), "model": 'a"}\nfake_metric 1\n'}
    assert calm.call(CHAT, body).status in (400, 404)
    assert "fake_metric" not in calm.call("/metrics").body


@pytest.mark.parametrize(
    "value",
    ["", "00-0-0-0", "ff-" + "0" * 32 + "-" + "0" * 16 + "-01", "x" * 9000],
    ids=["empty", "short", "zero", "long"],
)
def test_c100_an_invalid_trace_header_starts_a_new_trace(calm: Replay, value: str) -> None:
    """Observability: a bad header never fails the request."""
    answer = calm.call(CHAT, chat("hi", max_tokens=1), headers={"traceparent": value})
    assert answer.status in (200, 431)


SERVICES = {"gateway", "prefill", "kvstore", "decode"}


def spans_of(replay: Replay, trace_id: str) -> dict[str, list[dict[str, Any]]]:
    """The spans of a trace by service, as the gateway gathers them."""
    answer = replay.call(f"/debug/traces/{trace_id}")
    found: dict[str, list[dict[str, Any]]] = {}
    for process in answer.body["processes"] if answer.status == 200 else []:
        if process["spans"]:
            found.setdefault(process["service"], []).extend(process["spans"])
    return found


def assert_one_tree(replay: Replay, trace_id: str, services: set[str]) -> None:
    """These services have spans of the trace, and every span hangs under the client's."""
    kept = until(
        lambda: spans if services <= set(spans := spans_of(replay, trace_id)) else None,
        10,
        f"spans of {sorted(services)}",
    )
    assert kept is not None
    spans = [span for found in kept.values() for span in found]
    ids = {span["span_id"] for span in spans} | {CLIENT_SPAN}
    orphans = [span["name"] for span in spans if span["parent_span_id"] not in ids]
    assert not orphans


def traced() -> tuple[str, dict[str, str]]:
    """A fresh trace id with the header that carries it."""
    trace_id = uuid.uuid4().hex
    return trace_id, {"traceparent": f"00-{trace_id}-{CLIENT_SPAN}-01"}


@pytest.mark.parametrize("is_stream", [False, True], ids=["plain", "stream"])
def test_c100_one_trace_through_every_hop(calm: Replay, is_stream: bool) -> None:
    """Observability: gateway, prefill, kvstore and decode continue the client's trace.

    dynamo#7030: decode appeared as an unrelated root.
    """
    trace_id, headers = traced()
    body = chat("hi", max_tokens=4)
    if is_stream:
        assert calm.sse(CHAT, body, headers=headers).has_done
    else:
        assert calm.call(CHAT, body, headers=headers).status == 200
    assert_one_tree(calm, trace_id, SERVICES)


def test_c100_a_cache_hit_and_two_samples_stay_in_the_trace(calm: Replay) -> None:
    """Observability: the same for a prompt found in the cache, with two samples."""
    body = {**chat("hi there, again and again and again", max_tokens=3), "n": 2, "seed": 3}
    assert calm.call(CHAT, body).status == 200
    trace_id, headers = traced()
    answer = calm.call(CHAT, body, headers=headers)
    assert answer.cached_tokens > 0
    assert_one_tree(calm, trace_id, SERVICES)


def test_c100_a_cancelled_request_stays_in_the_trace(calm: Replay) -> None:
    """Observability: the client leaves; what was done for it still hangs under one root."""
    trace_id, headers = traced()
    body = {"model": MODEL, "stream": True, **chat("Count from 1 to 20.", max_tokens=500)}
    with calm.held(CHAT, body, headers=headers) as connection:
        until(lambda: calm.gauge("decode-0", "baton_decode_active_sequences") > 0, 20, "decoding")
        reset(connection)
    calm.settles()
    assert_one_tree(calm, trace_id, {"gateway", "prefill", "kvstore"})


def test_c100_a_prefix_through_the_merger_stays_in_the_trace(calm: Replay) -> None:
    """Observability: the splice of a published prefix is a span under the same root."""
    system = {"role": "system", "content": "You answer in one short line, in plain words. " * 3}
    published = calm.call("/v1/prefixes", {"name": "c100", "messages": [system]})
    assert published.status in (200, 201), published.body
    trace_id, headers = traced()
    body = chat("hi", max_tokens=2)
    body["messages"] = [system, *body["messages"]]
    answer = calm.call(CHAT, body, headers=headers)
    assert answer.body["baton"]["prefix_id"] == published.body["id"]
    assert_one_tree(calm, trace_id, {*SERVICES, "merger"})
    calm.call(f"/v1/prefixes/{published.body['id']}", method="DELETE")


def test_c100_a_retry_elsewhere_stays_in_the_trace(drill: Replay) -> None:
    """Observability: the first attempt fails at prefill; the second hangs under the same root."""
    trace_id, headers = traced()
    with drill.armed("prefill-0", "prefill.after_accept:fail:once"):
        answer = drill.call(CHAT, chat("hi there", max_tokens=3), headers=headers)
        assert drill.fired("prefill-0", "prefill.after_accept") == 1
    assert answer.status == 200, answer.body
    assert_one_tree(drill, trace_id, {"gateway", "kvstore", "decode"})


def test_c100_every_answer_names_its_request(calm: Replay) -> None:
    """Observability: the id under which logs and traces are found is in each answer."""
    answers = together(*[lambda: calm.call(CHAT, chat("hi", max_tokens=1))] * 2)
    ids = {one.headers["x-baton-request-id"] for one in answers}
    assert len(ids) == 2
