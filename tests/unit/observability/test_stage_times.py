"""Stages: they follow each other, and they add up to the time to the first token."""

from __future__ import annotations

import asyncio

import pytest

from baton.errors import Reason, ServiceError
from baton.stages import FIRST_TOKEN_STAGES, LATER_STAGES, STAGES
from baton.testing.clock import ManualClock
from baton.tracing import current_trace, new_trace, start_tracing
from services.decode.tracks import STEPS_TRACED, Track
from services.gateway.events import (
    Completed,
    Exactness,
    FinishReason,
    KvSource,
    ServingMode,
    TokenUsage,
)
from services.gateway.handoffs import HandOffs
from services.gateway.timing import FirstSends, Timeline


def completed(*, ttft_s: float, elapsed_s: float, tokens: int, first_s: float) -> Completed:
    return Completed(
        finish=FinishReason.STOP,
        usage=TokenUsage(prompt_tokens=4, cached_tokens=0, completion_tokens=tokens),
        exactness=Exactness.EXACT,
        exactness_reason="",
        kv_source=KvSource.REMOTE,
        mode=ServingMode.DISAGGREGATED,
        log_id=bytes(16),
        generation=1,
        position=5,
        kvstore_address="k",
        prefill_worker_id="p",
        decode_worker_id="d",
        time_to_first_token_s=ttft_s,
        elapsed_s=elapsed_s,
        first_token_s=first_s,
        stage_seconds={"first_token_emit": 0.1},
    )


def test_the_names_are_those_of_the_design() -> None:
    """Dashboards and answers use the same words; none is both before and after the token."""
    wanted = {"request_queue_wait", "prefill_compute", "kv_pack", "kv_transfer", "kv_unpack",
              "decode_queue_wait", "first_token_emit", "per_token_decode"}  # fmt: skip
    assert wanted <= set(STAGES)
    assert not set(FIRST_TOKEN_STAGES) & set(LATER_STAGES)


def test_stages_of_a_remote_prefill_add_up_to_the_first_token() -> None:
    """A worker's own report is taken out of the call that brought it: nothing counts twice."""
    clock = ManualClock()
    received_s = clock.monotonic_s()
    clock.advance(0.3)
    line = Timeline(clock, {"receive": 0.1, "tokenise": 0.2}, clock.monotonic_s())
    clock.advance(0.05)
    line.began()
    with line.stage("open"):
        clock.advance(0.1)
        with line.stage("splice"):
            clock.advance(0.4)
    with line.stage("prefill_rpc"):
        clock.advance(2.0)
    line.prefilled(None, {"prefill_compute": 1.5, "kv_pack": 0.3}, 1.8)
    clock.advance(0.01)
    first_s = line.first_token()
    stages = line.stages
    assert stages["open"] == pytest.approx(0.1)
    assert stages["splice"] == pytest.approx(0.4)
    assert stages["prefill_rpc"] == pytest.approx(0.2)
    assert stages["admission_wait"] == pytest.approx(0.05)
    assert stages["first_token_emit"] == pytest.approx(0.01)
    assert sum(stages.values()) == pytest.approx(first_s - received_s)


def test_failed_attempts_are_one_stage_and_nothing_of_them_is_left_in_the_others() -> None:
    """An answer that came at the second try says how much the first one cost."""
    clock = ManualClock()
    line = Timeline(clock, {}, clock.monotonic_s())
    line.began()

    def attempt() -> None:
        with line.stage("open"):
            clock.advance(3.0)
            raise ServiceError(Reason.WORKER_LOST, "gone")

    with pytest.raises(ServiceError):
        attempt()
    line.attempt_failed()
    with line.stage("open"):
        clock.advance(0.5)
    assert line.stages["failed_attempts"] == pytest.approx(3.0)
    assert line.stages["open"] == pytest.approx(0.5)


