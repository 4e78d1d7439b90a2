"""Heartbeats: the full record to every gateway, none waiting for another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton.api.common.v1 import common_pb2
from baton.api.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from baton.client import ChannelPool
from baton.errors import Reason, ServiceError
from baton.heartbeat import Beat, Heartbeats, Load, Record, Role
from baton.heartbeat_wire import gateway_beats, record_to_proto
from baton.kv.label import PairLabel
from baton.kv.layout import KvDtype, KvGeometry
from baton.kv.numeric import TORCH_F32
from baton.rpc.server import RpcServer, ServerOptions, build_server
from baton.testing.clock import ManualClock

GEOMETRY = KvGeometry(
    layers=1, kv_heads=1, head_dim=2, head_dim_v=2, block_tokens=8, dtype=KvDtype.F32
)
RECORD = Record(
    worker_id="prefill-0",
    role=Role.PREFILL,
    incarnation=77,
    address="127.0.0.1:1",
    kvstore_address="127.0.0.1:2",
    node_id="node-0",
    model="tiny",
    version="0.1.0",
    label=PairLabel(
        model=bytes(16),
        rope=bytes(16),
        dtype=KvDtype.F32,
        block_tokens=8,
        tokenizer=bytes(8),
        numeric_class=TORCH_F32,
    ),
    geometry=GEOMETRY,
    is_ready=True,
    progress=5,
    load=Load(active=2, queued=1, queued_tokens=300, active_max=4, token_rate=12.5, tpot_s=0.1),
    context_max=512,
)


class Registry(gateway_pb2_grpc.RegistryServiceServicer):
    """A gateway that remembers whom it heard."""

    def __init__(self) -> None:
        self.heard: list[gateway_pb2.HeartbeatRequest] = []

    async def Heartbeat(
        self, request: gateway_pb2.HeartbeatRequest, context: Any
    ) -> gateway_pb2.HeartbeatResponse:
        """Hears a worker."""
        self.heard.append(request)
        return gateway_pb2.HeartbeatResponse(gateway_id="gateway-0", incarnation=1)

    async def ListWorkers(
        self, request: gateway_pb2.ListWorkersRequest, context: Any
    ) -> gateway_pb2.ListWorkersResponse:
        """Not asked for here."""
        raise ServiceError(Reason.UNSUPPORTED, "a test's registry lists nobody")


@pytest.fixture
async def registry() -> AsyncIterator[tuple[Registry, RpcServer]]:
    """A gateway over a real socket."""
    servicer, server = Registry(), build_server(ServerOptions())
    server.register(
        gateway_pb2_grpc.add_RegistryServiceServicer_to_server,
        servicer,
        "baton.api.gateway.v1.RegistryService",
    )
    await server.start()
    yield servicer, server
    await server.stop()


async def test_a_beat_carries_the_whole_record(registry: tuple[Registry, RpcServer]) -> None:
    """Nothing is left to be remembered from an earlier beat."""
    servicer, server = registry
    pool = ChannelPool()
    ((address, beat),) = gateway_beats(pool, (server.target,), "capability")
    assert address == server.target
    assert await beat(RECORD, 5.0) == "gateway-0"
    await pool.stop()
    (request,) = servicer.heard
    assert request.capability == "capability"
    assert request.worker == record_to_proto(RECORD)
    assert request.worker.role == common_pb2.WORKER_ROLE_PREFILL
    assert request.worker.load.queued_tokens == 300
    assert request.worker.label.geometry.block_tokens == 8


class Gateway:
    """Counts beats; may fail or hang."""

    def __init__(self, beats_wanted: int) -> None:
        self.records: list[Record] = []
        self.error: ServiceError | None = None
        self.hangs = False
        self.enough = asyncio.Event()
        self._wanted = beats_wanted

    async def beat(self, record: Record, _timeout_s: float) -> str:
        """One beat."""
        if self.hangs:
            await asyncio.Event().wait()
        self.records.append(record)
        if len(self.records) >= self._wanted:
            self.enough.set()
        if self.error is not None:
            raise self.error
        return "g"


def heartbeats(clock: ManualClock, *gateways: Gateway) -> Heartbeats:
    """Beats to fakes, named g0, g1, ..."""
    beats: list[tuple[str, Beat]] = [(f"g{i}", item.beat) for i, item in enumerate(gateways)]
    return Heartbeats(beats, lambda: RECORD, clock, 0.5)


async def both_wait(clock: ManualClock) -> None:
    """Two loops have reached their wait; nothing tells, so the loop is yielded to."""
    for _ in range(1000):
        if clock.waiting >= 2:
            return
        await asyncio.sleep(0)  # noqa: TID251 - yields, waits for nothing
    raise AssertionError("the loops do not wait")


async def test_a_dead_gateway_delays_no_other() -> None:
    """One hangs, one refuses; the third hears every beat, and a last one at the end."""
    hanging, refusing, well = Gateway(1), Gateway(1), Gateway(1)
    hanging.hangs = True
    refusing.error = ServiceError(Reason.WORKER_LOST, "gone")
    clock, stopping = ManualClock(), asyncio.Event()
    beats = heartbeats(clock, hanging, refusing, well)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(beats.run(stopping))
        async with asyncio.timeout(5.0):
            await well.enough.wait()
            await refusing.enough.wait()
        assert beats.reachable == {"g2"}
        well.enough.clear()
        await both_wait(clock)
        clock.advance(0.5)
        async with asyncio.timeout(5.0):
            await well.enough.wait()
        running.cancel()
    assert len(well.records) == 2


async def test_the_last_beat_follows_the_stop() -> None:
    """Its record says draining, so that nobody waits for silence."""
    gateway, clock, stopping = Gateway(1), ManualClock(), asyncio.Event()
    beats = heartbeats(clock, gateway)
    async with asyncio.TaskGroup() as group:
        group.create_task(beats.run(stopping))
        async with asyncio.timeout(5.0):
            await gateway.enough.wait()
        stopping.set()
    assert len(gateway.records) == 2
