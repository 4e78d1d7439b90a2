"""The fault proxy over real sockets: each fault does what it says, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from baton.errors import Reason, ServiceError
from baton.rpc.channel import Channel, open_channel
from baton.testing.clock import ManualClock
from baton.testing.fault_proxy import NO_FAULTS, FaultProxy, LinkFaults
from tests.unit.core.rpc_fixtures import method, serving, unary

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Server:
    """What the target saw: bytes in, how the stream ended, reads of its own."""

    received: bytearray = field(default_factory=bytearray)
    reads: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    is_reset: bool = False


@pytest.fixture(autouse=True)
async def bounded() -> AsyncIterator[None]:
    """No case hangs: a black hole that stays shut fails by name."""
    async with asyncio.timeout(20):
        yield


async def _echo(state: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            state.received += data
            state.reads += 1
            writer.write(data)
            await writer.drain()
        writer.write(b"bye")
        await writer.drain()
    except ConnectionError:
        state.is_reset = True
    finally:
        writer.close()
        state.ended.set()


@pytest.fixture
async def target() -> AsyncIterator[tuple[Server, tuple[str, int]]]:
    """A server that echoes, and says "bye" when the client has ended its side."""
    state = Server()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _echo(state, reader, writer)

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield state, ("127.0.0.1", server.sockets[0].getsockname()[1])


@contextlib.asynccontextmanager
async def connected(proxy: FaultProxy) -> AsyncIterator[Stream]:
    """A client through the proxy."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def until_delivered(proxy: FaultProxy, direction: str, size_bytes: int) -> None:
    """Returns once the proxy wrote so much on."""
    while proxy.delivered_bytes(direction) < size_bytes:
        turned = asyncio.Event()
        asyncio.get_running_loop().call_later(0.001, turned.set)
        await turned.wait()


async def test_without_faults_every_byte_and_the_end_pass(target: Any) -> None:
    """A half-close passes as one: the answer to it still comes back."""
    state, address = target
    payload = bytes(range(256)) * 4096
    async with FaultProxy(address) as proxy, connected(proxy) as (reader, writer):
        writer.write(payload)
        writer.write_eof()
        assert await reader.read(-1) == payload + b"bye"
        assert proxy.delivered_bytes("to_server") == len(payload)
    assert state.received == payload


async def test_latency_delays_by_the_clock(target: Any) -> None:
    """Exactly so long, and a later setting without faults does not hurry what waits."""
    _state, address = target
    clock = ManualClock()
    async with FaultProxy(address, clock=clock) as proxy, connected(proxy) as (reader, writer):
        proxy.to_server = LinkFaults(latency_s=0.5)
        writer.write(b"slow")
        await clock.until_waiting()
        clock.advance(0.4)
        proxy.to_server = NO_FAULTS
        assert proxy.delivered_bytes("to_server") == 0
        clock.advance(0.1)
        assert await reader.readexactly(4) == b"slow"


async def test_jitter_is_repeatable_and_keeps_the_order(target: Any) -> None:
    """The same seed draws the same delays."""
    _state, address = target
    async with FaultProxy(address, seed=3) as one, FaultProxy(address, seed=3) as other:
        assert [one.dice.random() for _ in range(5)] == [other.dice.random() for _ in range(5)]
        one.to_server = LinkFaults(jitter_s=0.01)
        async with connected(one) as (reader, writer):
            words = [f"{number:04d}".encode() for number in range(50)]
            for word in words:
                writer.write(word)
                await writer.drain()
            assert await reader.readexactly(200) == b"".join(words)


async def test_bandwidth_takes_its_time(target: Any) -> None:
    """200,000 bytes at a million a second: a fifth of a second."""
    _state, address = target
    async with FaultProxy(address) as proxy, connected(proxy) as (reader, writer):
        proxy.to_server = LinkFaults(bytes_per_s=1e6)
        begin_s = asyncio.get_running_loop().time()
        writer.write(bytes(200_000))
        await reader.readexactly(200_000)
        assert asyncio.get_running_loop().time() - begin_s >= 0.199