def test_a_local_prefill_is_reported_by_its_stream() -> None:
    """There is no call to take the worker's time out of: it is measured from the start command."""
    clock = ManualClock()
    line = Timeline(clock, {}, clock.monotonic_s())
    line.began()
    asked_s = clock.monotonic_s()
    clock.advance(1.0)
    line.prefilled(asked_s, {"prefill_compute": 0.7}, 0.8)
    line.note({"kv_transfer": 0.2})
    line.note({"kv_transfer": 9.0})
    assert line.stages["prefill_rpc"] == pytest.approx(0.2)
    assert line.stages["kv_transfer"] == 0.2


def test_the_first_token_counts_when_it_was_sent() -> None:
    """A token in a queue is not with the client."""
    clock = ManualClock()
    sends, first_s = FirstSends(clock), clock.monotonic_s()
    clock.advance(0.5)
    sends.sent(0)
    clock.advance(1.5)
    sends.sent(0)
    given = completed(ttft_s=1.0, elapsed_s=3.0, tokens=3, first_s=first_s)
    fixed = sends.corrected(0, given)
    assert fixed.time_to_first_token_s == pytest.approx(1.5)
    assert fixed.stage_seconds["first_token_emit"] == pytest.approx(0.6)
    assert fixed.stage_seconds["per_token_decode"] == pytest.approx(0.75)
    assert fixed.time_per_output_token_s == pytest.approx(0.75)
    assert sends.corrected(1, given) is given


def test_an_answer_of_one_token_has_no_time_between_tokens() -> None:
    """A zero in that histogram would be a lie."""
    assert completed(ttft_s=1.0, elapsed_s=1.0, tokens=1, first_s=0.0).time_per_output_token_s is (
        None
    )


def test_every_hand_off_ends_exactly_once() -> None:
    """handed off = received + failed + cancelled + in flight, after every step."""
    handoffs = HandOffs()

    def check(**expected: int) -> None:
        states = ("handed_off", "received", "failed", "cancelled")
        counts = {state: handoffs.count(state) for state in states}
        assert counts == {**dict.fromkeys(states, 0), **expected}
        ended = counts["received"] + counts["failed"] + counts["cancelled"]
        assert counts["handed_off"] == ended + handoffs.in_flight

    with handoffs.begun() as one:
        check(handed_off=1)
        one.received()
        one.received()
        check(handed_off=1, received=1)
    with handoffs.begun():
        pass
    with pytest.raises(ServiceError), handoffs.begun():
        raise ServiceError(Reason.WORKER_LOST, "gone")
    with pytest.raises(asyncio.CancelledError), handoffs.begun():
        raise asyncio.CancelledError

    def cancelled_later() -> None:
        with handoffs.begun() as taken:
            taken.received()
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        cancelled_later()
    check(handed_off=5, received=2, failed=2, cancelled=1)


def test_steps_have_spans_at_first_and_one_for_the_rest() -> None:
    """A trace of a long answer stays short; a sequence that fails says so."""
    tracing = start_tracing("decode")
    try:
        parent = new_trace()
        traceparent = f"00-{parent.trace_id}-{parent.span_id}-01"
        track = Track("r1", traceparent, 10.0)
        track.joined(11.0)
        for step in range(STEPS_TRACED + 4):
            track.step_began(12.0 + step)
            track.step_acked(12.5 + step, 12.9 + step, 2)
        assert not track.is_stepwise
        track.ended(40.0, "WORKER_LOST")
        with track.scope() as inside:
            assert inside is not None
            assert inside.trace_id == parent.trace_id
        names = [record.name for record in tracing.records(parent.trace_id)]
        assert names.count("decode_step") == STEPS_TRACED
        assert names[0] == "decode_queue_wait"
        rest, failed = tracing.records(parent.trace_id)[-2:]
        assert (rest.name, rest.attributes["steps"]) == ("decode_steps", 4)
        assert rest.duration_s == pytest.approx(3.9)
        assert (failed.name, failed.is_error) == ("sequence_failed", True)
        assert track.stages() == {"decode_queue_wait": pytest.approx(1.0)}
        assert current_trace() is None
    finally:
        start_tracing("unknown", is_enabled=False)
