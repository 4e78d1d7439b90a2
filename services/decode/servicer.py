"""The decode service on the wire: commands to orders, events to messages.

Owns the translation, the checks of a request's form and one stream per gateway. Never computes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc
import structlog

from baton.api.decode.v1 import decode_pb2, decode_pb2_grpc
from baton.arena.replay import HeldLog
from baton.errors import Reason, ServiceError
from baton.ids import LOG_ID_BYTES
from baton.kv.label import require_match
from baton.wire.durations import duration_from_proto, duration_to_proto
from baton.wire.errors import error_to_proto
from baton.wire.label import label_from_proto
from baton.worker.claims_wire import Asked, claim_of
from baton.worker.draining import Draining
from baton.worker.engine import WorkerParts
from baton.worker.failures import first_failure
from baton.worker.wire_events import exactness_to_proto, token_to_proto, usage_to_proto
from services.decode.events import (
    Failed,
    Produced,
    Reservation,
    SequenceEvent,
    Started,
    StartOrder,
    Waiting,
)
from services.decode.outbox import Outbox
from services.decode.runner import Runner

HOLD_DEFAULT_S: Final = 30.0
NAME_CHARS_MAX: Final = 256

_Context = grpc.aio.ServicerContext[Any, Any]
_Commands = AsyncIterator[decode_pb2.RunRequest]

_log = structlog.stdlib.get_logger("baton.decode")


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """Implements DecodeService over one runner."""

    def __init__(self, runner: Runner, parts: WorkerParts, draining: Draining) -> None:
        self._runner = runner
        self._draining = draining
        self._parts = parts
        self._tokenizer = parts.tokenizer

    async def Prepare(
        self, request: decode_pb2.PrepareRequest, context: _Context
    ) -> decode_pb2.PrepareResponse:
        """Reserves a slot for a sequence that is being prefilled."""
        _check_name(request.request_id, "request_id")
        if request.HasField("label"):
            require_match(self._parts.label, label_from_proto(request.label))
        hold_s = duration_from_proto(request.hold) if request.HasField("hold") else HOLD_DEFAULT_S
        place = Reservation(
            request_id=request.request_id,
            total_tokens=request.prompt_tokens + 1,
            hold_s=hold_s,
            tenant=request.tenant[:NAME_CHARS_MAX],
        )
        active = self._runner.prepare(place)
        return decode_pb2.PrepareResponse(active=active)

    # A coroutine that writes, not a generator: events come while the command side still reads.
    async def Run(  # type: ignore[override]
        self, request_iterator: _Commands, context: _Context
    ) -> None:
        """One gateway's stream: commands in, many sequences' events out, one message a step."""
        commands = aiter(request_iterator)
        gateway_id = await _hello(commands)
        outbox = Outbox(gateway_id)
        _log.info("gateway_stream_opened", gateway_id=gateway_id)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._write(outbox, context))
                async for command in commands:
                    self._obey(command, outbox)
                # Half-closed: what was started over this stream is still told to its end.
                outbox.close_when_told()
        except* ServiceError as failures:
            raise first_failure(failures) from None
        finally:
            outbox.close()
            _log.info("gateway_stream_closed", gateway_id=gateway_id)

    async def Cancel(
        self, request: decode_pb2.CancelRequest, context: _Context
    ) -> decode_pb2.CancelResponse:
        """Stops a sequence between two steps."""
        return decode_pb2.CancelResponse(found=self._runner.cancel(request.request_id))

    async def Drain(
        self, request: decode_pb2.DrainRequest, context: _Context
    ) -> decode_pb2.DrainResponse:
        """Takes no new sequences, waits for those that run to move or to end, and then ends the
        process.
        """
        timeout_s = duration_from_proto(request.timeout)
        remaining = await self._draining.by_call(timeout_s, request.capability)
        return decode_pb2.DrainResponse(remaining=remaining)

    def _obey(self, command: decode_pb2.RunRequest, outbox: Outbox) -> None:
        """One command of an open stream; a malformed one ends only its own sequence."""
        match command.WhichOneof("command"):
            case "start":
                request_id = command.start.request_id
                _check_name(request_id, "start.request_id")
                outbox.expect(request_id)
                try:
                    self._runner.start(_order(command.start), outbox)
                except ServiceError as error:
                    outbox.post(SequenceEvent(request_id=request_id, what=Failed(error=error)))
            case "stop":
                self._runner.cancel(command.stop.request_id)
            case _:
                raise ServiceError(
                    Reason.INVALID_REQUEST,
                    "after hello a stream carries start and stop commands only",
                    field="command",
                )

    async def _write(self, outbox: Outbox, context: _Context) -> None:
        """Everything that was posted since the last message goes into the next one."""
        while events := await outbox.take():
            messages = [self._event(event) for event in events]
            await context.write(decode_pb2.RunResponse(events=messages))

    def _event(self, event: SequenceEvent) -> decode_pb2.SequenceEvent:
        message = decode_pb2.SequenceEvent(request_id=event.request_id)
        what = event.what
        if isinstance(what, Started):
            message.started.CopyFrom(_started(what))
        elif isinstance(what, Waiting):
            message.waiting.waiting = what.waiting
            message.waiting.preempted = what.is_preempted
        elif isinstance(what, Produced):
            message.token.CopyFrom(token_to_proto(what.token, self._tokenizer))
            message.stage_seconds.update(what.stage_seconds)
            if what.usage is not None:
                message.usage.CopyFrom(
                    usage_to_proto(
                        prompt_tokens=what.usage.prompt_tokens,
                        cached_tokens=what.usage.cached_tokens,
                        completion_tokens=what.usage.completion_tokens,
                    )
                )
        else:
            message.error.CopyFrom(error_to_proto(what.error))
        return message


async def _hello(commands: AsyncIterator[decode_pb2.RunRequest]) -> str:
    """The gateway's name, which the first message must give."""
    first = await anext(commands, None)
    if first is None or first.WhichOneof("command") != "hello":
        raise ServiceError(
            Reason.INVALID_REQUEST, "the first message of a stream is hello", field="hello"
        )
    _check_name(first.hello.gateway_id, "hello.gateway_id")
    return first.hello.gateway_id