async def test_slices_write_in_tiny_pieces(target: Any) -> None:
    """Readers that trust one read to hold one message are found out."""
    state, address = target
    async with FaultProxy(address) as proxy, connected(proxy) as (reader, writer):
        writer.write(b"warm")
        await reader.readexactly(4)
        reads_before = state.reads
        proxy.to_server = LinkFaults(slice_bytes=3, bytes_per_s=3000)
        writer.write(b"0123456789" * 6)
        assert await reader.readexactly(60) == b"0123456789" * 6
        assert state.reads - reads_before > 5


async def test_reset_after_bytes_cuts_both_sides(target: Any) -> None:
    """Exactly so many bytes pass, then a RST, not an end."""
    state, address = target
    async with FaultProxy(address) as proxy:
        proxy.to_server = LinkFaults(reset_after_bytes=5)
        async with connected(proxy) as (reader, writer):
            writer.write(b"0123456789")
            with pytest.raises(ConnectionResetError):
                await reader.readuntil(b"never sent")
        await state.ended.wait()
        assert proxy.delivered_bytes("to_server") == 5
        assert state.is_reset
        assert bytes(state.received) in (b"01234", b"")


async def test_half_close_ends_one_direction_only(target: Any) -> None:
    """The server sees the end after four bytes and can still answer."""
    state, address = target
    async with FaultProxy(address) as proxy:
        proxy.to_server = LinkFaults(half_close_after_bytes=4)
        async with connected(proxy) as (reader, writer):
            writer.write(b"0123456789")
            assert await reader.read(-1) == b"0123bye"
    assert state.received == b"0123"
    assert not state.is_reset


@pytest.mark.parametrize("direction", ["to_server", "to_client"])
async def test_a_black_hole_swallows_one_direction_until_lifted(
    target: Any, direction: str
) -> None:
    """As a partition that heals: nothing arrives, nothing is lost, the other way goes on."""
    state, address = target
    async with FaultProxy(address) as proxy, connected(proxy) as (reader, writer):
        writer.write(b"one")
        await reader.readexactly(3)
        setattr(proxy, direction, LinkFaults(is_blackhole=True))
        writer.write(b"two")
        if direction == "to_client":
            await until_delivered(proxy, "to_server", 6)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await reader.readexactly(3)
        assert bytes(state.received) == (b"one" if direction == "to_server" else b"onetwo")
        setattr(proxy, direction, NO_FAULTS)
        assert await reader.readexactly(3) == b"two"


async def test_a_black_hole_holds_back_its_sender(target: Any) -> None:
    """Memory is bounded: what does not fit stays with the sender."""
    _state, address = target
    async with FaultProxy(address, buffer_bytes=65536) as proxy, connected(proxy) as stream:
        reader, writer = stream
        proxy.to_server = LinkFaults(is_blackhole=True)
        size_bytes = 32 * 1024 * 1024
        writer.write(bytes(size_bytes))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await writer.drain()
        assert writer.transport.get_write_buffer_size() > size_bytes // 2
        proxy.reset_connections()
        with pytest.raises(ConnectionResetError):
            await reader.read(1)


async def test_one_byte_is_corrupt(target: Any) -> None:
    """The one at the offset, inverted; the same byte of the next connection too."""
    _state, address = target
    async with FaultProxy(address) as proxy:
        proxy.to_server = LinkFaults(corrupt_at_byte=5, slice_bytes=4)
        for _ in range(2):
            async with connected(proxy) as (reader, writer):
                writer.write(bytes(10))
                assert await reader.readexactly(10) == bytes(5) + b"\xff" + bytes(4)


async def test_connections_are_reset_and_refused_on_request(target: Any) -> None:
    """Flapping links, also while a direction hangs in a black hole."""
    _state, address = target
    async with FaultProxy(address) as proxy:
        async with connected(proxy) as (reader, writer):
            writer.write(b"x")
            await reader.readexactly(1)
            proxy.to_client = LinkFaults(is_blackhole=True)
            writer.write(b"y")
            assert proxy.reset_connections() == 1
            with pytest.raises(ConnectionResetError):
                await reader.read(1)
        proxy.is_refusing = True
        async with connected(proxy) as (reader, _writer):
            with pytest.raises(ConnectionResetError):
                await reader.read(1)
        assert proxy.connections_total == 2
        assert proxy.connections_open == 0


