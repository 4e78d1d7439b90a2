"""Client and server agree about pings; a connection is never lost to "too_many_pings"."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

# The compiled library; its stubs do not name it.
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from baton.clock import SystemClock
from baton.rpc import channel, server
from baton.rpc.keepalive import PINGS_TOLERATED_EVERY_S
from baton.rpc.server import RpcServer, ServerOptions, build_server

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, GOAWAY = 4, 6, 7
ACK = 1
WAIT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One HTTP/2 frame of stream 0."""

    kind: int
    flags: int = 0
    payload: bytes = b""

    def encoded(self) -> bytes:
        """Nine bytes of header and the payload."""
        header = len(self.payload).to_bytes(3, "big") + bytes((self.kind, self.flags))
        return header + bytes(4) + self.payload


class BareClient:
    """Speaks just enough HTTP/2 to ping at a pace of its own and to see what comes back."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, *frames: Frame) -> None:
        """All frames in one write."""
        self._writer.write(b"".join(frame.encoded() for frame in frames))
        await self._writer.drain()

    async def next_of(self, *kinds: tuple[int, int]) -> Frame:
        """The next frame that is one of (kind, flags); others are passed over."""
        async with asyncio.timeout(WAIT_S):
            while True:
                header = await self._reader.readexactly(9)
                payload = await self._reader.readexactly(int.from_bytes(header[:3], "big"))
                frame = Frame(kind=header[3], flags=header[4], payload=payload)
                if (frame.kind, frame.flags) in kinds:
                    return frame


@pytest.fixture
async def rpc_server() -> AsyncIterator[RpcServer]:
    """A server with the options that every service has."""
    rpc = build_server(ServerOptions(stop_grace_s=0.0))
    await rpc.start()
    yield rpc
    await rpc.stop()


@pytest.fixture
async def client(rpc_server: RpcServer) -> AsyncIterator[BareClient]:
    """An idle connection: settings exchanged, no call running."""
    reader, writer = await asyncio.open_connection("127.0.0.1", rpc_server.port)
    writer.write(PREFACE)
    bare = BareClient(reader, writer)
    await bare.send(Frame(kind=SETTINGS))
    await bare.next_of((SETTINGS, ACK))
    yield bare
    writer.close()
    await writer.wait_closed()


def ping(number: int) -> Frame:
    """A ping that is told from the others."""
    return Frame(kind=PING, payload=number.to_bytes(8, "big"))


async def test_an_idle_connection_bears_the_pings_of_its_client(client: BareClient) -> None:
    """gRPC forgives two early pings: were these early, the fourth would end the connection."""
    clock, never = SystemClock(), asyncio.Event()
    for number in range(6):
        await client.send(ping(number))
        answer = await client.next_of((PING, ACK), (GOAWAY, 0))
        assert answer.kind == PING, answer.payload
        assert answer.payload == number.to_bytes(8, "big")
        # The pace is what is tested; nothing is waited for.
        await clock.wait(never, PINGS_TOLERATED_EVERY_S * 1.2)


async def test_a_flood_of_pings_is_still_refused(client: BareClient) -> None:
    """The tolerance has an end, or any peer could keep a server busy with pings."""
    await client.send(*(ping(number) for number in range(8)))
    assert b"too_many_pings" in (await client.next_of((GOAWAY, 0))).payload


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(server._channel_arguments(ServerOptions()), id="server"),
        pytest.param(channel.channel_arguments(channel.ChannelOptions()), id="client"),
    ],
)
def test_grpc_knows_every_option_that_is_set(arguments: list[tuple[str, int]]) -> None:
    """gRPC ignores unknown options in silence: a misspelt one would never be missed."""
    library = Path(cygrpc.__file__).read_bytes()
    unknown = [name for name, _ in arguments if name.encode() + b"\0" not in library]
    assert unknown == []
