"""Both halves of moving put together for one store, and their clock's work.

Owns the wiring and the loop that lets go of replicas and asks silent new homes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import structlog

from baton.capability import CapabilitySigner
from baton.client import ChannelPool
from baton.clock import WaitingClock
from baton.errors import StartupError
from baton.lifecycle import every
from services.kvstore.access import Access
from services.kvstore.identity import Identity
from services.kvstore.moving.adopt_rpc import AdoptParts, NewHomeCalls, Spawn
from services.kvstore.moving.arrival import Arrivals
from services.kvstore.moving.departure import Departures
from services.kvstore.moving.fetching import STALL_S, Fetcher
from services.kvstore.moving.follow_rpc import FollowParts
from services.kvstore.moving.measures import MoveMeasures
from services.kvstore.moving.old_home_rpc import OldHomeCalls, Peers
from services.kvstore.moving.own import OwnRight
from services.kvstore.moving.probe_rpc import ProbeCalls
from services.kvstore.moving.stream_rpc import StreamTransport
from services.kvstore.moving.transport import AUTO, STREAM, Transport, Transports
from services.kvstore.moving.ucx import UcxMissing, UcxPlane
from services.kvstore.moving.ucx_rpc import THREADS, UcxSender, UcxTransport
from services.kvstore.runtime import Runtime

REPLICA_LEASE_S: Final = 30.0
SWEEP_INTERVAL_S: Final = 1.0
ASKING_MAX: Final = 16

_log = structlog.stdlib.get_logger("services.kvstore.moving")


@dataclass(frozen=True, slots=True, kw_only=True)
class Planes:
    """What a store may use beside gRPC. `is_forced`: the best one and no other; `stall_s`: how long
    nothing may come of a transfer.
    """

    ucx: UcxPlane | None = None
    is_forced: bool = False
    stall_s: float = STALL_S


def open_planes(
    transport: str, *, is_loopback: bool, ports: str | None = None, stall_s: float = STALL_S
) -> Planes:
    """What `--transport` comes to in this process: `auto`, or the one to be forced. Imports ucxx
    where that may be used: call it off the loop.

    StartupError when the forced one cannot be had; `auto` says so and goes without.
    """
    is_forced = transport != AUTO
    if transport == STREAM:
        return Planes(is_forced=True, stall_s=stall_s)
    try:
        ucx = UcxPlane(is_loopback=is_loopback, ports=ports)
    except UcxMissing as error:
        if is_forced:
            raise StartupError(
                f"--transport ucx cannot be had: {error}", hint="or give --transport auto"
            ) from error
        _log.info("ucx_not_usable", why=str(error))
        return Planes(stall_s=stall_s)
    _log.info("ucx_usable", settings=ucx.settings)
    return Planes(ucx=ucx, is_forced=is_forced, stall_s=stall_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveParts:
    """What moving needs of a store; `own_address` is where other kvstores reach it."""

    runtime: Runtime
    access: Access
    identity: Identity
    signer: CapabilitySigner
    channels: ChannelPool
    clock: WaitingClock
    executor: Executor
    measures: MoveMeasures
    spawn: Spawn
    own_address: Callable[[], str]
    planes: Planes = field(default_factory=Planes)


@dataclass(slots=True, kw_only=True)
class Moves:
    """Everything about moving in one store; a part of its service."""

    old_home: OldHomeCalls
    new_home: NewHomeCalls
    probes: ProbeCalls
    departures: Departures
    arrivals: Arrivals
    clock: WaitingClock
    spawn: Spawn
    threads: Executor
    _asking: int = 0
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self) -> None:
        """Begins the clock's work."""
        self.spawn("moves", self._work())

    async def drain(self) -> None:
        """Nothing: a move under way has a deadline of its own."""

    async def stop(self) -> None:
        """Ends the clock's work."""
        self._stopping.set()
        await self._ended.wait()
        self.threads.shutdown(wait=False)

    async def _work(self) -> None:
        try:
            await every(SWEEP_INTERVAL_S, self._sweep, clock=self.clock, stopping=self._stopping)
        finally:
            self._ended.set()

    async def _sweep(self) -> None:
        self.new_home.sweep()
        self.old_home.ask(self._ask)

    def _ask(self, log_id: bytes, new_home: str, generation: int) -> None:
        if self._asking < ASKING_MAX:
            self._asking += 1
            self.spawn(f"ask-{log_id.hex()}", self._asked(log_id, new_home, generation))

    async def _asked(self, log_id: bytes, new_home: str, generation: int) -> None:
        try:
            await self.old_home.ask_about(log_id, new_home, generation)
        finally:
            self._asking -= 1


def assemble_moves(parts: MoveParts) -> Moves:
    """Both halves over one store."""
    runtime, store = parts.runtime, parts.runtime.store
    departures = Departures(runtime.core, store.home, store.keeper, runtime.journal.snapshot_of)
    arrivals = Arrivals(runtime.core, store.home, store.chains, REPLICA_LEASE_S)
    peers = Peers(channels=parts.channels, right=OwnRight(parts.signer), clock=parts.clock)
    threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kvstore-ucx")
    transports = _transports(parts, peers, threads)
    fetcher = Fetcher(
        runtime,
        arrivals,
        parts.executor,
        clock=parts.clock,
        transports=transports,
        measures=parts.measures,
        stall_s=parts.planes.stall_s,
    )
    follow = FollowParts(
        arrivals=arrivals,
        fetcher=fetcher,
        peers=peers,
        limits=runtime.core.limits,
        transports=transports,
        measures=parts.measures,
        clock=parts.clock,
    )
    adopt = AdoptParts(
        runtime=runtime,
        access=parts.access,
        identity=parts.identity,
        arrivals=arrivals,
        fetcher=fetcher,
        follow=follow,
        peers=peers,
        clock=parts.clock,
        executor=parts.executor,
        measures=parts.measures,
        spawn=parts.spawn,
        own_address=parts.own_address,
    )
    parts.measures.follow(departures, arrivals)
    ucx = parts.planes.ucx
    return Moves(
        old_home=OldHomeCalls(
            runtime,
            parts.access,
            departures,
            peers,
            parts.executor,
            transports=transports.names,
            ucx=None if ucx is None else UcxSender(ucx, threads),
        ),
        new_home=NewHomeCalls(adopt),
        probes=ProbeCalls(parts.access, parts.clock, transports.names, runtime.arena.geometry),
        departures=departures,
        arrivals=arrivals,
        clock=parts.clock,
        spawn=parts.spawn,
        threads=threads,
    )


def _transports(parts: MoveParts, peers: Peers, threads: Executor) -> Transports:
    """Best first."""
    block_tokens, planes = parts.runtime.core.block_tokens, parts.planes
    usable: list[Transport] = []
    if planes.ucx is not None:
        usable.append(UcxTransport(planes.ucx, threads, parts.channels, peers.right, block_tokens))
    if planes.ucx is None or not planes.is_forced:
        usable.append(StreamTransport(parts.channels, block_tokens))
    return Transports(usable, is_forced=planes.is_forced)
