"""A worker's record as a message, and the one call that carries it.

Owns the translation and the call's deadline. Never decides when to beat.
"""

from __future__ import annotations

from typing import Final

from baton.api.common.v1 import common_pb2
from baton.api.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from baton.client import ChannelPool
from baton.heartbeat import Beat, Load, Record, Role
from baton.wire.label import label_to_proto

_ROLES: Final = {
    Role.PREFILL: common_pb2.WORKER_ROLE_PREFILL,
    Role.DECODE: common_pb2.WORKER_ROLE_DECODE,
    Role.KVSTORE: common_pb2.WORKER_ROLE_KVSTORE,
    Role.MERGER: common_pb2.WORKER_ROLE_MERGER,
}


def gateway_beats(
    pool: ChannelPool, addresses: tuple[str, ...], capability: str
) -> list[tuple[str, Beat]]:
    """One beat per gateway address, over the pool's channels."""
    return [(address, _beat(pool, address, capability)) for address in addresses]


def _beat(pool: ChannelPool, address: str, capability: str) -> Beat:
    stub = gateway_pb2_grpc.RegistryServiceStub(pool.get(address))

    async def beat(record: Record, timeout_s: float) -> str:
        request = gateway_pb2.HeartbeatRequest(
            worker=record_to_proto(record), capability=capability
        )
        answer = await stub.Heartbeat(request, timeout=timeout_s)
        return str(answer.gateway_id)

    return beat


def record_to_proto(record: Record) -> common_pb2.WorkerRecord:
    """The record as a message."""
    message = common_pb2.WorkerRecord(
        worker_id=record.worker_id,
        role=_ROLES[record.role],
        incarnation=record.incarnation,
        node_id=record.node_id,
        address=record.address,
        kvstore_address=record.kvstore_address,
        model=record.model,
        version=record.version,
        draining=record.is_draining,
        ready=record.is_ready,
        progress=record.progress,
        load=_load_to_proto(record.load),
        metrics_address=record.metrics_address,
        degraded=record.is_degraded,
        context_max=record.context_max,
    )
    if record.label is not None and record.geometry is not None:
        message.label.CopyFrom(label_to_proto(record.label, record.geometry, record.version))
    return message


def _load_to_proto(load: Load) -> common_pb2.WorkerLoad:
    return common_pb2.WorkerLoad(
        active=load.active,
        queued=load.queued,
        queued_tokens=load.queued_tokens,
        active_max=load.active_max,
        token_rate=load.token_rate,
        pages_free=load.pages_free,
        pages_total=load.pages_total,
        tpot_s=load.tpot_s,
        prefill_token_rate=load.prefill_token_rate,
        queue_max=load.queue_max,
    )