async def test_an_absent_target_is_a_reset() -> None:
    """The client does not wait for a server that is not there."""
    closed = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = closed.sockets[0].getsockname()[1]
    closed.close()
    await closed.wait_closed()
    async with FaultProxy(("127.0.0.1", port)) as proxy, connected(proxy) as (reader, _writer):
        with pytest.raises(ConnectionResetError):
            await reader.read(1)


# --- in front of gRPC ----------------------------------------------------------------------------
@contextlib.asynccontextmanager
async def proxied(**handlers: Any) -> AsyncIterator[tuple[FaultProxy, Channel]]:
    """A real server with these methods, the proxy before it, a channel to the proxy."""
    async with (
        serving(**handlers) as (server, _direct),
        FaultProxy(("127.0.0.1", server.port), seed=1) as proxy,
        open_channel(proxy.address) as channel,
    ):
        yield proxy, channel


async def _unary_echo(request: bytes, context: Any) -> bytes:
    return request


async def test_grpc_passes_slices_and_latency() -> None:
    """HTTP/2 frames torn into seven bytes still make messages."""
    async with proxied(Echo=unary(_unary_echo)) as (proxy, channel):
        proxy.to_server = LinkFaults(slice_bytes=7, jitter_s=0.002)
        proxy.to_client = LinkFaults(slice_bytes=7, latency_s=0.005)
        echo = channel.unary_unary(method("Echo"))
        answers = await asyncio.gather(*(echo(b"%d" % n * 200) for n in range(20)))
    assert answers == [b"%d" % n * 200 for n in range(20)]


async def test_grpc_calls_through_a_reset_fail_with_a_reason_and_recover() -> None:
    """A lost connection is WORKER_LOST at once; the next call connects anew."""
    held = asyncio.Event()

    async def hold(request: bytes, context: Any) -> bytes:
        held.set()
        await asyncio.Event().wait()
        return request

    async with proxied(Hold=unary(hold), Echo=unary(_unary_echo)) as (proxy, channel):
        call = channel.unary_unary(method("Hold"))(b"x", timeout=15.0)
        await held.wait()
        proxy.reset_connections()
        with pytest.raises(ServiceError) as lost:
            await call
        assert lost.value.reason is Reason.WORKER_LOST
        echo = channel.unary_unary(method("Echo"))
        assert await echo(b"again", timeout=15.0, wait_for_ready=True) == b"again"
        assert proxy.connections_total == 2


async def test_grpc_in_a_black_hole_ends_by_its_deadline() -> None:
    """An answer that never comes costs the deadline, no more."""
    async with proxied(Echo=unary(_unary_echo)) as (proxy, channel):
        echo = channel.unary_unary(method("Echo"))
        assert await echo(b"before") == b"before"
        proxy.to_client = LinkFaults(is_blackhole=True)
        with pytest.raises(ServiceError) as late:
            await echo(b"lost", timeout=0.3)
        assert late.value.reason is Reason.DEADLINE_EXCEEDED
        proxy.to_client = NO_FAULTS
        assert await echo(b"after", timeout=10.0) == b"after"


async def test_grpc_notices_a_corrupt_frame() -> None:
    """A damaged frame ends the connection with a reason; never a wrong answer."""
    async with proxied(Echo=unary(_unary_echo)) as (proxy, channel):
        # The first byte a gRPC server sends is the length of its SETTINGS frame.
        proxy.to_client = LinkFaults(corrupt_at_byte=0)
        with pytest.raises(ServiceError) as failed:
            await channel.unary_unary(method("Echo"))(b"x", timeout=5.0)
    assert failed.value.reason in {Reason.WORKER_LOST, Reason.DEADLINE_EXCEEDED}
