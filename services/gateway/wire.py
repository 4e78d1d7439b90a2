"""Protobuf messages to the gateway's own words and back. The edge: decides nothing.

Owns the translation of worker records, token events, usage and the small enums; everything that the
library translates already stands in `baton.wire`.
"""

from __future__ import annotations

from typing import Final

from baton.api.common.v1 import common_pb2
from baton.errors import Reason, ServiceError
from baton.wire.finish import finish_from_proto, finish_to_proto
from baton.wire.label import label_from_proto
from services.gateway.events import (
    Exactness,
    FinishReason,
    KvSource,
    Logprob,
    TokenDelta,
    TokenUsage,
)
from services.gateway.registry import WorkerLoad, WorkerRecord, WorkerRole
from services.gateway.request import CacheMode

WORKER_TEXT_CHARS_MAX: Final = 256

_ROLES: Final = {
    common_pb2.WORKER_ROLE_PREFILL: WorkerRole.PREFILL,
    common_pb2.WORKER_ROLE_DECODE: WorkerRole.DECODE,
    common_pb2.WORKER_ROLE_KVSTORE: WorkerRole.KVSTORE,
    common_pb2.WORKER_ROLE_MERGER: WorkerRole.MERGER,
}
_ROLES_TO_PROTO: Final = {role: number for number, role in _ROLES.items()}
_EXACTNESS: Final = {
    common_pb2.EXACTNESS_CLASS_EXACT: Exactness.EXACT,
    common_pb2.EXACTNESS_CLASS_EQUIVALENT: Exactness.EQUIVALENT,
    common_pb2.EXACTNESS_CLASS_APPROXIMATE: Exactness.APPROXIMATE,
}
_EXACTNESS_TO_PROTO: Final = {word: number for number, word in _EXACTNESS.items()}
_KV_SOURCE_TO_PROTO: Final = {
    KvSource.LOCAL: common_pb2.KV_SOURCE_LOCAL,
    KvSource.REMOTE: common_pb2.KV_SOURCE_REMOTE,
    KvSource.RECOMPUTED: common_pb2.KV_SOURCE_RECOMPUTED,
}


def exactness_from_proto(value: common_pb2.ExactnessClass.ValueType) -> Exactness:
    """The class; a worker that states none promises only `equivalent`."""
    return _EXACTNESS.get(value, Exactness.EQUIVALENT)


def exactness_to_proto(word: Exactness) -> common_pb2.ExactnessClass.ValueType:
    """The enum value."""
    return _EXACTNESS_TO_PROTO[word]


def kv_source_to_proto(word: KvSource) -> common_pb2.KvSource.ValueType:
    """The enum value."""
    return _KV_SOURCE_TO_PROTO[word]


def cache_mode_from_proto(value: common_pb2.CacheMode.ValueType) -> CacheMode:
    """The mode; unspecified reads and fills."""
    return CacheMode.OFF if value == common_pb2.CACHE_MODE_OFF else CacheMode.READ_WRITE


def cache_mode_to_proto(mode: CacheMode) -> common_pb2.CacheMode.ValueType:
    """The enum value."""
    if mode is CacheMode.OFF:
        return common_pb2.CACHE_MODE_OFF
    return common_pb2.CACHE_MODE_READ_WRITE


def logprob_from_proto(message: common_pb2.TokenLogprob) -> Logprob:
    """A token's log probability with its alternatives."""
    return Logprob(
        token_id=message.token_id,
        logprob=message.logprob,
        token_bytes=message.token_bytes,
        top=tuple(
            Logprob(token_id=one.token_id, logprob=one.logprob, token_bytes=one.token_bytes)
            for one in message.top
        ),
    )


def logprob_to_proto(logprob: Logprob) -> common_pb2.TokenLogprob:
    """The message."""
    return common_pb2.TokenLogprob(
        token_id=logprob.token_id,
        logprob=logprob.logprob,
        token_bytes=logprob.token_bytes,
        top=[logprob_to_proto(one) for one in logprob.top],
    )


def delta_from_proto(message: common_pb2.TokenEvent) -> TokenDelta:
    """One token of an answer."""
    finish = finish_from_proto(message.finish_reason)
    return TokenDelta(
        index=message.index,
        token_id=message.token_id,
        text=message.text,
        logprob=logprob_from_proto(message.logprob) if message.HasField("logprob") else None,
        finish=None if finish is None else FinishReason(finish),
        stop_string=message.stop_string or None,
    )


