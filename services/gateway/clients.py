"""Calls to kvstores, prefill workers, decode workers and mergers, in the gateway's own words.

Owns the stubs and every call's deadline. Never retries and never decides: it raises the peer's
ServiceError. `_pb2` stops here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from baton.api.common.v1 import common_pb2
from baton.api.decode.v1 import decode_pb2, decode_pb2_grpc
from baton.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from baton.api.merger.v1 import merger_pb2, merger_pb2_grpc
from baton.api.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from baton.client import ChannelPool
from baton.errors import Reason, ServiceError
from baton.kv.digests import body_hash
from baton.kv.manifest import Manifest, Segment
from baton.wire.durations import duration_from_proto, duration_to_proto
from baton.wire.finish import finish_from_proto
from baton.wire.sampling import sampling_to_proto
from baton.wire.segments import manifest_from_proto, manifest_to_proto, segment_to_proto
from baton.wire.service_class import class_to_proto
from services.gateway.events import Exactness, TokenDelta, TokenUsage
from services.gateway.legs import Leg
from services.gateway.registry import WorkerRecord
from services.gateway.request import CacheMode, SequenceRequest
from services.gateway.wire import (
    cache_mode_to_proto,
    delta_from_proto,
    exactness_from_proto,
    label_message,
    usage_from_proto,
)

OPEN_TIMEOUT_S: Final = 10.0
CONTROL_TIMEOUT_S: Final = 2.0
SPLICE_TIMEOUT_S: Final = 0.5
PREPARE_HOLD_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The store's answer to Open: the truth about reuse."""

    generation: int
    cached_tokens: int
    prefix_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogState:
    """Where a log stands."""

    generation: int
    position: int
    prompt_tokens: int
    is_sealed: bool
    is_finished: bool
    history_end: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """The end of a prefill: the first token (None when only KV was wanted) and what it took."""

    first: TokenDelta | None
    usage: TokenUsage
    exactness: Exactness
    queue_wait_s: float
    prefill_compute_s: float
    kv_pack_s: float
    stage_seconds: Mapping[str, float] = field(default_factory=dict, hash=False)
    total_s: float = 0.0


class StoreClient:
    """Calls to kvstores; each names the store's address."""

    def __init__(self, channels: ChannelPool) -> None:
        self._channels = channels

    @property
    def channels(self) -> ChannelPool:
        """The channels that calls go over."""
        return self._channels

    def stub(self, address: str) -> kvstore_pb2_grpc.KVStoreServiceAsyncStub:
        """The stub of one store."""
        return kvstore_pb2_grpc.KVStoreServiceStub(self._channels.get(address))

    async def open(self, leg: Leg, *, base: Manifest | None = None) -> Opened:
        """Open a log for the plan's writer, from `base` if one is given."""
        request, plan = leg.request, leg.plan
        message = kvstore_pb2.OpenRequest(
            request_id=request.request_id,
            log_id=leg.log_id,
            capability=leg.control,
            label=label_message(plan.writer),
            writer_worker_id=plan.writer.worker_id,
            sampling=sampling_to_proto(request.sampling),
            prompt_token_ids=request.prompt.token_ids,
            manifest=None if base is None else manifest_to_proto(base),
            parent=_parent(leg) if base is None else None,
            cache_mode=cache_mode_to_proto(request.cache_mode),
            cache_salt=request.cache_salt or "",
            output_pages=1,
            drop_at_end=request.is_dropped_at_end,
            ttl=None if request.ttl_s is None else duration_to_proto(request.ttl_s),
        )
        message.body_hash = body_hash(_retryable_body(message))
        # Measured, so no part of what a retry repeats.
        message.compute_tokens_per_s = plan.writer.prompt_token_rate or 0.0
        try:
            answer = await self.stub(plan.kvstore_address).Open(message, timeout=OPEN_TIMEOUT_S)
        except ServiceError as error:
            raise _in_callers_words(_unanswered(error), request.prompt_field) from error
        return Opened(
            generation=answer.generation,
            cached_tokens=answer.cached_tokens,
            prefix_id=answer.prefix_id or None,
        )

    async def cancel(self, address: str, log_id: bytes, capability: str) -> None:
        """Fence a log."""
        message = kvstore_pb2.CancelRequest(log_id=log_id, capability=capability)
        await self.stub(address).Cancel(message, timeout=CONTROL_TIMEOUT_S)

    async def close(self, address: str, log_id: bytes, capability: str, *, drop: bool) -> None:
        """End a log; dropped at once or kept until its TTL."""
        message = kvstore_pb2.CloseRequest(log_id=log_id, capability=capability, drop=drop)
        await self.stub(address).Close(message, timeout=CONTROL_TIMEOUT_S)

    async def describe(self, address: str, log_id: bytes, capability: str) -> LogState:
        """Where a log stands now."""
        message = kvstore_pb2.DescribeLogRequest(log_id=log_id, capability=capability)
        answer = await self.stub(address).DescribeLog(message, timeout=CONTROL_TIMEOUT_S)
        return LogState(
            generation=answer.head.generation,
            position=answer.head.position,
            prompt_tokens=answer.head.prompt_tokens,
            is_sealed=answer.head.sealed,
            is_finished=finish_from_proto(answer.head.finish_reason) is not None,
            history_end=answer.history_end,
        )


