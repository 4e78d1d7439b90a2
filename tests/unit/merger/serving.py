"""A merger on a real socket, in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc

from baton.api.merger.v1 import merger_pb2_grpc
from baton.client import ChannelPool
from baton.metrics import Metrics
from baton.rpc.server import ServerOptions, build_server
from services.merger.materialise import Materialiser
from services.merger.measures import MergerMeasures
from services.merger.servicer import SERVICE_NAME, MergerServicer, add_to_server

Stub = Any
"""The generated async stub; its stream methods are typed as if they were of threads."""


@asynccontextmanager
async def connected_merger(**more: Any) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a merger on a socket of its own."""
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(ChannelPool())
        server = build_server(ServerOptions(bind="127.0.0.1:0"))
        servicer = MergerServicer(Materialiser(pool), MergerMeasures(Metrics("merger")), **more)
        server.register(add_to_server, servicer, SERVICE_NAME)
        await server.start()
        stack.push_async_callback(server.stop)
        yield await stack.enter_async_context(grpc.aio.insecure_channel(server.target))


@asynccontextmanager
async def running_merger(**more: Any) -> AsyncIterator[Stub]:
    """The stub of one."""
    async with connected_merger(**more) as channel:
        yield merger_pb2_grpc.MergerServiceStub(channel)