def delta_to_proto(delta: TokenDelta) -> common_pb2.TokenEvent:
    """The message."""
    event = common_pb2.TokenEvent(
        index=delta.index,
        token_id=delta.token_id,
        text=delta.text,
        finish_reason=finish_to_proto(delta.finish),
        stop_string=delta.stop_string or "",
    )
    if delta.logprob is not None:
        event.logprob.CopyFrom(logprob_to_proto(delta.logprob))
    return event


def usage_from_proto(message: common_pb2.Usage) -> TokenUsage:
    """Token counts."""
    return TokenUsage(
        prompt_tokens=message.prompt_tokens,
        cached_tokens=message.cached_tokens,
        completion_tokens=message.completion_tokens,
    )


def usage_to_proto(usage: TokenUsage) -> common_pb2.Usage:
    """The message."""
    return common_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
    )


def record_from_proto(message: common_pb2.WorkerRecord) -> WorkerRecord:
    """A worker's record; raises INVALID_REQUEST naming what is missing or too long."""
    for name in ("worker_id", "address"):
        if not getattr(message, name):
            raise _refused(name, "must not be empty")
    for name in ("worker_id", "address", "node_id", "kvstore_address", "model", "version"):
        if len(getattr(message, name)) > WORKER_TEXT_CHARS_MAX:
            raise _refused(name, f"may have at most {WORKER_TEXT_CHARS_MAX} characters")
    role = _ROLES.get(message.role)
    if role is None:
        raise _refused("role", f"has the unknown value {message.role}")
    if role in (WorkerRole.PREFILL, WorkerRole.DECODE) and not message.HasField("label"):
        raise _refused("label", "is missing; prefill and decode workers state it")
    has_label = message.HasField("label")
    return WorkerRecord(
        worker_id=message.worker_id,
        role=role,
        incarnation=message.incarnation,
        node_id=message.node_id,
        address=message.address,
        kvstore_address=message.kvstore_address,
        model=message.model,
        label=label_from_proto(message.label) if has_label else None,
        label_bytes=message.label.SerializeToString() if has_label else b"",
        version=message.version,
        is_draining=message.draining,
        is_ready=message.ready,
        progress=message.progress,
        load=_load_from_proto(message.load),
        metrics_address=message.metrics_address,
        is_degraded=message.degraded,
        context_max=message.context_max,
    )


def _load_from_proto(message: common_pb2.WorkerLoad) -> WorkerLoad:
    return WorkerLoad(
        active=message.active,
        queued=message.queued,
        queued_tokens=message.queued_tokens,
        active_max=message.active_max,
        token_rate=_measured(message.token_rate),
        pages_free=message.pages_free,
        pages_total=message.pages_total,
        tpot_s=_measured(message.tpot_s),
        prefill_token_rate=_measured(message.prefill_token_rate),
        queue_max=message.queue_max if message.HasField("queue_max") else None,
    )


def _measured(number: float) -> float | None:
    """A measurement of a heartbeat; what is not positive was not measured."""
    return number if number > 0.0 else None


def record_to_proto(record: WorkerRecord) -> common_pb2.WorkerRecord:
    """The message, as ListWorkers shows it."""
    load = record.load
    message = common_pb2.WorkerRecord(
        worker_id=record.worker_id,
        role=_ROLES_TO_PROTO[record.role],
        incarnation=record.incarnation,
        node_id=record.node_id,
        address=record.address,
        kvstore_address=record.kvstore_address,
        model=record.model,
        version=record.version,
        draining=record.is_draining,
        ready=record.is_ready,
        progress=record.progress,
        load=common_pb2.WorkerLoad(
            active=load.active,
            queued=load.queued,
            queued_tokens=load.queued_tokens,
            active_max=load.active_max,
            token_rate=load.token_rate or 0.0,
            pages_free=load.pages_free,
            pages_total=load.pages_total,
            tpot_s=load.tpot_s or 0.0,
            prefill_token_rate=load.prefill_token_rate or 0.0,
            queue_max=load.queue_max,
        ),
        metrics_address=record.metrics_address,
        degraded=record.is_degraded,
        context_max=record.context_max,
    )
    if record.label_bytes:
        message.label.CopyFrom(label_message(record))
    return message


def label_message(record: WorkerRecord) -> common_pb2.PairLabel:
    """A worker's label as it sent it, geometry and version included."""
    return common_pb2.PairLabel.FromString(record.label_bytes)


def _refused(name: str, remedy: str) -> ServiceError:
    return ServiceError(Reason.INVALID_REQUEST, f"worker.{name} {remedy}", field=f"worker.{name}")