def _parent(leg: Leg) -> common_pb2.LogPosition | None:
    """The log to begin from, where it stands at the plan's store and KV is to be taken over."""
    parent = leg.request.parent
    if parent is None or parent.address != leg.plan.kvstore_address:
        return None
    if leg.request.cache_mode is CacheMode.OFF:
        return None
    return common_pb2.LogPosition(log_id=parent.log_id, position=parent.position)


def _retryable_body(message: kvstore_pb2.OpenRequest) -> bytes:
    """What makes two Opens the same request: everything but the capability's expiry."""
    body = kvstore_pb2.OpenRequest()
    body.CopyFrom(message)
    body.capability = ""
    return bytes(body.SerializeToString(deterministic=True))


def _is_transport(error: ServiceError) -> bool:
    """The peer did not say it: gRPC did, because nobody answered."""
    is_silence = error.reason in (Reason.WORKER_LOST, Reason.DEADLINE_EXCEEDED)
    return is_silence and "grpc_code" in error.metadata


def _unanswered(error: ServiceError) -> ServiceError:
    """The same refusal; of a store that did not answer, without its address."""
    if not _is_transport(error):
        return error
    return ServiceError(
        Reason.WORKER_LOST, "the kvstore did not answer; try again shortly", retry_after_s=1.0
    )


def _in_callers_words(error: ServiceError, prompt_field: str) -> ServiceError:
    """A store's refusal of the prompt names what the caller sent, not what we made of it."""
    if error.field != "prompt_token_ids":
        return error
    return ServiceError(
        error.reason,
        error.message,
        field=prompt_field,
        metadata=error.metadata,
        retry_after_s=error.retry_after_s,
    )


def _blamed(error: ServiceError, worker: WorkerRecord) -> ServiceError:
    """The same refusal, naming the worker; one that did not answer counts as lost."""
    named = {"worker": worker.worker_id}
    if _is_transport(error):
        return ServiceError(
            Reason.WORKER_LOST,
            f"the {worker.role.value} worker was lost; try again shortly",
            metadata=named,
            retry_after_s=1.0,
        )
    if error.reason is Reason.QUEUE_FULL or error.reason is Reason.DRAINING:
        return ServiceError(
            error.reason,
            error.message,
            field=error.field,
            metadata={**error.metadata, **named},
            retry_after_s=error.retry_after_s,
        )
    return error


