"""The merger on gRPC: messages to orders, manifests to messages.

Owns the translation and the bounds of a batch. Every answer is a pure function of its request,
but for Materialize, which fetches.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import grpc

from baton.api.common.v1 import common_pb2
from baton.api.merger.v1 import merger_pb2, merger_pb2_grpc
from baton.errors import Reason, ServiceError
from baton.faults import faults
from baton.kv.manifest import SEGMENTS_MAX
from baton.wire.errors import error_to_proto
from baton.wire.segments import manifest_from_proto, manifest_to_proto, segment_from_proto
from services.merger.materialise import MaterialiseOrder, Materialiser
from services.merger.measures import MergerMeasures
from services.merger.splicing import SpliceOrder, carry_out

SPLICES_MAX: Final = 256

_Context = grpc.aio.ServicerContext[Any, Any]


class MergerServicer(merger_pb2_grpc.MergerServiceServicer):
    """Implements MergerService."""

    def __init__(self, materialiser: Materialiser, measures: MergerMeasures) -> None:
        self._materialiser = materialiser
        self._measures = measures

    async def Splice(
        self, request: merger_pb2.SpliceRequest, context: _Context
    ) -> merger_pb2.SpliceResponse:
        """One manifest, or the refusal as the call's status."""
        await faults.reach("merger.splice")
        outcome = self._outcome(request)
        if isinstance(outcome, ServiceError):
            raise outcome
        return merger_pb2.SpliceResponse(manifest=outcome.manifest)

    async def SpliceBatch(
        self, request: merger_pb2.SpliceBatchRequest, context: _Context
    ) -> merger_pb2.SpliceBatchResponse:
        """One outcome per splice."""
        return merger_pb2.SpliceBatchResponse(outcomes=self._outcomes(request.splices))

    async def SpliceStream(
        self, request_iterator: AsyncIterator[merger_pb2.SpliceStreamRequest], context: _Context
    ) -> AsyncIterator[merger_pb2.SpliceStreamResponse]:
        """One response per message, in order."""
        async for request in request_iterator:
            yield merger_pb2.SpliceStreamResponse(
                batch_id=request.batch_id, outcomes=self._outcomes(request.splices)
            )

    async def Materialize(
        self, request: merger_pb2.MaterializeRequest, context: _Context
    ) -> AsyncIterator[merger_pb2.MaterializeResponse]:
        """The KV behind a manifest, blob by blob."""
        _check_count("manifest.parts", len(request.manifest.parts), SEGMENTS_MAX)
        order = MaterialiseOrder(
            manifest=manifest_from_proto(request.manifest),
            kvstore_address=request.kvstore_address,
            capabilities=tuple(request.capabilities),
        )
        async for piece in self._materialiser.pieces(order):
            if isinstance(piece, bytes):
                self._measures.passed_on(len(piece))
                yield merger_pb2.MaterializeResponse(chunk=piece)
            else:
                descriptor = common_pb2.KvBlobDescriptor.FromString(piece.descriptor)
                yield merger_pb2.MaterializeResponse(descriptor=descriptor)

    def _outcomes(
        self, splices: Sequence[merger_pb2.SpliceRequest]
    ) -> list[merger_pb2.SpliceOutcome]:
        _check_count("splices", len(splices), SPLICES_MAX)
        outcomes: list[merger_pb2.SpliceOutcome] = []
        for one in splices:
            outcome = self._outcome(one)
            if isinstance(outcome, ServiceError):
                outcome = merger_pb2.SpliceOutcome(error=error_to_proto(outcome))
            outcomes.append(outcome)
        return outcomes

    def _outcome(
        self, request: merger_pb2.SpliceRequest
    ) -> merger_pb2.SpliceOutcome | ServiceError:
        try:
            _check_count("segments", len(request.segments), SEGMENTS_MAX)
            manifest = carry_out(
                SpliceOrder(
                    segments=tuple(segment_from_proto(one) for one in request.segments),
                    block_tokens=request.block_tokens,
                    expected_text_hashes=tuple(request.expected_text_hashes),
                    expected_ids_hashes=tuple(request.expected_ids_hashes),
                )
            )
        except ServiceError as error:
            self._measures.spliced(error.reason)
            return error
        self._measures.spliced(None)
        return merger_pb2.SpliceOutcome(manifest=manifest_to_proto(manifest))


def _check_count(field: str, count: int, count_max: int) -> None:
    if not 1 <= count <= count_max:
        raise ServiceError(
            Reason.INVALID_REQUEST, f"{field} must hold 1 to {count_max} entries", field=field
        )
