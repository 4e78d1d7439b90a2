"""One long-lived `Decode.Run` stream per decode worker, shared by all sequences there.

Owns the streams, their readers and which sequence an event belongs to. A reader never waits for a
client: it puts into bounded inboxes. A broken stream or a dead worker tells every sequence on it,
and the worker gets no new work until it is heard again; so does each heartbeat that says draining.
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
        self._opened_s = clock.monotonic_s()
        self._heard_s: float | None = None
        self._clock = clock
        self._inboxes: dict[str, Inbox] = {}
        self._commands: asyncio.Queue[Command] = asyncio.Queue(COMMANDS_MAX)
        self._closing = asyncio.Event()
        self._is_broken = False

    @property
    def heard_s(self) -> float:
        """When it last carried something, or was opened."""
        return self._opened_s if self._heard_s is None else self._heard_s

    def alive_s(self, beat_s: float | None) -> float:
        """The worker's last sign of life, its last heartbeat included."""
        signs = [sign for sign in (self._heard_s, beat_s) if sign is not None]
        return max(signs, default=self._opened_s)

    @property
    def is_broken(self) -> bool:
        """True once it carries nothing any more."""
        return self._is_broken

    def start(self, command: StartCommand) -> Inbox:
        """Send a start and return where its events will come."""
        if self._is_broken:
            raise ServiceError(Reason.WORKER_LOST, "the stream to the decode worker broke")
        self._send(command)
        inbox = Inbox(self._clock, start_s_max=command.start_s_max)
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

    def lose_overdue(self) -> None:
        """Sequences that a living worker says nothing of any more go on without it."""
        for request_id, inbox in tuple(self._inboxes.items()):
            if inbox.is_overdue:
                now_s = self._clock.monotonic_s()
                inbox.put(Lost(why="the worker said nothing of this sequence", since_s=now_s))
                self.stop(request_id)

    def announce_leaving(self) -> None:
        """The worker drains: every sequence hears it, and may move."""
        for inbox in self._inboxes.values():
            inbox.leave()

    def lose(self, why: str, since_s: float | None = None, *, is_cut: bool = False) -> None:
        """The worker counts as dead, or as out of reach: every sequence hears it now.

        `since_s`: its last sign of life, when that is a while ago. `is_cut`: see `Lost`.
        """
        now_s = self._clock.monotonic_s()
        lost = Lost(why=why, since_s=now_s if since_s is None else since_s, is_cut=is_cut)
        self._is_broken = True
        self._closing.set()
        inboxes, self._inboxes = self._inboxes, {}
        for inbox in inboxes.values():
            inbox.put(lost)

    async def run(self, opened: OpenStream) -> None:
        """Read until the stream ends, however it ends; never raises but for a cancel."""
        why, is_cut = "the decode worker ended the stream", False
        try:
            async with asyncio.TaskGroup() as group:
                reading = group.create_task(self._read(opened))
                closing = group.create_task(self._closing.wait())
                await asyncio.wait((reading, closing), return_when=asyncio.FIRST_COMPLETED)
                reading.cancel()
                closing.cancel()
        except* ServiceError as errors:
            why = f"the stream to the decode worker broke: {errors.exceptions[0]}"
            is_cut = all(_is_cut(error) for error in errors.exceptions)
        finally:
            _log.info("decode_stream_closed", worker=self.worker.worker_id, why=why)
            self.lose(why, is_cut=is_cut)

    async def _read(self, opened: OpenStream) -> None:
        async for events in opened(self._queued()):
            self._heard_s = self._clock.monotonic_s()
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


def _is_cut(error: BaseException) -> bool:
    """Nobody at the worker said so: the connection is gone, by itself or with its process."""
    if not isinstance(error, ServiceError):
        return False
    return error.reason is Reason.WORKER_LOST and "grpc_code" in error.metadata


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
        hub.on_heard(self._heard)

    def _heard(self, record: WorkerRecord) -> None:
        """A worker that drains says so with every beat: who could not move may, by the next."""
        stream = self._streams.get(record.worker_id) if record.is_draining else None
        if stream is not None and stream.worker.incarnation == record.incarnation:
            stream.announce_leaving()

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

        self._spawn(f"decode-stream-{worker.worker_id}", self._run(stream, opened))
        return stream

    async def _run(self, stream: DecodeStream, opened: OpenStream) -> None:
        await stream.run(opened)
        # Before any of its sequences looks for another worker: this one is not the answer.
        self._hub.doubt(stream.worker)

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
                beat_s = self._hub.heard_s(worker_id, stream.worker.incarnation)
                stream.lose(
                    f"the decode worker was silent for {silence_s:.1f} s",
                    since_s=stream.alive_s(beat_s),
                )
            else:
                stream.lose_overdue()

    async def start(self) -> None:
        """Nothing: streams open at first use."""

    async def drain(self) -> None:
        """Nothing: running answers go on until their requests end."""

    async def stop(self) -> None:
        """Close every stream; their sequences hear it."""
        for stream in self._streams.values():
            stream.lose("the gateway is stopping")
        self._streams.clear()