class PrefillClient:
    """Calls to prefill workers."""

    def __init__(self, channels: ChannelPool) -> None:
        self._channels = channels

    def _stub(self, address: str) -> prefill_pb2_grpc.PrefillServiceAsyncStub:
        return prefill_pb2_grpc.PrefillServiceStub(self._channels.get(address))

    async def run(
        self, leg: Leg, capability: str, *, timeout_s: float, kv_only: bool = False
    ) -> Sealed:
        """Run a log's prefill to its seal. WORKER_LOST when the stream ends without it."""
        worker, tenant = leg.plan.writer, leg.request.tenant
        message = prefill_pb2.RunRequest(
            request_id=leg.request.request_id,
            log_id=leg.log_id,
            generation=leg.generation,
            capability=capability,
            label=label_message(worker),
            kv_only=kv_only,
            tenant=tenant.name,
            service_class=class_to_proto(tenant.service_class),
            priority=tenant.priority,
            weight=tenant.weight,
        )
        call = self._stub(worker.address).Run(message, timeout=timeout_s)
        try:
            async for response in call:
                if response.WhichOneof("event") == "sealed":
                    return _sealed(response.sealed)
        except ServiceError as error:
            raise _blamed(error, worker) from error
        raise ServiceError(
            Reason.WORKER_LOST,
            "the prefill worker's stream ended before the log was sealed",
            metadata={"worker": worker.worker_id},
        )

    async def cancel(self, worker: WorkerRecord, request_id: str, capability: str) -> None:
        """Stop a run between two layers."""
        message = prefill_pb2.CancelRequest(request_id=request_id, capability=capability)
        await self._stub(worker.address).Cancel(message, timeout=CONTROL_TIMEOUT_S)


def _sealed(message: prefill_pb2.Sealed) -> Sealed:
    has_first = message.HasField("first_token")
    return Sealed(
        first=delta_from_proto(message.first_token) if has_first else None,
        usage=usage_from_proto(message.usage),
        exactness=exactness_from_proto(message.exactness),
        queue_wait_s=duration_from_proto(message.queue_wait),
        prefill_compute_s=duration_from_proto(message.prefill_compute),
        kv_pack_s=duration_from_proto(message.kv_pack),
        stage_seconds=dict(message.stage_seconds),
        total_s=duration_from_proto(message.total),
    )


class DecodeClient:
    """Unary calls to decode workers; the token stream stands in `decode_streams`."""

    def __init__(self, channels: ChannelPool) -> None:
        self._channels = channels

    def _stub(self, address: str) -> decode_pb2_grpc.DecodeServiceAsyncStub:
        return decode_pb2_grpc.DecodeServiceStub(self._channels.get(address))

    async def prepare(self, worker: WorkerRecord, request: SequenceRequest) -> None:
        """Reserve a slot; raises QUEUE_FULL and the like when refused."""
        message = decode_pb2.PrepareRequest(
            request_id=request.request_id,
            prompt_tokens=len(request.prompt.token_ids),
            max_tokens=request.sampling.max_tokens or 0,
            label=label_message(worker),
            hold=duration_to_proto(PREPARE_HOLD_S),
            tenant=request.tenant.name,
        )
        try:
            await self._stub(worker.address).Prepare(message, timeout=CONTROL_TIMEOUT_S)
        except ServiceError as error:
            raise _blamed(error, worker) from error

    async def cancel(self, worker: WorkerRecord, request_id: str, capability: str) -> None:
        """Stop a sequence between two steps."""
        message = decode_pb2.CancelRequest(request_id=request_id, capability=capability)
        await self._stub(worker.address).Cancel(message, timeout=CONTROL_TIMEOUT_S)


class MergerClient:
    """Calls to mergers."""

    def __init__(self, channels: ChannelPool) -> None:
        self._channels = channels

    async def splice(
        self,
        address: str,
        request_id: str,
        segments: Sequence[Segment],
        hashes: Sequence[tuple[bytes, bytes]],
    ) -> Manifest:
        """Splice segments; `hashes` are the (text, ids) hashes of those that have them."""
        stub = merger_pb2_grpc.MergerServiceStub(self._channels.get(address))
        message = merger_pb2.SpliceRequest(
            request_id=request_id,
            segments=[_segment(segment) for segment in segments],
            block_tokens=segments[0].block_tokens,
            expected_text_hashes=[text for text, _ in hashes],
            expected_ids_hashes=[ids for _, ids in hashes],
        )
        answer = await stub.Splice(message, timeout=SPLICE_TIMEOUT_S)
        return manifest_from_proto(answer.manifest)


def _segment(segment: Segment) -> common_pb2.Segment:
    return segment_to_proto(segment)
