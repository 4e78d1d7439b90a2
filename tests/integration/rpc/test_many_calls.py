"""4,000 simultaneous calls: each is answered or refused with a reason and a time to come back.

Without both pending limits grpc.aio ends a burst in a bare CANCELLED, which says neither that the
service is full nor that a retry helps; the last case shows that this test would notice.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from baton.errors import Reason, ServiceError
from baton.rpc.channel import Channel, ChannelOptions, open_channel
from baton.rpc.interceptor import CallLimits
from baton.rpc.server import RpcServer, ServerOptions, build_server

SERVICE = "baton.test.v1.TestService"
CALLS = 4000
TIMEOUT_S = 30.0
OPTIONS = ServerOptions(has_reflection=False, limits=CallLimits(retry_after_s=0.25))


class Gate:
    """A handler that holds every admitted call until all the others were refused."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def unary(self, request: bytes, _context: Any) -> bytes:
        """Answers with the request once the gate is open."""
        await self.open.wait()
        return request

    async def stream(self, request: bytes, _context: Any) -> AsyncIterator[bytes]:
        """The same as a stream of one."""
        await self.open.wait()
        yield request


@asynccontextmanager
async def guarded(gate: Gate) -> AsyncIterator[tuple[RpcServer, Channel]]:
    """A server whose calls wait at the gate, and a channel to it."""
    server = build_server(OPTIONS)
    handlers = {
        "Unary": grpc.unary_unary_rpc_method_handler(gate.unary),
        "Stream": grpc.unary_stream_rpc_method_handler(gate.stream),
    }
    server.register_handlers(SERVICE, handlers)
    await server.start()
    try:
        options = ChannelOptions(call_timeout_s=TIMEOUT_S, stream_timeout_s=TIMEOUT_S)
        async with open_channel(server.target, options) as channel:
            yield server, channel
    finally:
        await server.stop()


async def outcomes(channel: Channel, kind: str, gate: Gate) -> list[ServiceError | bytes]:
    """Ends of `CALLS` simultaneous calls; the gate opens when no more refusals can come."""
    refusals_due = CALLS - OPTIONS.limits.calls_max
    seen: list[ServiceError | bytes] = []

    async def one(number: int) -> None:
        request = number.to_bytes(4, "little")
        try:
            if kind == "Unary":
                seen.append(await channel.unary_unary(f"/{SERVICE}/Unary")(request))
            else:
                answer = channel.unary_stream(f"/{SERVICE}/Stream")(request)
                seen.extend([message async for message in answer])
        except ServiceError as error:
            seen.append(error)
        if len(seen) == refusals_due:
            gate.open.set()

    async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as group:
        for number in range(CALLS):
            group.create_task(one(number))
    return seen


@pytest.mark.parametrize("kind", ["Unary", "Stream"])
async def test_each_of_4000_calls_is_answered_or_refused_with_a_reason(kind: str) -> None:
    """Exactly as many as the service admits are answered, each its own; the rest know why.

    And nothing of the burst stays: no slot is held, the next call is answered.
    """
    gate = Gate()
    async with guarded(gate) as (server, channel):
        seen = await outcomes(channel, kind, gate)
        assert server.interceptor.running == 0
        assert await channel.unary_unary(f"/{SERVICE}/Unary")(b"next") == b"next"
    answers = {end for end in seen if isinstance(end, bytes)}
    refused = [end for end in seen if isinstance(end, ServiceError)]
    assert len(seen) == CALLS
    assert len(answers) == OPTIONS.limits.calls_max
    assert collections.Counter(error.reason for error in refused) == {
        Reason.QUEUE_FULL: CALLS - OPTIONS.limits.calls_max
    }
    # No grpc_code: the refusal is the service's own, not gRPC's or a guess from a bare status.
    assert all("grpc_code" not in error.metadata for error in refused)
    assert {error.retry_after_s for error in refused} == {OPTIONS.limits.retry_after_s}


async def test_without_room_for_the_burst_calls_end_bare() -> None:
    """The control: the same burst on a server with small pending limits loses the reason."""
    gate = Gate()
    small = dataclasses.replace(OPTIONS, pending_calls_max=8)
    server = build_server(small)
    server.register_handlers(SERVICE, {"Unary": grpc.unary_unary_rpc_method_handler(gate.unary)})
    await server.start()
    try:
        async with open_channel(server.target, ChannelOptions(call_timeout_s=TIMEOUT_S)) as channel:
            seen = await outcomes(channel, "Unary", gate)
    finally:
        await server.stop()
    bare = [end for end in seen if isinstance(end, ServiceError) and "grpc_code" in end.metadata]
    assert bare
