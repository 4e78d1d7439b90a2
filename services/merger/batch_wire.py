"""Messages of splices, bytes in and bytes out.

Owns which way an answer takes: by hand where a request has the usual shape and is in order
(`quick_wire`), else by the generated code; a splice of the second kind does not make its neighbours
slow. Owns the bounds of a message and the count of outcomes. Every answer is a pure function of the
message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message

from baton.api.merger.v1 import merger_pb2
from baton.errors import Reason, ServiceError
from baton.kv.manifest import SEGMENTS_MAX
from baton.wire.errors import error_to_proto
from baton.wire.segments import manifest_to_proto, segment_from_proto
from services.merger import quick_wire
from services.merger.measures import MergerMeasures
from services.merger.quick_wire import varint
from services.merger.splicing import SpliceOrder, carry_out

SPLICES_MAX: Final = 256
MESSAGE_BYTES_MAX: Final = 1 << 20
"""Of one message of splices: while it is answered, every other stream waits."""

Outcome = merger_pb2.SpliceOutcome | ServiceError

_Message = TypeVar("_Message", bound=Message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A message of many splices: its type, and the tags of its splices and of their outcomes."""

    request: type[merger_pb2.SpliceBatchRequest] | type[merger_pb2.SpliceStreamRequest]
    splice_tag: int
    outcome_tag: bytes


BATCH: Final = Shape(request=merger_pb2.SpliceBatchRequest, splice_tag=0x0A, outcome_tag=b"\x0a")
STREAM: Final = Shape(request=merger_pb2.SpliceStreamRequest, splice_tag=0x12, outcome_tag=b"\x12")


class Splicer:
    """Answers messages; any number of them, in any process, give the same."""

    def __init__(self, measures: MergerMeasures) -> None:
        self._measures = measures

    def one(self, data: bytes) -> bytes:
        """A `SpliceRequest` -> a `SpliceResponse`; raises the refusal."""
        _check_size(data, "segments")
        answer = quick_wire.outcome_of(data, 0, len(data))
        if answer is None:
            outcome = self._generated(parsed(merger_pb2.SpliceRequest, data))
            if isinstance(outcome, ServiceError):
                raise outcome
            # An outcome's manifest has the field number that a response's has.
            return outcome.SerializeToString()
        self._measures.spliced(None)
        return answer

    def batch(self, data: bytes) -> bytes:
        """A `SpliceBatchRequest` -> a `SpliceBatchResponse`."""
        return self._answered(data, b"", BATCH)

    def stream(self, data: bytes) -> bytes:
        """A `SpliceStreamRequest` -> a `SpliceStreamResponse`."""
        return self._answered(data, quick_wire.batch_id(data), STREAM)

    def _answered(self, data: bytes, head: bytes, shape: Shape) -> bytes:
        """The answer; `head` is what stands before the splices, and goes back as it came."""
        _check_size(data, "splices")
        spans = quick_wire.spans(data, len(head), shape.splice_tag)
        if spans is None:
            # Fields in another order, or some that this version does not know.
            request = parsed(shape.request, data)
            if isinstance(request, merger_pb2.SpliceStreamRequest):
                head = b"\x08" + varint(request.batch_id) if request.batch_id else b""
            check_count("splices", len(request.splices), SPLICES_MAX)
            return _joined(head, shape, [self._serialised(one) for one in request.splices])
        check_count("splices", len(spans), SPLICES_MAX)
        outcomes: list[bytes] = []
        quick = 0
        for first, end in spans:
            outcome = quick_wire.outcome_of(data, first, end)
            if outcome is None:
                outcome = self._serialised(parsed(merger_pb2.SpliceRequest, data[first:end]))
            else:
                quick += 1
            outcomes.append(outcome)
        self._measures.spliced(None, quick)
        return _joined(head, shape, outcomes)

    def _serialised(self, request: merger_pb2.SpliceRequest) -> bytes:
        outcome = self._generated(request)
        if isinstance(outcome, ServiceError):
            outcome = merger_pb2.SpliceOutcome(error=error_to_proto(outcome))
        return outcome.SerializeToString()

    def _generated(self, request: merger_pb2.SpliceRequest) -> Outcome:
        outcome = outcome_of(request)
        self._measures.spliced(outcome.reason if isinstance(outcome, ServiceError) else None)
        return outcome


def outcome_of(request: merger_pb2.SpliceRequest) -> Outcome:
    """The outcome by the generated code: what every answer is equal to."""
    try:
        check_count("segments", len(request.segments), SEGMENTS_MAX)
        manifest = carry_out(
            SpliceOrder(
                segments=tuple(segment_from_proto(one) for one in request.segments),
                block_tokens=request.block_tokens,
                expected_text_hashes=tuple(request.expected_text_hashes),
                expected_ids_hashes=tuple(request.expected_ids_hashes),
            )
        )
    except ServiceError as error:
        return error
    return merger_pb2.SpliceOutcome(manifest=manifest_to_proto(manifest))


def parsed(kind: type[_Message], data: bytes) -> _Message:
    """The message; INVALID_REQUEST for bytes that are none."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise ServiceError(
            Reason.INVALID_REQUEST, f"the bytes are no {kind.DESCRIPTOR.name}; send one"
        ) from error


def check_count(field: str, count: int, count_max: int) -> None:
    """INVALID_REQUEST naming the field unless it has 1 to `count_max` entries."""
    if not 1 <= count <= count_max:
        raise ServiceError(
            Reason.INVALID_REQUEST, f"{field} must hold 1 to {count_max} entries", field=field
        )


def _check_size(data: bytes, field: str) -> None:
    if len(data) > MESSAGE_BYTES_MAX:
        raise ServiceError(
            Reason.INVALID_REQUEST,
            f"the message has {len(data)} bytes, at most {MESSAGE_BYTES_MAX}; send fewer {field}",
            field=field,
        )


def _joined(head: bytes, shape: Shape, outcomes: Sequence[bytes]) -> bytes:
    pieces: list[bytes] = [head]
    for outcome in outcomes:
        pieces += (shape.outcome_tag, varint(len(outcome)), outcome)
    return b"".join(pieces)
