"""The decode stream's messages: commands out, events in.

Owns the translation and the opening of the call. Never keeps state.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from dataclasses import dataclass

from baton.api.decode.v1 import decode_pb2, decode_pb2_grpc
from baton.client import ChannelPool
from baton.wire.durations import duration_from_proto, duration_to_proto
from baton.wire.errors import error_from_proto
from baton.wire.service_class import class_to_proto
from services.gateway.inbox import Failed, SequenceEvent, Started, Token, Waiting
from services.gateway.registry import WorkerRecord
from services.gateway.request import Tenant
from services.gateway.wire import (
    delta_from_proto,
    exactness_from_proto,
    label_message,
    usage_from_proto,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartCommand:
    """What a sequence asks of a decode worker. `start_s_max`: seconds until it must have begun."""

    request_id: str
    log_id: bytes
    generation: int
    capability: str
    next_index: int
    is_local_prefill: bool
    deadline_in_s: float
    traceparent: str | None
    tenant: Tenant
    start_s_max: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class StopCommand:
    """Ends a sequence."""

    request_id: str


Command = StartCommand | StopCommand


@dataclass(frozen=True, slots=True, kw_only=True)
class Addressed:
    """An event and the sequence it belongs to."""

    request_id: str
    event: SequenceEvent | Waiting


async def run_stream(
    channels: ChannelPool,
    worker: WorkerRecord,
    hello: tuple[str, int],
    commands: AsyncIterator[Command],
) -> AsyncIterator[list[Addressed]]:
    """Open the stream and yield each message's events; raises ServiceError when it breaks."""
    stub = decode_pb2_grpc.DecodeServiceStub(channels.get(worker.address))
    requests = _requests(worker, hello, commands)
    async for response in stub.Run(requests, timeout=math.inf):
        events = ((one.request_id, _event(one)) for one in response.events)
        yield [
            Addressed(request_id=request_id, event=event)
            for request_id, event in events
            if event is not None
        ]


async def _requests(
    worker: WorkerRecord, hello: tuple[str, int], commands: AsyncIterator[Command]
) -> AsyncIterator[decode_pb2.RunRequest]:
    yield decode_pb2.RunRequest(hello=decode_pb2.Hello(gateway_id=hello[0], incarnation=hello[1]))
    async for command in commands:
        if isinstance(command, StartCommand):
            yield decode_pb2.RunRequest(start=_start(command, worker))
        else:
            stop = decode_pb2.StopSequence(request_id=command.request_id)
            yield decode_pb2.RunRequest(stop=stop)


def _start(command: StartCommand, worker: WorkerRecord) -> decode_pb2.StartSequence:
    return decode_pb2.StartSequence(
        request_id=command.request_id,
        log_id=command.log_id,
        generation=command.generation,
        capability=command.capability,
        next_index=command.next_index,
        local_prefill=command.is_local_prefill,
        label=label_message(worker),
        deadline=duration_to_proto(max(command.deadline_in_s, 0.001)),
        traceparent=command.traceparent or "",
        tenant=command.tenant.name,
        service_class=class_to_proto(command.tenant.service_class),
        priority=command.tenant.priority,
        weight=command.tenant.weight,
    )


def _event(message: decode_pb2.SequenceEvent) -> SequenceEvent | Waiting | None:
    """The event; None for a kind that this version does not know."""
    kind = message.WhichOneof("event")
    if kind == "token":
        has_usage = message.HasField("usage")
        return Token(
            delta=delta_from_proto(message.token),
            usage=usage_from_proto(message.usage) if has_usage else None,
            stage_seconds=dict(message.stage_seconds),
        )
    if kind == "started":
        return _started(message.started)
    if kind == "waiting":
        return Waiting()
    if kind == "error":
        return Failed(error=error_from_proto(message.error))
    return None


def _started(message: decode_pb2.SequenceStarted) -> Started:
    has_prefill = message.HasField("prefill_compute")
    return Started(
        generation=message.generation,
        position=message.position,
        kv_transfer_s=duration_from_proto(message.kv_transfer),
        exactness=exactness_from_proto(message.exactness),
        prefill_compute_s=duration_from_proto(message.prefill_compute) if has_prefill else None,
        stage_seconds=dict(message.stage_seconds),
        total_s=duration_from_proto(message.total),
        transfer_bytes=message.transfer_bytes,
        transport=message.transport or None,
    )
