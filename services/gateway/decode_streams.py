"""One long-lived `Decode.Run` stream per decode worker, shared by all sequences there.

Owns the streams, their readers and which sequence an event belongs to. A reader never waits for a
client: it puts into bounded inboxes. A broken stream or a dead worker tells every sequence on it.
Never decides what happens then (that is `sequence`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

import structlog

from baton.api.decode.v1 import decode_pb2, decode_pb2_grpc
from baton.client import ChannelPool
from baton.clock import WaitingClock
from baton.errors import Reason, ServiceError
from baton.wire.durations import duration_from_proto, duration_to_proto
from baton.wire.errors import error_from_proto
from services.gateway.hub import WorkerHub
from services.gateway.inbox import Failed, Inbox, Lost, SequenceEvent, Started, Token
from services.gateway.registry import WorkerRecord
from services.gateway.wire import (
    delta_from_proto,
    exactness_from_proto,
    label_message,
    usage_from_proto,
)

_log = structlog.stdlib.get_logger("baton.gateway.decode_streams")

COMMANDS_MAX: Final = 1024
WATCH_INTERVAL_S: Final = 0.25

Spawn = Callable[[str, Coroutine[Any, Any, None]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartCommand:
    """What a sequence asks of a decode worker."""

    request_id: str
    log_id: bytes
    generation: int
    capability: str
    next_index: int
    is_local_prefill: bool
    deadline_in_s: float
    traceparent: str | None


class DecodeStream:
    """The stream to one run of one worker."""

    def __init__(self, worker: WorkerRecord, hello: decode_pb2.Hello, clock: WaitingClock) -> None:
        self.worker = worker
        self._hello = hello
        self._clock = clock
        self._inboxes: dict[str, Inbox] = {}
        self._commands: asyncio.Queue[decode_pb2.RunRequest] = asyncio.Queue(COMMANDS_MAX)
        self._closing = asyncio.Event()
        self._is_broken = False
        self.heard_s = clock.monotonic_s()

    @property
    def is_broken(self) -> bool:
        """True once it carries nothing any more."""
        return self._is_broken

    @property
    def sequences(self) -> int:
        """Sequences on this stream."""
        return len(self._inboxes)

    def start(self, command: StartCommand) -> Inbox:
        """Send a start and return where its events will come."""
        if self._is_broken:
            raise ServiceError(Reason.WORKER_LOST, "the stream to the decode worker broke")
        message = decode_pb2.StartSequence(
            request_id=command.request_id,
            log_id=command.log_id,
            generation=command.generation,
            capability=command.capability,
            next_index=command.next_index,
            local_prefill=command.is_local_prefill,
            label=label_message(self.worker),
            deadline=duration_to_proto(max(command.deadline_in_s, 0.001)),
            traceparent=command.traceparent or "",
        )
        self._send(decode_pb2.RunRequest(start=message))
        inbox = Inbox(self._clock)
        self._inboxes[command.request_id] = inbox
        return inbox

    def stop(self, request_id: str) -> None:
        """Tell the worker to stop a sequence and forget it; harmless when it is gone."""
        if self._inboxes.pop(request_id, None) is None or self._is_broken:
            return
        message = decode_pb2.StopSequence(request_id=request_id)
        try:
            self._send(decode_pb2.RunRequest(stop=message))
        except ServiceError as error:
            _log.warning("stop_not_sent", request_id=request_id, reason=error.reason.value)

    def forget(self, request_id: str) -> None:
        """A sequence has ended by itself."""
        self._inboxes.pop(request_id, None)

    def _send(self, message: decode_pb2.RunRequest) -> None:
        try:
            self._commands.put_nowait(message)
        except asyncio.QueueFull as error:
            raise ServiceError(
                Reason.QUEUE_FULL,
                f"{COMMANDS_MAX} commands wait for the decode worker",
                retry_after_s=1.0,
            ) from error

    def lose(self, why: str) -> None:
        """The worker counts as dead: every sequence hears it now."""
        self._is_broken = True
        self._closing.set()
        inboxes, self._inboxes = self._inboxes, {}
        for inbox in inboxes.values():
            inbox.put(Lost(why=why))

    async def run(self, stub: decode_pb2_grpc.DecodeServiceAsyncStub) -> None:
        """Read until the stream ends, however it ends; never raises but for a cancel."""
        why = "the decode worker ended the stream"
        try:
            async with asyncio.TaskGroup() as group:
                reading = group.create_task(self._read(stub))
                closing = group.create_task(self._closing.wait())
                await asyncio.wait((reading, closing), return_when=asyncio.FIRST_COMPLETED)
                reading.cancel()
                closing.cancel()
        except* ServiceError as errors:
            why = f"the stream to the decode worker broke: {errors.exceptions[0]}"
        finally:
            _log.info("decode_stream_closed", worker=self.worker.worker_id, why=why)
            self.lose(why)

    async def _read(self, stub: decode_pb2_grpc.DecodeServiceAsyncStub) -> None:
        call = stub.Run(self._requests(), timeout=math.inf)
        async for response in call:
            self.heard_s = self._clock.monotonic_s()
            for event in response.events:
                self._deliver(event)

    async def _requests(self) -> AsyncIterator[decode_pb2.RunRequest]:
        yield decode_pb2.RunRequest(hello=self._hello)
        while True:
            yield await self._commands.get()

    def _deliver(self, message: decode_pb2.SequenceEvent) -> None:
        inbox = self._inboxes.get(message.request_id)
        event = _event_from_proto(message)
        if inbox is None or event is None:
            return
        if not inbox.put(event):
            self.stop(message.request_id)
        elif inbox.is_closed:
            self.forget(message.request_id)


def _event_from_proto(message: decode_pb2.SequenceEvent) -> SequenceEvent | None:
    kind = message.WhichOneof("event")
    if kind == "token":
        has_usage = message.HasField("usage")
        return Token(
            delta=delta_from_proto(message.token),
            usage=usage_from_proto(message.usage) if has_usage else None,
        )
    if kind == "started":
        started = message.started
        has_prefill = started.HasField("prefill_compute")
        return Started(
            generation=started.generation,
            position=started.position,
            kv_transfer_s=duration_from_proto(started.kv_transfer),
            exactness=exactness_from_proto(started.exactness),
            prefill_compute_s=(
                duration_from_proto(started.prefill_compute) if has_prefill else None
            ),
        )
    if kind == "error":
        return Failed(error=error_from_proto(message.error))
    return None


class DecodeStreams:
    """All decode streams of this gateway."""

    def __init__(
        self,
        channels: ChannelPool,
        hub: WorkerHub,
        *,
        clock: WaitingClock,
        spawn: Spawn,
        hello: tuple[str, int],
    ) -> None:
        self._channels = channels
        self._hub = hub
        self._clock = clock
        self._spawn = spawn
        self._hello = decode_pb2.Hello(gateway_id=hello[0], incarnation=hello[1])
        self._streams: dict[str, DecodeStream] = {}

    def to(self, worker: WorkerRecord) -> DecodeStream:
        """The stream to this run of a worker, opened at first use."""
        stream = self._streams.get(worker.worker_id)
        if stream is not None and not stream.is_broken:
            if stream.worker.incarnation == worker.incarnation:
                return stream
            stream.lose("the decode worker restarted")
        stream = DecodeStream(worker, self._hello, self._clock)
        self._streams[worker.worker_id] = stream
        stub = decode_pb2_grpc.DecodeServiceStub(self._channels.get(worker.address))
        self._spawn(f"decode-stream-{worker.worker_id}", stream.run(stub))
        return stream

    def sequences_on(self, worker_id: str) -> int:
        """Sequences that this gateway has on a worker."""
        stream = self._streams.get(worker_id)
        return 0 if stream is None else stream.sequences

    async def watch(self) -> None:
        """Give up streams whose worker is dead: silent in the registry and on the stream."""
        for worker_id, stream in tuple(self._streams.items()):
            if stream.is_broken:
                del self._streams[worker_id]
                continue
            silence_s = self._clock.monotonic_s() - stream.heard_s
            is_alive = self._hub.is_alive(worker_id, stream.worker.incarnation)
            newest = self._hub.get(worker_id)
            if newest is not None and newest.incarnation != stream.worker.incarnation:
                stream.lose("the decode worker restarted")
            elif not is_alive and silence_s > self._hub.dead_after_s:
                stream.lose(f"the decode worker was silent for {silence_s:.1f} s")

    async def start(self) -> None:
        """Nothing: streams open at first use."""

    async def drain(self) -> None:
        """Nothing: running answers go on until their requests end."""

    async def stop(self) -> None:
        """Close every stream; their sequences hear it."""
        for stream in self._streams.values():
            stream.lose("the gateway is stopping")
        self._streams.clear()
