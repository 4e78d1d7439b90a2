"""The prefill service on the wire: messages to orders, outcomes to messages.

Owns the translation and the checks of a request's form. Never computes.
"""

from __future__ import annotations

from typing import Any, Final

import grpc

from baton.api.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from baton.arena.replay import HeldLog
from baton.errors import Reason, ServiceError
from baton.ids import LOG_ID_BYTES
from baton.text.stream import TokenBytes
from baton.wire.durations import duration_from_proto, duration_to_proto
from baton.wire.label import label_from_proto
from baton.worker.chunker import Chunk
from baton.worker.claims_wire import Asked, claim_of
from baton.worker.draining import Draining
from baton.worker.wire_events import exactness_to_proto, token_to_proto, usage_to_proto
from services.prefill.pipeline import Pipeline, RunOrder, SealedRun

REQUEST_ID_CHARS_MAX: Final = 256

_Context = grpc.aio.ServicerContext[Any, Any]


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """Implements PrefillService over one pipeline."""

    def __init__(self, pipeline: Pipeline, tokenizer: TokenBytes, draining: Draining) -> None:
        self._pipeline = pipeline
        self._draining = draining
        self._tokenizer = tokenizer

    # A coroutine that writes, not a generator: a chunk is told from inside the run's own task.
    async def Run(  # type: ignore[override]
        self, request: prefill_pb2.RunRequest, context: _Context
    ) -> None:
        """Runs an opened log's prompt; chunks as they are committed, then `sealed`."""

        async def committed(chunk: Chunk) -> None:
            await context.write(
                prefill_pb2.RunResponse(
                    chunk_committed=prefill_pb2.ChunkCommitted(
                        from_position=chunk.first, to_position=chunk.end
                    )
                )
            )

        sealed = await self._pipeline.run(_order(request), committed)
        await context.write(prefill_pb2.RunResponse(sealed=self._sealed(sealed)))

    async def Cancel(
        self, request: prefill_pb2.CancelRequest, context: _Context
    ) -> prefill_pb2.CancelResponse:
        """Stops a run between two layers."""
        return prefill_pb2.CancelResponse(found=self._pipeline.cancel(request.request_id))

    async def Drain(
        self, request: prefill_pb2.DrainRequest, context: _Context
    ) -> prefill_pb2.DrainResponse:
        """Takes no new runs, waits for those under way, then ends the process."""
        timeout_s = duration_from_proto(request.timeout)
        remaining = await self._draining.by_call(timeout_s, request.capability)
        return prefill_pb2.DrainResponse(remaining=remaining)

    def _sealed(self, sealed: SealedRun) -> prefill_pb2.Sealed:
        message = prefill_pb2.Sealed(
            usage=usage_to_proto(
                prompt_tokens=sealed.prompt_tokens,
                cached_tokens=sealed.cached_tokens,
                completion_tokens=0 if sealed.first_token is None else 1,
            ),
            exactness=exactness_to_proto(sealed.exactness),
            queue_wait=duration_to_proto(sealed.queue_wait_s),
            prefill_compute=duration_to_proto(sealed.compute_s),
            kv_pack=duration_to_proto(sealed.pack_s),
            stage_seconds=dict(sealed.stage_seconds),
            total=duration_to_proto(sealed.total_s),
        )
        if sealed.first_token is not None:
            message.first_token.CopyFrom(token_to_proto(sealed.first_token, self._tokenizer))
        return message


def _order(request: prefill_pb2.RunRequest) -> RunOrder:
    if not 0 < len(request.request_id) <= REQUEST_ID_CHARS_MAX:
        raise ServiceError(
            Reason.INVALID_REQUEST,
            f"request_id must have 1 to {REQUEST_ID_CHARS_MAX} characters",
            field="request_id",
        )
    if len(request.log_id) != LOG_ID_BYTES:
        raise ServiceError(
            Reason.INVALID_REQUEST, f"log_id must be {LOG_ID_BYTES} bytes", field="log_id"
        )
    claim = claim_of(
        Asked(
            request_id=request.request_id,
            capability=request.capability,
            tenant=request.tenant,
            service_class=request.service_class,
            priority=request.priority,
            weight=request.weight,
        )
    )
    return RunOrder(
        claim=claim,
        log=HeldLog(log_id=request.log_id, generation=request.generation),
        capability=request.capability,
        label=label_from_proto(request.label) if request.HasField("label") else None,
        kv_only=request.kv_only,
    )
