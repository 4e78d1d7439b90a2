"""What is answered by hand is what the generated code answers, byte for byte."""

from __future__ import annotations

import random

import pytest
from google.protobuf.message import DecodeError

from baton.api.merger.v1 import merger_pb2
from baton.errors import Reason, ServiceError
from baton.metrics import Metrics
from baton.wire.errors import error_to_proto
from services.merger import quick_wire
from services.merger.batch_wire import MESSAGE_BYTES_MAX, SPLICES_MAX, Splicer, outcome_of
from services.merger.measures import MergerMeasures
from tests.unit.merger.histories import drawn_request, request, segment


def splicer() -> Splicer:
    return Splicer(MergerMeasures(Metrics("merger")))


def generated(data: bytes) -> merger_pb2.SpliceStreamResponse | None:
    """The answer by the generated code alone; None where it cannot read the message."""
    try:
        message = merger_pb2.SpliceStreamRequest.FromString(data)
    except DecodeError:
        return None
    answer = merger_pb2.SpliceStreamResponse(batch_id=message.batch_id)
    for one in message.splices:
        outcome = outcome_of(one)
        if isinstance(outcome, ServiceError):
            outcome = merger_pb2.SpliceOutcome(error=error_to_proto(outcome))
        answer.outcomes.append(outcome)
    return answer


def require_same(data: bytes) -> None:
    """Both ways give the same, or both refuse."""
    expected = generated(data)
    if expected is None or not 1 <= len(expected.outcomes) <= SPLICES_MAX:
        with pytest.raises(ServiceError) as refused:
            splicer().stream(data)
        assert refused.value.reason is Reason.INVALID_REQUEST
        return
    answer = splicer().stream(data)
    assert merger_pb2.SpliceStreamResponse.FromString(answer) == expected
    # A map's entries have no order of their own: bytes are compared where there is none.
    if not any(one.HasField("error") for one in expected.outcomes):
        assert answer == expected.SerializeToString()


def drawn_stream(draw: random.Random) -> bytes:
    batch_id = draw.choice((0, 1, 127, 128, 1 << 40, (1 << 63) - 1, (1 << 64) - 1))
    splices = [drawn_request(draw) for _ in range(draw.randrange(6))]
    message = merger_pb2.SpliceStreamRequest(batch_id=batch_id, splices=splices)
    return message.SerializeToString()


def test_drawn_messages_are_answered_as_by_the_generated_code() -> None:
    """In order and out of it, alone and beside one another; both ways are taken often."""
    draw = random.Random(1)
    quick = slow = 0
    for _ in range(600):
        data = drawn_stream(draw)
        require_same(data)
        for one in merger_pb2.SpliceStreamRequest.FromString(data).splices:
            raw = one.SerializeToString()
            if quick_wire.outcome_of(raw, 0, len(raw)) is None:
                slow += 1
            else:
                quick += 1
    assert quick > 500
    assert slow > 200


def test_spoiled_bytes_are_answered_as_by_the_generated_code() -> None:
    """A flipped, missing or doubled byte anywhere: never another answer than protobuf's."""
    draw = random.Random(2)
    for _ in range(1000):
        data = bytearray(drawn_stream(draw))
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(len(data) + 1)
            match draw.randrange(4):
                case 0 if at < len(data):
                    data[at] ^= 1 << draw.randrange(8)
                case 1:
                    del data[at : at + draw.choice((1, 2, 34))]
                case 2:
                    data[at:at] = data[at : at + draw.choice((1, 2, 34))]
                case _:
                    data[at:at] = bytes([draw.randrange(256)])
        require_same(bytes(data))


def test_usual_request_never_needs_the_generated_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """A published prefix and a conversation behind it: what mergers are for."""
    usual = request(segment(0, 21, is_published=True), segment(21, 40), request_id="req-1")
    data = merger_pb2.SpliceStreamRequest(batch_id=9, splices=[usual] * 8).SerializeToString()
    expected = generated(data)
    assert expected is not None

    def never(_request: object) -> None:
        raise AssertionError("the generated code was asked")

    monkeypatch.setattr("services.merger.batch_wire.outcome_of", never)
    assert splicer().stream(data) == expected.SerializeToString()


@pytest.mark.parametrize("extra", [b"\x08\x07", b"\x98\x06\x01"])
def test_fields_elsewhere_or_unknown_leave_the_answer_as_it_is(extra: bytes) -> None:
    """A batch id behind the splices; a field that a later version may add, at every level."""
    usual = request(segment(0, 21), segment(21, 40))
    stream = merger_pb2.SpliceStreamRequest(batch_id=9, splices=[usual]).SerializeToString()
    require_same(stream + extra)
    inner = usual.SerializeToString() + b"\x98\x06\x01"
    require_same(stream + b"\x12" + quick_wire.varint(len(inner)) + inner)


def test_counts_and_sizes_are_bounded() -> None:
    """At the limit it passes, one past it does not; naming the field."""
    one = request(segment(0, 8))
    full = merger_pb2.SpliceBatchRequest(splices=[one] * SPLICES_MAX)
    answer = merger_pb2.SpliceBatchResponse.FromString(splicer().batch(full.SerializeToString()))
    assert len(answer.outcomes) == SPLICES_MAX
    long = request(*(segment(at, at + 1) for at in range(300)))
    many = merger_pb2.SpliceBatchRequest(splices=[long] * 30)
    for refused in (
        merger_pb2.SpliceBatchRequest(),
        merger_pb2.SpliceBatchRequest(splices=[one] * (SPLICES_MAX + 1)),
        many,
    ):
        with pytest.raises(ServiceError) as error:
            splicer().batch(refused.SerializeToString())
        assert error.value.field == "splices"
    assert many.ByteSize() > MESSAGE_BYTES_MAX


def test_one_splice_is_answered_or_refused_as_a_call() -> None:
    """The unary call has the refusal as its status."""
    good, bad = request(segment(0, 16), segment(16, 32)), request(segment(8, 16))
    expected = outcome_of(good)
    assert isinstance(expected, merger_pb2.SpliceOutcome)
    answer = merger_pb2.SpliceResponse.FromString(splicer().one(good.SerializeToString()))
    assert answer.manifest == expected.manifest
    with pytest.raises(ServiceError) as refused:
        splicer().one(bad.SerializeToString())
    assert refused.value.field == "segments[0].from_position"


def test_outcomes_are_counted_whichever_way_they_took() -> None:
    """By reason, and as progress."""
    metrics = Metrics("merger")
    measures = MergerMeasures(metrics)
    stale = request(segment(0, 8, log_id=b"l" * 16, generation=2), segment(8, 16, log_id=b"l" * 16))
    message = merger_pb2.SpliceBatchRequest(splices=[request(segment(0, 8)), stale, stale])
    Splicer(measures).batch(message.SerializeToString())
    shown = metrics.exposition().decode()
    assert 'baton_splices_total{outcome="ok"} 1.0' in shown
    assert 'baton_splices_total{outcome="STALE_GENERATION"} 2.0' in shown
    assert measures.count == 3


def test_one_splice_that_is_too_large_names_its_own_field() -> None:
    """A single request has no splices: its segments are too many bytes."""
    large = request(segment(0, 8))
    large.segments[0].token_ids.extend([1 << 28] * (MESSAGE_BYTES_MAX // 5))
    with pytest.raises(ServiceError) as error:
        splicer().one(large.SerializeToString())
    assert error.value.field == "segments"
