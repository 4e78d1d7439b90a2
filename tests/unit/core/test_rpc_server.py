"""Health, reflection, binding and the channel pool over real sockets."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.client import ChannelPool
from baton.errors import Reason, ServiceError, StartupError
from baton.rpc.channel import Channel, open_channel
from baton.rpc.interceptor import CallLimits
from baton.rpc.server import ServerOptions, build_server, is_loopback, split_bind
from tests.unit.core.rpc_fixtures import SERVICE, method, serving, unary

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def _echo(request: bytes, context: Any) -> bytes:
    return request


async def _health(channel: Any, name: str) -> int:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    response = await stub.Check(health_pb2.HealthCheckRequest(service=name))
    return int(response.status)


async def test_health_follows_readiness_for_every_name_but_liveness() -> None:
    """Probes and routers ask by different names and must hear the same."""
    async with serving(Echo=unary(_echo)) as (server, channel):
        names = ("", "readiness", SERVICE)
        assert {await _health(channel, name) for name in names} == {NOT_SERVING}
        assert await _health(channel, "liveness") == SERVING
        await server.set_ready(True)
        assert {await _health(channel, name) for name in names} == {SERVING}
        await server.drain()
        assert {await _health(channel, name) for name in names} == {NOT_SERVING}
        assert await _health(channel, "liveness") == SERVING
        with pytest.raises(ServiceError) as failed:
            await _health(channel, "nobody")
        assert failed.value.reason is Reason.NOT_FOUND


async def test_health_answers_also_when_the_service_is_full() -> None:
    """A probe that is refused would get a busy process killed."""
    async with serving(limits=CallLimits(calls_max=0), Echo=unary(_echo)) as (_server, channel):
        with pytest.raises(ServiceError) as failed:
            await channel.unary_unary(method("Echo"))(b"")
        assert failed.value.reason is Reason.QUEUE_FULL
        assert await _health(channel, "liveness") == SERVING


async def test_reflection_lists_every_service() -> None:
    """grpcurl and buf curl work without our protos."""
    async with serving(Echo=unary(_echo)) as (_server, channel):
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        response = await call.read()
        await call.done_writing()
    names = {service.name for service in response.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names


async def test_a_taken_port_is_named() -> None:
    """The commonest fault of a first start: say which port and what to do."""
    async with serving(Echo=unary(_echo)) as (server, _channel):
        with pytest.raises(StartupError, match=str(server.port)) as refused:
            build_server(ServerOptions(bind=server.target))
    assert "choose another port" in str(refused.value)


@pytest.mark.parametrize("bind", ["0.0.0.0:0", "[::]:0", "example.org:0", "10.1.2.3:0"])
def test_plain_text_beyond_loopback_needs_the_flag(bind: str) -> None:
    """Nobody serves the network by accident."""
    with pytest.raises(StartupError, match="not be encrypted"):
        build_server(ServerOptions(bind=bind))


@pytest.mark.parametrize("bind", ["", "localhost", "7000", ":7000", "h:", "h:x", "h:70000", "h:-1"])
def test_a_malformed_address_is_refused(bind: str) -> None:
    """Named before anything starts."""
    with pytest.raises(StartupError, match="not an address"):
        split_bind(bind)


async def test_the_flag_allows_all_interfaces() -> None:
    """In a container's own network this is how services meet."""
    server = build_server(ServerOptions(bind="0.0.0.0:0", is_insecure_bind_allowed=True))
    assert server.port > 0
    await server.stop()


def test_loopback_is_recognised_in_every_spelling() -> None:
    """A name that needs resolving could be anything."""
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "me.local"))
    assert split_bind("[::1]:70") == ("::1", 70)


async def test_unix_sockets_serve_too(tmp_path: Path) -> None:
    """Between containers of one pod a path is the address."""
    server = build_server(ServerOptions(bind=f"unix:{tmp_path}/s"))
    server.register_handlers(SERVICE, {"Echo": unary(_echo)})
    await server.start()
    async with open_channel(server.target) as channel:
        assert await channel.unary_unary(method("Echo"))(b"x") == b"x"
    await server.stop()


async def test_a_peer_that_came_back_can_be_called_before_the_wait_to_connect_is_over() -> None:
    """A channel in the wait between two tries fails its calls; who knows better takes it out."""
    async with serving(Echo=unary(_echo)) as (server, _channel):
        target = server.target
    async with ChannelPool() as pool:
        assert pool.detach_failed(target) is None, "none was opened"
        async with asyncio.timeout(10.0):
            with pytest.raises(ServiceError):
                await pool.get(target).unary_unary(method("Echo"))(b"x")
            await _until_failed(pool.get(target))
        failed = pool.detach_failed(target)
        assert failed is not None
        await failed.close()
        async with serving(bind=target, Echo=unary(_echo)):
            assert await pool.get(target).unary_unary(method("Echo"))(b"x") == b"x"
            assert pool.detach_failed(target) is None, "one that is connected stays"


async def _until_failed(channel: Channel) -> None:
    """Until a try to connect has failed and the wait for the next one has begun."""
    state = channel.get_state()
    while state is not grpc.ChannelConnectivity.TRANSIENT_FAILURE:
        await channel.wait_for_state_change(state)
        state = channel.get_state()


async def test_the_pool_shares_channels_and_closes_them_all() -> None:
    """One connection a peer; after the stop nobody opens another."""
    async with serving(Echo=unary(_echo)) as (server, _channel):
        async with ChannelPool() as pool:
            channel = pool.get(server.target)
            assert pool.get(server.target) is channel
            assert await channel.unary_unary(method("Echo"))(b"x") == b"x"
            await pool.forget(server.target)
            await pool.forget("unknown:1")
            assert pool.get(server.target) is not channel
        with pytest.raises(ServiceError) as refused:
            pool.get(server.target)
        assert refused.value.reason is Reason.DRAINING
