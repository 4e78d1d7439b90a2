"""Putting one kvstore together: recovery, arena, cores, log, calls, as parts of a service.

Owns the order of construction and of the parts' end (the log is closed last, after nobody can
submit). Used by the process and by in-process tests; reads no configuration.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import structlog
from blake3 import blake3

from baton.capability import CapabilitySigner, CapabilityVerifier
from baton.client import ChannelPool
from baton.clock import WaitingClock
from baton.kv.blocks import AnyScope, scope_secret
from baton.lifecycle import Service
from baton.metrics import Metrics
from services.kvstore.access import Access
from services.kvstore.append_rpc import AppendCalls
from services.kvstore.arena import Arena, ArenaSpec
from services.kvstore.attach import AttachDesk
from services.kvstore.blob_rpc import BlobCalls
from services.kvstore.compaction import COMPACTION_INTERVAL_S
from services.kvstore.core import Core, Limits
from services.kvstore.device_rpc import DeviceServicer
from services.kvstore.identity import Identity
from services.kvstore.import_rpc import ImportCalls
from services.kvstore.lease import LeaseTable
from services.kvstore.log.journal import LogJournal
from services.kvstore.log.reader import LogScan, scan_directory
from services.kvstore.log.segments import SegmentWriter
from services.kvstore.log.writer import LogWriter
from services.kvstore.log_rpc import LogCalls
from services.kvstore.measures import StoreMeasures
from services.kvstore.moving.assembly import MoveParts, Moves, Planes, assemble_moves
from services.kvstore.moving.measures import MoveMeasures
from services.kvstore.operator_rpc import OperatorServicer
from services.kvstore.page_worker import PageWorker
from services.kvstore.pages import PagePool
from services.kvstore.park_rpc import ParkCalls
from services.kvstore.parts import (
    Closing,
    DirectoryLock,
    Draining,
    Loop,
    Repeating,
    Threads,
    nothing,
)
from services.kvstore.prefix_rpc import PrefixCalls
from services.kvstore.quota_desk import LOOK_INTERVAL_S, QuotaDesk, show_no_quotas
from services.kvstore.reattaching import Reattached, index_rest, new_arena_id, reattach, take_in
from services.kvstore.runtime import SWEEP_INTERVAL_S, Runtime
from services.kvstore.scrub import Pace
from services.kvstore.scrub_targets import ArenaTarget, SlotTarget
from services.kvstore.scrubbing import Scrubber
from services.kvstore.servicer import Calls, KVStoreServicer
from services.kvstore.session_rpc import SessionServicer
from services.kvstore.store import Store
from services.kvstore.tiers.demotion import DEMOTION_INTERVAL_S, Watermarks
from services.kvstore.tiers.device import DeviceTier
from services.kvstore.tiers.nvme_file import NvmeFile
from services.kvstore.tiers.nvme_tier import LOOK_INTERVAL_S as NVME_LOOK_INTERVAL_S
from services.kvstore.tiers.nvme_tier import NvmePlan, NvmeTier, open_file
from services.kvstore.tiers.running import follow_tiers, run_tiers
from services.kvstore.worker_rpc import WorkerCalls

KEY_VERSION: Final = 1
SECRET_KEY_BYTES: Final = 32

_log = structlog.stdlib.get_logger("services.kvstore")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one kvstore is to be. `cluster_key`: at least 16 bytes. `own_address`: where other
    kvstores reach it, asked when a log moves. `is_arena_removed`: the arena's file goes at a clean
    stop; else the next start finds it. `scrub`: how often stored bytes are checked; None: never.
    `nvme`: the colder tier; None: there is none. `watermarks`: when KV is copied there.
    """

    identity: Identity
    vocabulary_size: int | None
    tokens_max: int
    arena_bytes: int
    arena_dir: Path
    log_dir: Path
    cluster_key: bytes
    lease_s: float = 10.0
    ttl_s: float = 3600.0
    segments_max: int = 16
    is_arena_removed: bool = False
    quotas: Path | None = None
    scrub: Pace | None = None
    nvme: NvmePlan | None = None
    watermarks: Watermarks = field(default_factory=Watermarks)
    own_address: Callable[[], str] = lambda: ""
    planes: Planes = field(default_factory=Planes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """A running store without its server: register the servicer and serve."""

    runtime: Runtime
    servicer: KVStoreServicer
    operators: OperatorServicer
    devices: DeviceServicer
    sessions: SessionServicer
    measures: StoreMeasures
    moves: Moves


async def assemble(
    service: Service, plan: Plan, clock: WaitingClock, metrics: Metrics
) -> Assembled:
    """Builds a store and starts its parts. StartupError names what does not fit."""
    page_thread = ThreadPoolExecutor(1, thread_name_prefix="kvstore-pages")
    log_thread = ThreadPoolExecutor(1, thread_name_prefix="kvstore-log")
    await service.start("threads", Threads(page_thread, log_thread))
    lock = DirectoryLock(plan.log_dir)
    await service.start("log_lock", lock)
    loop = asyncio.get_running_loop()
    scan = await loop.run_in_executor(log_thread, scan_directory, plan.log_dir)
    found, nvme = await _open_tiers(service, plan, scan, page_thread)
    arena = found.arena
    measures = StoreMeasures(metrics)
    writer = _writer(plan, scan, log_thread, measures)
    runtime = _runtime(plan, arena, writer, page_thread, clock, nvme=nvme)
    await _start_quotas(service, plan, runtime, metrics)
    pages = runtime.pages
    await service.start("log", Loop(service, "log", writer.run, writer.end, writer.close))
    await service.start("pages", Loop(service, "pages", pages.run, pages.end, nothing))
    unindexed = take_in(runtime, found, plan.identity)
    service.spawn("index", index_rest(runtime, unindexed, clock, service.stopping))
    desk = AttachDesk(
        arena, plan.arena_dir / f"{plan.identity.node_id}.sock", clock.monotonic_s, _attach(runtime)
    )
    await service.start("attach", desk)
    await _start_clockwork(service, runtime, clock)
    if nvme is not None:
        await _start_nvme(service, plan, runtime, nvme, clock)
        follow_tiers(runtime, nvme, metrics)
    access = Access(CapabilityVerifier(plan.cluster_key, clock), runtime.core)
    channels = ChannelPool()
    await service.start("peers", channels)
    move_parts = MoveParts(
        runtime=runtime,
        access=access,
        identity=plan.identity,
        signer=CapabilitySigner(plan.cluster_key, clock),
        channels=channels,
        clock=clock,
        executor=page_thread,
        measures=MoveMeasures(metrics),
        spawn=service.spawn,
        own_address=plan.own_address,
        planes=plan.planes,
    )
    moves = await _start_moves(service, move_parts, found)
    calls = Calls(
        logs=LogCalls(runtime, access, plan.identity),
        appends=AppendCalls(runtime, access, measures),
        blobs=BlobCalls(runtime, access, plan.identity, measures, page_thread),
        prefixes=PrefixCalls(runtime, access, plan.identity),
        workers=WorkerCalls(runtime, access, plan.identity, desk),
        parking=ParkCalls(runtime, access),
        moves=moves,
    )
    measures.follow(runtime, lambda: calls.blobs.transfers_open)
    servicer = KVStoreServicer(runtime, access, calls)
    imports = ImportCalls(runtime, access, plan.identity, measures, page_thread)
    scrubber = await _start_scrub(service, plan, runtime, metrics)
    return Assembled(
        runtime=runtime,
        servicer=servicer,
        operators=OperatorServicer(runtime, access, imports, scrubber),
        devices=_devices(runtime, access, measures),
        sessions=SessionServicer(runtime, access),
        measures=measures,
        moves=moves,
    )


async def _open_tiers(
    service: Service, plan: Plan, scan: LogScan, thread: ThreadPoolExecutor
) -> tuple[Reattached, NvmeTier | None]:
    """The files that hold KV, and what the log came to over them."""
    loop = asyncio.get_running_loop()
    file = await loop.run_in_executor(thread, _open_nvme, plan)
    found = await loop.run_in_executor(
        thread, reattach, _arena_spec(plan), scan, file.file_id if file else None
    )
    nvme = NvmeTier(file, found.arena, service.clock) if file else None
    if nvme is not None:
        await service.start("nvme_file", Closing(nvme.close))
    ends = found.arena.remove if plan.is_arena_removed else found.arena.close
    await service.start("arena", Closing(ends))
    return found, nvme


async def _start_moves(service: Service, parts: MoveParts, found: Reattached) -> Moves:
    moves = assemble_moves(parts)
    moves.departures.adopt(
        ((log_id, moved.to_home) for log_id, moved in found.recovered.moved.items()),
        parts.clock.monotonic_s(),
    )
    await service.start("moves", moves)
    return moves


def _open_nvme(plan: Plan) -> NvmeFile | None:
    if plan.nvme is None:
        return None
    identity = plan.identity
    return open_file(plan.nvme, identity.node_id, identity.geometry, identity.label.kv_digest())


def _arena_spec(plan: Plan) -> ArenaSpec:
    return ArenaSpec(
        directory=plan.arena_dir,
        node_id=plan.identity.node_id,
        arena_bytes=plan.arena_bytes,
        geometry=plan.identity.geometry,
        kv_digest=plan.identity.label.kv_digest(),
        arena_id=new_arena_id(),
    )


def _runtime(
    plan: Plan,
    arena: Arena,
    writer: LogWriter,
    page_thread: ThreadPoolExecutor,
    clock: WaitingClock,
    *,
    nvme: NvmeTier | None,
) -> Runtime:
    limits = _limits(plan)
    journal = LogJournal(
        writer,
        limits,
        arena.spec.arena_id,
        plan.lease_s,
        nvme_id=nvme.file.file_id if nvme else None,
    )
    core = Core(
        limits=limits,
        pool=PagePool(arena.page_count, arena.generation_floor),
        leases=LeaseTable(plan.lease_s),
        journal=journal,
        slots=nvme.slots if nvme else None,
    )
    store = Store(core, _secret_of(plan.cluster_key))
    pages = PageWorker(
        arena, page_thread, lambda work: runtime.damaged(work), lambda work: runtime.filled(work)
    )
    runtime = Runtime(
        store=store,
        journal=journal,
        writer=writer,
        arena=arena,
        pages=pages,
        clock=clock,
        segments_max=plan.segments_max,
    )
    runtime.nvme = nvme
    return runtime


async def _start_quotas(service: Service, plan: Plan, runtime: Runtime, metrics: Metrics) -> None:
    if plan.quotas is None:
        show_no_quotas(runtime.core, runtime.arena.slot_bytes, metrics)
        return
    desk = QuotaDesk(runtime.core, runtime.arena.slot_bytes, plan.quotas, metrics)
    runtime.quotas = desk.book
    await service.start(
        "quotas",
        Repeating(service, "quotas", desk.look, service.clock, interval_s=LOOK_INTERVAL_S),
    )


def _devices(runtime: Runtime, access: Access, measures: StoreMeasures) -> DeviceServicer:
    """The device tier; it is empty until a worker brings device memory."""
    tier = runtime.devices = DeviceTier(runtime.core, runtime.quotas)
    measures.follow_devices(tier)
    return DeviceServicer(runtime, access, tier)


async def _start_clockwork(service: Service, runtime: Runtime, clock: WaitingClock) -> None:
    await service.start(
        "compaction",
        Repeating(
            service, "compaction", runtime.compactor.turn, clock, interval_s=COMPACTION_INTERVAL_S
        ),
    )
    # Also while draining: leases of dead workers must end for it to end.
    await service.start(
        "sweep", Repeating(service, "sweep", runtime.sweep, clock, interval_s=SWEEP_INTERVAL_S)
    )
    await service.start("drain", Draining(runtime))


async def _start_nvme(
    service: Service, plan: Plan, runtime: Runtime, nvme: NvmeTier, clock: WaitingClock
) -> None:
    looking = Repeating(
        service, "nvme_measure", nvme.measure_again, clock, interval_s=NVME_LOOK_INTERVAL_S
    )
    demoter = run_tiers(runtime, nvme, clock, plan.watermarks, service.spawn)
    demoting = Repeating(service, "demotion", demoter.turn, clock, interval_s=DEMOTION_INTERVAL_S)
    # What waits for the disk ends after the threads that would serve it.
    await service.start("nvme_measure", looking)
    await service.start("demotion", demoting)
    await service.start("nvme", nvme)


async def _start_scrub(
    service: Service, plan: Plan, runtime: Runtime, metrics: Metrics
) -> Scrubber:
    """In a thread of its own, so that nobody's page work waits for it."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="kvstore-scrub")
    await service.start("scrub_thread", Threads(thread))
    others = [] if runtime.nvme is None else [SlotTarget(runtime, runtime.nvme)]
    scrubber = Scrubber(runtime, ArenaTarget(runtime, thread), others, plan.scrub)
    scrubber.say()
    scrubber.follow(metrics)
    clock, interval_s = service.clock, scrubber.turn_s
    turns = Repeating(service, "scrub", scrubber.turn, clock, interval_s=interval_s)
    await service.start("scrub", turns)
    return scrubber


def _limits(plan: Plan) -> Limits:
    label = plan.identity.label
    return Limits(
        block_tokens=plan.identity.geometry.block_tokens,
        kv_digest=label.kv_digest(),
        tokenizer_hash=label.tokenizer,
        vocabulary_size=plan.vocabulary_size,
        tokens_max=plan.tokens_max,
        ttl_default_s=plan.ttl_s,
    )


def _attach(runtime: Runtime) -> Callable[[Any], None]:
    return lambda worker: runtime.workers.attach(worker)


def _writer(
    plan: Plan, scan: LogScan, executor: ThreadPoolExecutor, measures: StoreMeasures
) -> LogWriter:
    segments = SegmentWriter(
        plan.log_dir,
        store_id=scan.store_id or secrets.token_bytes(16),
        first_sequence=scan.next_sequence,
    )
    segments.durable_lsn = scan.newest_lsn
    return LogWriter(segments, executor, next_lsn=scan.newest_lsn + 1, on_flush=measures.flushed)


def _secret_of(cluster_key: bytes) -> Callable[[AnyScope], bytes]:
    key = cluster_key
    if len(key) < SECRET_KEY_BYTES:
        key = blake3(key).digest(SECRET_KEY_BYTES)
    return lambda scope: scope_secret(key, KEY_VERSION, scope)
