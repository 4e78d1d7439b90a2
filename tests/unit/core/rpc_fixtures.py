"""A real server on a real socket whose handlers are functions of the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from baton.rpc.channel import Channel, ChannelOptions, open_channel
from baton.rpc.interceptor import CallLimits, ServerMeasures
from baton.rpc.server import RpcServer, ServerOptions, build_server

Behaviour = Callable[[bytes, Any], Awaitable[bytes]]
SERVICE = "baton.test.v1.TestService"


class Recorder:
    """Measures that remember."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.handled: list[tuple[str, grpc.StatusCode]] = []
        self.first_handled = asyncio.Event()

    def call_started(self, method: str) -> None:
        self.started.append(method)

    def call_handled(self, method: str, code: grpc.StatusCode, seconds: float) -> None:
        assert seconds >= 0.0
        self.handled.append((method, code))
        self.first_handled.set()


@asynccontextmanager
async def serving(
    measures: ServerMeasures | None = None,
    limits: CallLimits | None = None,
    options: ChannelOptions | None = None,
    bind: str = "127.0.0.1:0",
    **handlers: grpc.RpcMethodHandler[Any, Any],
) -> AsyncIterator[tuple[RpcServer, Channel]]:
    """A started server with these methods, and a channel to it."""
    server = build_server(
        ServerOptions(bind=bind, limits=limits or CallLimits(), stop_grace_s=0.1), measures
    )
    server.register_handlers(SERVICE, handlers)
    await server.start()
    try:
        async with open_channel(server.target, options) as channel:
            yield server, channel
    finally:
        await server.stop()


def unary(behaviour: Any) -> grpc.RpcMethodHandler[Any, Any]:
    """One request, one response."""
    return grpc.unary_unary_rpc_method_handler(behaviour)


def method(name: str) -> str:
    """The full name of a test method."""
    return f"/{SERVICE}/{name}"
