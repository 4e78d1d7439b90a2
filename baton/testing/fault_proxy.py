"""A TCP proxy that misbehaves on request: latency, bandwidth, slices, resets, half-closes, a black
hole in one direction, a corrupt byte.

Owns the connections between one listening port on loopback and one target. Each direction has its
own faults, replaced at any time by assigning `to_server` or `to_client`; they act from the next
byte delivered, also on open connections. Never reads what it carries. Buffers are bounded: a stuck
direction holds back its sender as a full TCP window does.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from baton.clock import SystemClock, WaitingClock

CHUNK_BYTES: Final = 16 * 1024
CONNECTIONS_MAX: Final = 1024
CONNECT_TIMEOUT_S: Final = 5.0
PACE_S: Final = 0.02
"""With a bandwidth, a piece is what passes in this time, so that changes act soon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFaults:
    """What one direction does to its bytes; byte offsets count from each connection's start.

    latency_s, jitter_s: every chunk comes so much later, plus up to jitter; order is kept.
    bytes_per_s: bandwidth. slice_bytes: the largest single write.
    reset_after_bytes: so many pass, then both sides get a RST. half_close_after_bytes: so many
    pass, then the receiver sees the end of the stream while the other direction goes on.
    is_blackhole: nothing passes, not even the end; lifted, what waited goes on, as TCP would.
    corrupt_at_byte: the byte at this offset arrives inverted.
    """

    latency_s: float = 0.0
    jitter_s: float = 0.0
    bytes_per_s: float | None = None
    slice_bytes: int | None = None
    reset_after_bytes: int | None = None
    half_close_after_bytes: int | None = None
    is_blackhole: bool = False
    corrupt_at_byte: int | None = None

    def __post_init__(self) -> None:
        assert self.latency_s >= 0.0, self.latency_s
        assert self.jitter_s >= 0.0, self.jitter_s
        assert self.bytes_per_s is None or self.bytes_per_s > 0.0, self.bytes_per_s
        assert self.slice_bytes is None or self.slice_bytes > 0, self.slice_bytes

    @property
    def piece_bytes(self) -> int:
        """The largest single write."""
        paced = CHUNK_BYTES if self.bytes_per_s is None else int(self.bytes_per_s * PACE_S)
        return max(1, min(paced, self.slice_bytes or CHUNK_BYTES, CHUNK_BYTES))


NO_FAULTS: Final = LinkFaults()


class FaultProxy:
    """Listens while entered (`async with`); `target` is (host, port) on this machine or another.

    `seed` makes the jitter repeatable; `buffer_bytes` bounds what waits in one direction of one
    connection. A refused connection gets a RST at once.
    """

    def __init__(
        self,
        target: tuple[str, int],
        *,
        seed: int = 0,
        buffer_bytes: int = 1024 * 1024,
        clock: WaitingClock | None = None,
    ) -> None:
        assert buffer_bytes >= CHUNK_BYTES, buffer_bytes
        self.is_refusing = False
        self.connections_total = 0
        self.clock = clock or SystemClock()
        self.dice = random.Random(seed)
        self.buffer_chunks = buffer_bytes // CHUNK_BYTES
        self._target = target
        self._faults = {"to_server": NO_FAULTS, "to_client": NO_FAULTS}
        self._delivered_bytes = {"to_server": 0, "to_client": 0}
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._open: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        """The port it listens on."""
        assert self._server is not None, "enter the proxy first"
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def address(self) -> str:
        """What a client connects to instead of the target: "127.0.0.1:port"."""
        return f"127.0.0.1:{self.port}"

    @property
    def connections_open(self) -> int:
        """Connections carried now."""
        return len(self._open)

    @property
    def to_server(self) -> LinkFaults:
        """Faults of what clients send."""
        return self._faults["to_server"]

    @to_server.setter
    def to_server(self, faults: LinkFaults) -> None:
        self._change("to_server", faults)

    @property
    def to_client(self) -> LinkFaults:
        """Faults of what the target answers."""
        return self._faults["to_client"]

    @to_client.setter
    def to_client(self, faults: LinkFaults) -> None:
        self._change("to_client", faults)

    def delivered_bytes(self, direction: str) -> int:
        """Bytes written on so far, all connections; direction: "to_server" or "to_client"."""
        return self._delivered_bytes[direction]

    def reset_connections(self) -> int:
        """Sends a RST to both sides of every open connection; returns how many there were."""
        for connection in self._open:
            connection.reset()
        return len(self._open)

    async def passable(self, direction: str) -> LinkFaults:
        """The direction's faults as soon as it is no black hole."""
        while self._faults[direction].is_blackhole:
            await self._changed.wait()
        return self._faults[direction]

    def delivered(self, direction: str, size_bytes: int) -> None:
        """Counts bytes written on."""
        self._delivered_bytes[direction] += size_bytes

    def faults(self, direction: str) -> LinkFaults:
        """The direction's faults now."""
        return self._faults[direction]

    def _change(self, direction: str, faults: LinkFaults) -> None:
        self._faults[direction] = faults
        self._changed.set()
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", 0, limit=CHUNK_BYTES, backlog=CONNECTIONS_MAX
        )
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client, in the task that asyncio's server made for it."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections_total += 1
        try:
            if self.is_refusing or len(self._open) >= CONNECTIONS_MAX:
                return
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                far = await asyncio.open_connection(*self._target, limit=CHUNK_BYTES)
            await self._carry(_Connection(self, (reader, writer), far))
        except (OSError, TimeoutError):
            # The target is not there: the client learns it by the RST below.
            pass
        finally:
            _reset(writer)
            self._tasks.discard(task)

    async def _carry(self, connection: _Connection) -> None:
        self._open.add(connection)
        try:
            await connection.run()
        finally:
            self._open.discard(connection)


_Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Connection:
    """A client, the target, and a direction each way."""

    def __init__(self, proxy: FaultProxy, near: _Stream, far: _Stream) -> None:
        self._writers = (near[1], far[1])
        self._directions = (
            _Direction(proxy, "to_server", near[0], far[1]),
            _Direction(proxy, "to_client", far[0], near[1]),
        )
        self._delivering = len(self._directions)
        self._is_reset = False
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Carries bytes until both directions have ended, or one has failed."""
        is_clean = False
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._until_ended())
                for direction in self._directions:
                    group.create_task(direction.take())
                    group.create_task(self._deliver(direction))
            is_clean = True
        except* OSError:
            # A reset by a fault or by either side: both sides get one.
            pass
        finally:
            if not is_clean:
                self.reset()
        for writer in self._writers:
            writer.close()

    def reset(self) -> None:
        """RST to both sides, and the end of `run`."""
        self._is_reset = True
        self._ended.set()
        for writer in self._writers:
            _reset(writer)

    async def _deliver(self, direction: _Direction) -> None:
        await direction.deliver()
        self._delivering -= 1
        if self._delivering == 0:
            self._ended.set()

    async def _until_ended(self) -> None:
        """Fails the group on a reset, also where a direction waits in a black hole."""
        await self._ended.wait()
        if self._is_reset:
            raise ConnectionResetError("by the fault proxy")


class _Direction:
    """One way of one connection: take, hold for the latency, deliver with faults."""

    def __init__(
        self,
        proxy: FaultProxy,
        name: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._proxy = proxy
        self._name = name
        self._reader = reader
        self._writer = writer
        # (when due, bytes); empty bytes are the end of the stream.
        self._held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(proxy.buffer_chunks)
        self._offset = 0
        self._is_half_closed = False
        writer.transport.set_write_buffer_limits(high=CHUNK_BYTES)

    async def take(self) -> None:
        """Reads while there is room; stamps each chunk with when it is due."""
        due_s, data = 0.0, b"begin"
        while data:
            data = await self._reader.read(CHUNK_BYTES)
            faults = self._proxy.faults(self._name)
            delay_s = faults.latency_s + self._proxy.dice.uniform(0.0, faults.jitter_s)
            due_s = max(due_s, self._proxy.clock.monotonic_s() + delay_s)
            await self._held.put((due_s, data))

    async def deliver(self) -> None:
        """Writes each chunk when it is due, through the faults of that moment."""
        while True:
            due_s, data = await self._held.get()
            await self._wait(due_s - self._proxy.clock.monotonic_s())
            if not data:
                await self._proxy.passable(self._name)
                self._half_close()
                return
            while data and not self._is_half_closed:
                faults = await self._proxy.passable(self._name)
                piece, data = data[: faults.piece_bytes], data[faults.piece_bytes :]
                if faults.bytes_per_s is not None:
                    await self._wait(len(piece) / faults.bytes_per_s)
                await self._send(piece, await self._proxy.passable(self._name))

    async def _send(self, piece: bytes, faults: LinkFaults) -> None:
        """Writes as much of a piece as the connection's limits let pass, then acts on them."""
        reset_in = _left(faults.reset_after_bytes, self._offset, piece)
        close_in = _left(faults.half_close_after_bytes, self._offset, piece)
        passing = piece[: min(reset_in, close_in)]
        self._writer.write(_corrupted(passing, faults.corrupt_at_byte, self._offset))
        await self._writer.drain()
        self._offset += len(passing)
        self._proxy.delivered(self._name, len(passing))
        if _is_met(faults.reset_after_bytes, self._offset):
            raise ConnectionResetError("by the fault proxy")
        if _is_met(faults.half_close_after_bytes, self._offset):
            self._half_close()

    def _half_close(self) -> None:
        if not self._is_half_closed and not self._writer.transport.is_closing():
            self._writer.write_eof()
        self._is_half_closed = True

    async def _wait(self, seconds: float) -> None:
        """The delay is the fault; a closing proxy cancels it."""
        if seconds > 0.0:
            await self._proxy.clock.wait(asyncio.Event(), seconds)


def _left(limit_bytes: int | None, offset: int, piece: bytes) -> int:
    """How much of the piece may pass before the limit."""
    return len(piece) if limit_bytes is None else max(0, limit_bytes - offset)


def _is_met(limit_bytes: int | None, offset: int) -> bool:
    return limit_bytes is not None and offset >= limit_bytes


def _corrupted(piece: bytes, at_byte: int | None, offset: int) -> bytes:
    """The piece, with the byte at this offset of the stream inverted if it holds that one."""
    if at_byte is None or not offset <= at_byte < offset + len(piece):
        return piece
    copy = bytearray(piece)
    copy[at_byte - offset] ^= 0xFF
    return bytes(copy)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Closes with a RST instead of a FIN; nothing if it is closed."""
    if writer.transport.is_closing():
        return
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
