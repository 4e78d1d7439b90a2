"""The real kvstore: kill -9, power cuts of its log's filesystem, a disk that stalls.

What the bare log shows in hundreds of runs (test_kill.py, test_power.py), here with gRPC, arena and
recovery around it: what a client got acked is there after the restart.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest

from baton.api.common.v1 import common_pb2
from baton.api.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from baton.clock import SystemClock
from baton.errors import Reason, ServiceError
from baton.rpc.server import RpcServer, ServerOptions, build_server
from tests.durability.killing import traced
from tests.durability.loops import loop_filesystem, missing
from tests.durability.report import Tell
from tests.durability.serving import Ledger
from tests.integration.kvstore.harness import (
    FakeLog,
    FakeWorker,
    Model,
    Site,
    StoreProcess,
    connected,
    running_store,
    tiny_model,
)

pytestmark = pytest.mark.cluster

KILLS: Final = 40
POWER_CUTS: Final = 3
STALL_S: Final = 2.0
OS_ACK_MAX_S: Final = 0.5
LOG_TOKENS: Final = 100
BEAT_GAP_MAX_S: Final = 1.5
BOTH: Final = frozenset({"os", "disk"})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The tiny model."""
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def kill_store(model: Model, directory: Path, kills: int) -> Ledger:
    """Lives of one kvstore, each ended by kill -9 at a random moment of its writing."""
    ledger, rng = Ledger(), random.Random(7)
    with running_store(model, directory) as store:
        for number in range(kills):
            asyncio.run(ledger.write(store, rng.uniform(0.0, 0.15), store.kill))
            store.start()
            asyncio.run(ledger.check(store, BOTH))
            if number % 10 == 9:
                ledger.forget()
    return ledger


@pytest.mark.more
@pytest.mark.timeout(300)
def test_kvstore_killed_while_it_writes_loses_no_ack(
    model: Model, tmp_path: Path, tell: Tell
) -> None:
    """W1 for the process that is deployed, at `os` and at `disk`."""
    ledger = kill_store(model, tmp_path, KILLS)
    tell(f"kill -9 of the real kvstore: {KILLS} runs, {ledger.acked} tokens acked, 0 lost acks")
    assert ledger.acked > KILLS


@pytest.mark.more
@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_kvstore_on_a_disk_without_power_loses_no_disk_ack(
    kind: str, model: Model, tmp_path: Path, tell: Tell
) -> None:
    """W1 for the process that is deployed: its log's filesystem is shut down under it."""
    why = missing(kind)
    if why is not None:
        pytest.skip(f"NOT TESTED: power cuts of the kvstore's {kind}: {why}")
    ledger, rng = Ledger(), random.Random(8)
    with loop_filesystem(kind, tmp_path, 512 << 20) as filesystem:
        (filesystem.path / "log").mkdir()
        (tmp_path / "log").symlink_to(filesystem.path / "log")
        with running_store(model, tmp_path) as store:
            for _ in range(POWER_CUTS):
                delay_s = rng.uniform(0.05, 0.3)
                asyncio.run(ledger.write(store, delay_s, filesystem.cut_power))
                store.kill()
                filesystem.unmount()
                filesystem.mount()
                store.start()
                asyncio.run(ledger.check(store, frozenset({"disk"})))
                ledger.forget()
            store.stop()
    tell(
        f"power cuts of the real kvstore on {kind}: {POWER_CUTS} runs, {ledger.acked} tokens acked"
        " at disk, 0 lost acks"
    )
    assert ledger.acked > 0


# --- a disk that stalls ---------------------------------------------------------------------------


class Registry(gateway_pb2_grpc.RegistryServiceServicer):
    """A gateway that notes when it heard the kvstore."""

    def __init__(self) -> None:
        self.heard_s: list[float] = []

    async def Heartbeat(
        self, request: gateway_pb2.HeartbeatRequest, context: Any
    ) -> gateway_pb2.HeartbeatResponse:
        """Hears a kvstore."""
        self.heard_s.append(SystemClock().monotonic_s())
        return gateway_pb2.HeartbeatResponse(gateway_id="gateway-0", incarnation=1)

    async def ListWorkers(
        self, request: gateway_pb2.ListWorkersRequest, context: Any
    ) -> gateway_pb2.ListWorkersResponse:
        """Not asked for here."""
        raise ServiceError(Reason.UNSUPPORTED, "a test's registry lists nobody")


