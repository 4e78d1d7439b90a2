"""Putting one kvstore together: recovery, arena, cores, log, calls, as parts of a service.

Owns the order of construction and of the parts' end (the log is closed last, after nobody can
submit). Used by the process and by in-process tests; reads no configuration.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import structlog
from blake3 import blake3

from baton.capability import CapabilityVerifier
from baton.clock import WaitingClock
from baton.errors import StartupError
from baton.kv.blocks import Scope, scope_secret
from baton.lifecycle import Service, every
from baton.metrics import Metrics
from services.kvstore.access import Access
from services.kvstore.append_rpc import AppendCalls
from services.kvstore.arena import Arena, ArenaSpec
from services.kvstore.attach import AttachDesk
from services.kvstore.blob_rpc import BlobCalls
from services.kvstore.core import Core, Limits
from services.kvstore.identity import Identity
from services.kvstore.lease import LeaseTable
from services.kvstore.log.journal import LogJournal
from services.kvstore.log.reader import LogScan, scan_directory
from services.kvstore.log.recovery import Recovered, recover
from services.kvstore.log.segments import SegmentWriter
from services.kvstore.log.store_records import CloseReason
from services.kvstore.log.writer import LogWriter
from services.kvstore.log_rpc import LogCalls
from services.kvstore.measures import StoreMeasures
from services.kvstore.page_worker import PageWorker
from services.kvstore.pages import PagePool
from services.kvstore.prefix_rpc import PrefixCalls
from services.kvstore.runtime import SWEEP_INTERVAL_S, Runtime
from services.kvstore.servicer import Calls, KVStoreServicer, drain
from services.kvstore.state import LogState
from services.kvstore.store import Store
from services.kvstore.worker_rpc import WorkerCalls

KEY_VERSION: Final = 1
SECRET_KEY_BYTES: Final = 32
DRAIN_S: Final = 8.0
LOCK_FILE: Final = "lock"

_log = structlog.stdlib.get_logger("services.kvstore")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one kvstore is to be. `cluster_key`: at least 16 bytes."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """A running store without its server: register the servicer and serve."""

    runtime: Runtime
    servicer: KVStoreServicer
    measures: StoreMeasures


async def assemble(
    service: Service, plan: Plan, clock: WaitingClock, metrics: Metrics
) -> Assembled:
    """Builds a store and starts its parts. StartupError names what does not fit."""
    page_thread = ThreadPoolExecutor(1, thread_name_prefix="kvstore-pages")
    log_thread = ThreadPoolExecutor(1, thread_name_prefix="kvstore-log")
    await service.start("threads", _Threads(page_thread, log_thread))
    lock = _DirectoryLock(plan.log_dir)
    await service.start("log_lock", lock)
    loop = asyncio.get_running_loop()
    scan = await loop.run_in_executor(log_thread, scan_directory, plan.log_dir)
    recovered = recover(scan)
    spec = ArenaSpec(
        directory=plan.arena_dir,
        node_id=plan.identity.node_id,
        arena_bytes=plan.arena_bytes,
        geometry=plan.identity.geometry,
        kv_digest=plan.identity.label.kv_digest(),
        arena_id=secrets.token_bytes(16),
    )
    arena = await loop.run_in_executor(page_thread, Arena.create, spec)
    await service.start("arena", _Closing(arena.close))
    measures = StoreMeasures(metrics)
    writer = _writer(plan, scan, log_thread, measures)
    limits = _limits(plan)
    journal = LogJournal(writer, limits, spec.arena_id, plan.lease_s)
    core = Core(
        limits=limits,
        pool=PagePool(spec.page_count),
        leases=LeaseTable(plan.lease_s),
        journal=journal,
    )
    store = Store(core, _secret_of(plan.cluster_key))
    pages = PageWorker(arena, page_thread, lambda work: runtime.damaged(work))
    runtime = Runtime(
        store=store,
        journal=journal,
        writer=writer,
        arena=arena,
        pages=pages,
        clock=clock,
        segments_max=plan.segments_max,
    )
    await service.start("log", _Loop(service, "log", writer.run, writer.end, writer.close))
    await service.start("pages", _Loop(service, "pages", pages.run, pages.end, _nothing))
    adopt(runtime, recovered)
    desk = AttachDesk(
        arena, plan.arena_dir / f"{plan.identity.node_id}.sock", clock.monotonic_s, _attach(runtime)
    )
    await service.start("attach", desk)
    await service.start("sweep", _Sweeping(service, runtime, clock))
    await service.start("drain", _Draining(runtime))
    access = Access(CapabilityVerifier(plan.cluster_key, clock), core)
    calls = Calls(
        logs=LogCalls(runtime, access, plan.identity),
        appends=AppendCalls(runtime, access, measures),
        blobs=BlobCalls(runtime, access, plan.identity, measures, page_thread),
        prefixes=PrefixCalls(runtime, access, plan.identity),
        workers=WorkerCalls(runtime, access, plan.identity, desk),
    )
    measures.follow(runtime, lambda: calls.blobs.transfers_open)
    servicer = KVStoreServicer(runtime, access, calls)
    return Assembled(runtime=runtime, servicer=servicer, measures=measures)


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


def _secret_of(cluster_key: bytes) -> Callable[[Scope], bytes]:
    key = cluster_key
    if len(key) < SECRET_KEY_BYTES:
        key = blake3(key).digest(SECRET_KEY_BYTES)
    return lambda scope: scope_secret(key, KEY_VERSION, scope)


def adopt(runtime: Runtime, recovered: Recovered) -> None:
    """Takes in what the log holds: tokens are back, KV is not, open logs get a new generation."""
    core, now = runtime.core, runtime.now()
    for sequence, log_ids in recovered.living.items():
        runtime.writer.adopt(sequence, (log_ids & set(recovered.logs)) | recovered.damaged)
    core.tombstones.update(recovered.dropped)
    for log_id in recovered.damaged:
        _drop_damaged(runtime, log_id)
    for log in recovered.logs.values():
        if log.tenant and not _suits(core, log):
            continue
        core.logs[log.log_id] = log
        log.last_used_s = now.monotonic_s
        log.expires_wall_s = now.wall_s + log.ttl_s
        if log.is_open:
            runtime.store.keeper.raise_generation(log)
    runtime.recovered_writers.update(
        {log_id: name for log_id, name in recovered.writers.items() if log_id in core.logs}
    )
    if recovered.logs or recovered.damaged:
        _log.info(
            "log_recovered",
            logs=len(core.logs),
            ended=len(recovered.dropped),
            damaged=len(recovered.damaged),
        )


def _suits(core: Core, log: LogState) -> bool:
    """Tokens of another vocabulary mean nothing here."""
    size = core.limits.vocabulary_size
    return size is None or not log.tokens or max(log.tokens) < size


def _drop_damaged(runtime: Runtime, log_id: bytes) -> None:
    """A log whose records are damaged is gone, loudly; its writers are told that they are stale."""
    generation = runtime.core.tombstones.get(log_id, 0) + 1
    runtime.core.tombstones[log_id] = generation
    runtime.journal.closed_by_id(log_id, generation, CloseReason.DAMAGED)
    _log.error("log_given_up", log_id=log_id.hex())


async def _nothing() -> None:
    return


class _Part:
    """A part that needs nothing until it is stopped."""

    async def start(self) -> None:
        return

    async def drain(self) -> None:
        return

    async def stop(self) -> None:
        return


class _Threads(_Part):
    """The named threads; they end after everything that uses them."""

    def __init__(self, *threads: ThreadPoolExecutor) -> None:
        self._threads = threads

    async def stop(self) -> None:
        for thread in self._threads:
            thread.shutdown(wait=False)


class _Closing(_Part):
    """Closes something at the end."""

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close

    async def stop(self) -> None:
        self._close()


class _Sweeping(_Part):
    """The clock's work, also while draining: leases of dead workers must end for it to end."""

    def __init__(self, service: Service, runtime: Runtime, clock: WaitingClock) -> None:
        self._service = service
        self._runtime = runtime
        self._clock = clock
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()

    async def start(self) -> None:
        self._service.spawn("sweep", self._work())

    async def stop(self) -> None:
        self._stopping.set()
        await self._ended.wait()

    async def _work(self) -> None:
        try:
            await every(
                SWEEP_INTERVAL_S, self._runtime.sweep, clock=self._clock, stopping=self._stopping
            )
        finally:
            self._ended.set()


class _Draining(_Part):
    """Refuses new logs, then waits a while for the written ones."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def drain(self) -> None:
        await drain(self._runtime, DRAIN_S)


class _DirectoryLock(_Part):
    """One kvstore per log directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._descriptor: int | None = None

    async def start(self) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._directory / LOCK_FILE
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise StartupError(
                f"a running kvstore writes its log in {self._directory}",
                hint="stop it, or give this one another --log-dir",
            ) from error
        self._descriptor = descriptor

    async def stop(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class _Loop(_Part):
    """A loop that is asked to end and waited for, and what is closed behind it."""

    def __init__(
        self,
        service: Service,
        name: str,
        run: Callable[[], Coroutine[Any, Any, None]],
        end: Callable[[], None],
        close: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        self._service = service
        self._name = name
        self._run = run
        self._end = end
        self._close = close
        self._ended = asyncio.Event()
        self._has_failed = False

    async def start(self) -> None:
        self._service.spawn(self._name, self._work())

    async def stop(self) -> None:
        self._end()
        await self._ended.wait()
        if not self._has_failed:
            await self._close()

    async def _work(self) -> None:
        self._has_failed = True
        try:
            await self._run()
            self._has_failed = False
        finally:
            self._ended.set()
