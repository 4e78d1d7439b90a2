"""The merger on gRPC: messages handed on as bytes, and how long a stream may be silent.

Owns the calls and their bounds in time. Every answer is a pure function of its request, but for
Materialize, which fetches.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Final

import grpc

from baton.api.merger.v1 import merger_pb2
from baton.errors import Reason, ServiceError
from baton.faults import faults
from baton.kv.manifest import SEGMENTS_MAX
from baton.wire.segments import manifest_from_proto
from services.merger.batch_wire import Splicer, check_count
from services.merger.materialise import MaterialiseOrder, Materialiser
from services.merger.measures import MergerMeasures

SERVICE_NAME: Final = "baton.api.merger.v1.MergerService"
SILENCE_S_MAX: Final = 300.0
"""A stream on which nothing comes, or from which nothing is taken, for so long gives up its place
among the calls; a client that has splices again opens another.
"""
UNTAKEN_S_MAX: Final = 30.0
"""A message of KV that its client does not take for so long ends the call."""

_Context = grpc.aio.ServicerContext[Any, Any]


class MergerServicer:
    """Serves MergerService. Splices come and go as bytes, so that protobuf need not read them."""

    def __init__(
        self,
        materialiser: Materialiser,
        measures: MergerMeasures,
        *,
        silence_s_max: float = SILENCE_S_MAX,
        untaken_s_max: float = UNTAKEN_S_MAX,
    ) -> None:
        self._materialiser = materialiser
        self._measures = measures
        self._splicer = Splicer(measures)
        self._silence_s_max = silence_s_max
        self._untaken_s_max = untaken_s_max

    async def splice(self, request: bytes, context: _Context) -> bytes:
        """Splice: one manifest, or the refusal as the call's status."""
        await faults.reach("merger.splice")
        return self._splicer.one(request)

    async def splice_batch(self, request: bytes, context: _Context) -> bytes:
        """SpliceBatch: one outcome per splice."""
        return self._splicer.batch(request)

    async def splice_stream(
        self, requests: AsyncIterator[bytes], context: _Context
    ) -> AsyncGenerator[bytes, None]:
        """SpliceStream: one response per message, in order; one message is held at a time."""
        loop, half_s = asyncio.get_running_loop(), self._silence_s_max / 2
        answer = self._splicer.stream
        try:
            async with asyncio.timeout(self._silence_s_max) as bound:
                renew_at_s = loop.time() + half_s
                async for request in requests:
                    # A timer for each message would cost as much as a splice.
                    if (now_s := loop.time()) >= renew_at_s:
                        bound.reschedule(now_s + self._silence_s_max)
                        renew_at_s = now_s + half_s
                    yield answer(request)
        except TimeoutError as error:
            raise ServiceError(
                Reason.DEADLINE_EXCEEDED,
                f"nothing came on this stream for {self._silence_s_max / 2:g} s; open another",
            ) from error

    async def materialize(
        self, request: merger_pb2.MaterializeRequest, context: _Context
    ) -> AsyncGenerator[bytes, None]:
        """Materialize: the KV behind a manifest, blob by blob."""
        check_count("manifest.parts", len(request.manifest.parts), SEGMENTS_MAX)
        order = MaterialiseOrder(
            manifest=manifest_from_proto(request.manifest),
            kvstore_address=request.kvstore_address,
            capabilities=tuple(request.capabilities),
        )
        async with aclosing(self._materialiser.messages(order)) as messages:
            async for piece in messages:
                if piece.payload:
                    self._measures.passed_on(piece.payload.nbytes)
                # Who asks for the next message has handed this one on. A client that takes nothing
                # has its call cancelled: it keeps a place here and one at the store.
                async with asyncio.timeout(self._untaken_s_max):
                    yield piece.message


def add_to_server(servicer: MergerServicer, server: grpc.aio.Server) -> None:
    """Registers every call of the contract."""
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Splice": grpc.unary_unary_rpc_method_handler(servicer.splice),
        "SpliceBatch": grpc.unary_unary_rpc_method_handler(servicer.splice_batch),
        "SpliceStream": grpc.stream_stream_rpc_method_handler(servicer.splice_stream),
        "Materialize": grpc.unary_stream_rpc_method_handler(
            servicer.materialize,
            request_deserializer=merger_pb2.MaterializeRequest.FromString,
        ),
    }
    generic = grpc.method_handlers_generic_handler(SERVICE_NAME, handlers)
    server.add_generic_rpc_handlers((generic,))
