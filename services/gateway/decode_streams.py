"""One long-lived `Decode.Run` stream per decode worker, shared by all sequences there.

Owns the streams, their readers and which sequence an event belongs to. A reader never waits for a
client: it puts into bounded inboxes. A broken stream or a dead worker tells every sequence on it.
Never decides what happens then (that is `sequence`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Final

import structlog

from baton.client import ChannelPool
from baton.clock import WaitingClock
from baton.errors import Reason, ServiceError
from services.gateway.decode_wire import (
    Addressed,
    Command,
    StartCommand,
    StopCommand,
    run_stream,
)
from services.gateway.hub import WorkerHub
from services.gateway.inbox import Inbox, Lost
from services.gateway.registry import WorkerRecord

_log = structlog.stdlib.get_logger("baton.gateway.decode_streams")

COMMANDS_MAX: Final = 1024
WATCH_INTERVAL_S: Final = 0.25

Spawn = Callable[[str, Coroutine[Any, Any, None]], None]
OpenStream = Callable[[AsyncIterator[Command]], AsyncIterator[list[Addressed]]]


class DecodeStream:
    """The stream to one run of one worker."""

    def __init__(self, worker: WorkerRecord, clock: WaitingClock) -> None:
        self.worker = worker
        self.heard_s = clock.monotonic_s()
        self._clock = clock
        self._inboxes: dict[str, Inbox] = {}
        self._commands: asyncio.Queue[Command] = asyncio.Queue(COMMANDS_MAX)
        self._closing = asyncio.Event()
        self._is_broken = False

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
        self._send(command)
        inbox = Inbox(self._clock)
        self._inboxes[command.request_id] = inbox
        return inbox

    def stop(self, request_id: str) -> None:
        """Tell the worker to stop a sequence and forget it; harmless when it is gone."""
        if self._inboxes.pop(request_id, None) is None or self._is_broken:
            return
        try:
            self._send(StopCommand(request_id=request_id))
        except ServiceError as error:
            _log.warning("stop_not_sent", request_id=request_id, reason=error.reason.value)

    def forget(self, request_id: str) -> None:
        """A sequence has ended by itself."""
        self._inboxes.pop(request_id, None)

    def _send(self, command: Command) -> None:
        try:
            self._commands.put_nowait(command)
        except asyncio.QueueFull as error:
            raise ServiceError(
                Reason.QUEUE_FULL,
                f"{COMMANDS_MAX} commands wait for the decode worker",
                retry_after_s=1.0,
            ) from error

    def lose(self, why: str, since_s: float | None = None) -> None:
        """The worker counts as dead: every sequence hears it now.

        `since_s`: its last sign of life, when that is a while ago.
        """
        lost = Lost(why=why, since_s=self._clock.monotonic_s() if since_s is None else since_s)
        self._is_broken = True
        self._closing.set()
        inboxes, self._inboxes = self._inboxes, {}
        for inbox in inboxes.values():
            inbox.put(lost)

    async def run(self, opened: OpenStream) -> None:
        """Read until the stream ends, however it ends; never raises but for a cancel."""
        why = "the decode worker ended the stream"
        try:
            async with asyncio.TaskGroup() as group:
                reading = group.create_task(self._read(opened))
                closing = group.create_task(self._closing.wait())
                await asyncio.wait((reading, closing), return_when=asyncio.FIRST_COMPLETED)
                reading.cancel()
                closing.cancel()
        except* ServiceError as errors:
            why = f"the stream to the decode worker broke: {errors.exceptions[0]}"
        finally:
            _log.info("decode_stream_closed", worker=self.worker.worker_id, why=why)
            self.lose(why)

    async def _read(self, opened: OpenStream) -> None:
        async for events in opened(self._queued()):
            self.heard_s = self._clock.monotonic_s()
            for one in events:
                self._deliver(one)

    async def _queued(self) -> AsyncIterator[Command]:
        while True:
            yield await self._commands.get()

    def _deliver(self, one: Addressed) -> None:
        inbox = self._inboxes.get(one.request_id)
        if inbox is None:
            return
        if not inbox.put(one.event):
            self.stop(one.request_id)
        elif inbox.is_closed:
            self.forget(one.request_id)


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
        self._hello = hello
        self._streams: dict[str, DecodeStream] = {}

    def to(self, worker: WorkerRecord) -> DecodeStream:
        """The stream to this run of a worker, opened at first use."""
        stream = self._streams.get(worker.worker_id)
        if stream is not None and not stream.is_broken:
            if stream.worker.incarnation == worker.incarnation:
                return stream
            stream.lose("the decode worker restarted")
        stream = DecodeStream(worker, self._clock)
        self._streams[worker.worker_id] = stream

        def opened(commands: AsyncIterator[Command]) -> AsyncIterator[list[Addressed]]:
            return run_stream(self._channels, worker, self._hello, commands)

        self._spawn(f"decode-stream-{worker.worker_id}", stream.run(opened))
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
                heard_s = self._hub.heard_s(worker_id, stream.worker.incarnation) or 0.0
                stream.lose(
                    f"the decode worker was silent for {silence_s:.1f} s",
                    since_s=max(stream.heard_s, heard_s),
                )

    async def start(self) -> None:
        """Nothing: streams open at first use."""

    async def drain(self) -> None:
        """Nothing: running answers go on until their requests end."""

    async def stop(self) -> None:
        """Close every stream; their sequences hear it."""
        for stream in self._streams.values():
            stream.lose("the gateway is stopping")
        self._streams.clear()