@asynccontextmanager
async def listening(registry: Registry) -> AsyncIterator[RpcServer]:
    """The registry behind a socket."""
    server = build_server(ServerOptions())
    add = gateway_pb2_grpc.add_RegistryServiceServicer_to_server
    server.register(add, registry, "baton.api.gateway.v1.RegistryService")
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def store_beside(model: Model, directory: Path, gateway: str) -> AsyncIterator[StoreProcess]:
    """A ready kvstore for a test that has a loop of its own."""
    store = StoreProcess(model=model, directory=directory, flags=("--gateways", gateway))
    try:
        await asyncio.to_thread(store.start)
        yield store
    finally:
        if store.process is not None:
            await asyncio.to_thread(store.stop)
        shutil.rmtree(store.arena_dir, ignore_errors=True)


@dataclass(slots=True)
class Tenant:
    """A worker that appends to one log after the other, at one ack level."""

    site: Site
    worker: FakeWorker
    level: common_pb2.AckLevel.ValueType
    log: FakeLog | None = None

    async def open(self) -> FakeLog:
        """The log it appends to; a new one when the last is long enough."""
        if self.log is not None and len(self.log.tokens) >= LOG_TOKENS:
            await self.site.close(self.log, drop=True)
            self.log = None
        if self.log is None:
            self.log = await self.site.open(self.worker, [4, 5, 6], ack_level=self.level)
            await self.worker.prefill(self.log)
        return self.log

    async def acks_until(self, ends_s: float) -> list[float]:
        """Seconds that each append took."""
        clock = SystemClock()
        took: list[float] = []
        while clock.monotonic_s() < ends_s:
            log = await self.open()
            begun_s = clock.monotonic_s()
            await self.worker.append(log, 7)
            took.append(clock.monotonic_s() - begun_s)
        return took


@pytest.mark.more
@pytest.mark.timeout(120)
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed: no stalls")
async def test_disk_that_stalls_holds_up_only_who_waits_for_it(
    model: Model, tmp_path: Path, tell: Tell
) -> None:
    """Every flush takes 2 s: `os` acks of other tenants and heartbeats go on as if nothing was."""
    registry = Registry()
    async with (
        listening(registry) as server,
        store_beside(model, tmp_path, server.target) as store,
        connected(store) as site,
    ):
        assert store.process is not None
        levels = common_pb2.ACK_LEVEL_DISK, common_pb2.ACK_LEVEL_OS
        tenants = [Tenant(site, await site.attach(f"w-{level}"), level) for level in levels]
        for tenant in tenants:
            await tenant.open()
        begins_s = SystemClock().monotonic_s()
        with traced(store.process.pid, f"fdatasync:delay_enter={round(STALL_S * 1e6)}"):
            ends_s = SystemClock().monotonic_s() + 2.5 * STALL_S
            async with asyncio.TaskGroup() as tasks:
                waited, others = [tasks.create_task(one.acks_until(ends_s)) for one in tenants]
    heard_s = [at_s for at_s in registry.heard_s if at_s >= begins_s]
    _compare_stalls(waited.result(), others.result(), heard_s, tell)


def _compare_stalls(
    waited: list[float], others: list[float], heard_s: list[float], tell: Tell
) -> None:
    gap_s = max(second - first for first, second in pairwise(heard_s))
    others.sort()
    p99_s = others[len(others) * 99 // 100]
    tell(
        f"flushes that take {STALL_S} s: {len(waited)} disk acks, longest {max(waited):.2f} s;"
        f" beside them {len(others)} os acks, p99 {p99_s * 1e3:.1f} ms, longest"
        f" {others[-1] * 1e3:.1f} ms; longest silence of heartbeats {gap_s:.2f} s"
    )
    assert max(waited) >= STALL_S * 0.9, "the flushes were not delayed: nothing was tested"
    assert others[-1] < OS_ACK_MAX_S
    assert gap_s < BEAT_GAP_MAX_S