def _order(start: decode_pb2.StartSequence) -> StartOrder:
    if len(start.log_id) != LOG_ID_BYTES:
        raise ServiceError(
            Reason.INVALID_REQUEST, f"log_id must be {LOG_ID_BYTES} bytes", field="start.log_id"
        )
    claim = claim_of(
        Asked(
            request_id=start.request_id,
            capability=start.capability,
            tenant=start.tenant,
            service_class=start.service_class,
            priority=start.priority,
            weight=start.weight,
            at="start.",
        )
    )
    return StartOrder(
        claim=claim,
        log=HeldLog(log_id=start.log_id, generation=start.generation),
        capability=start.capability,
        next_index=start.next_index,
        is_local_prefill=start.local_prefill,
        label=label_from_proto(start.label) if start.HasField("label") else None,
        deadline_s=duration_from_proto(start.deadline) if start.HasField("deadline") else None,
        traceparent=start.traceparent or None,
    )


def _started(started: Started) -> decode_pb2.SequenceStarted:
    message = decode_pb2.SequenceStarted(
        generation=started.generation,
        position=started.position,
        kv_transfer=duration_to_proto(started.kv_transfer_s),
        exactness=exactness_to_proto(started.exactness),
        stage_seconds=dict(started.stage_seconds),
        total=duration_to_proto(started.total_s),
        transfer_bytes=started.transfer_bytes,
        transport=started.transport or "",
    )
    if started.prefill_compute_s is not None:
        message.prefill_compute.CopyFrom(duration_to_proto(started.prefill_compute_s))
    return message


def _check_name(text: str, field: str) -> None:
    if not 0 < len(text) <= NAME_CHARS_MAX:
        raise ServiceError(
            Reason.INVALID_REQUEST,
            f"{field} must have 1 to {NAME_CHARS_MAX} characters",
            field=field,
        )
