"""The running store: pure cores, log, arena and clock put together on one event loop.

Owns the order in which an operation becomes real: core first (atomic, in memory), then its records
to the log and its page work to the page worker, then the answer, at the log's ack level. Owns the
once-in-a-while work: leases, TTLs, dead workers, retention. Never speaks protobuf.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import structlog

from baton.clock import Clock
from baton.errors import ServiceError
from baton.tracing import span
from services.kvstore.arena import Arena
from services.kvstore.log.journal import LogJournal
from services.kvstore.log.writer import LogWriter
from services.kvstore.page_worker import PageWorker
from services.kvstore.pages import Fence
from services.kvstore.state import AckLevel, FillPage
from services.kvstore.store import Now, Store
from services.kvstore.workers import WorkerTable

SWEEP_INTERVAL_S: Final = 0.5

_log = structlog.stdlib.get_logger("services.kvstore")


class Runtime:
    """One kvstore's moving parts. `log_bytes_max` bounds the log directory."""

    def __init__(
        self,
        *,
        store: Store,
        journal: LogJournal,
        writer: LogWriter,
        arena: Arena,
        pages: PageWorker,
        clock: Clock,
        segments_max: int,
    ) -> None:
        self.store = store
        self.core = store.core
        self.journal = journal
        self.writer = writer
        self.arena = arena
        self.pages = pages
        self.clock = clock
        self.workers = WorkerTable()
        self.recovered_writers: dict[bytes, str] = {}
        self._segments_max = segments_max
        self.progress = 0

    def now(self) -> Now:
        """Both clocks."""
        return Now(monotonic_s=self.clock.monotonic_s(), wall_s=self.clock.wall_s())

    def order_work(self) -> None:
        """Hands the page work of the last operation on; call it after every one."""
        self.pages.order(self.core.take_work())

    async def acked(self, level: AckLevel) -> None:
        """Returns when all that the cores recorded so far has reached `level`."""
        self.order_work()
        with span("log_ack"):
            await self.writer.acked(level)

    async def ready(self, pages: Collection[int], level: AckLevel) -> None:
        """As `acked`, and the pages are zeroed or filled, as they were ordered to be."""
        self.order_work()
        with span("pages_ready", pages=len(pages)):
            await self.pages.ready(pages)
        with span("log_ack"):
            await self.writer.acked(level)

    def damaged(self, work: FillPage) -> None:
        """A copy's source did not verify: the log goes on from the block before."""
        _log.error(
            "kv_damaged",
            log_id=work.log_id.hex(),
            block_index=work.block_index,
            pages=[source.row.page for source in work.sources],
        )
        self.store.home.discard_tail(work)
        self.order_work()

    async def sweep(self) -> None:
        """What the clock does; every `SWEEP_INTERVAL_S`."""
        self.progress += 1
        now = self.now()
        self.find_dead_workers(now.wall_s)
        for log_id in self.store.keeper.expire_leases(now.monotonic_s, now.wall_s):
            _log.warning("lease_expired", log_id=log_id.hex())
        self.store.keeper.expire_logs(now.wall_s)
        self.store.prefix_keeper.expire(now.wall_s)
        self.order_work()
        await self._retain()

    def find_dead_workers(self, wall_s: float) -> None:
        """A slot whose lock is gone cannot write any more: fence its logs, free its pages."""
        for slot in self.workers.watched_slots():
            if self.arena.is_slot_locked(slot):
                continue
            worker_id = self.workers.gone(slot)
            lost = self.store.keeper.worker_gone(slot, wall_s)
            if worker_id is not None:
                self.core.leases.forget_worker(worker_id)
                _log.warning("worker_gone", worker_id=worker_id, slot=slot, logs=len(lost))
        self.order_work()

    def release_named(self, slot: int, named: set[tuple[bytes, int]]) -> list[Fence]:
        """A renewal names what its worker writes: lifts the fences it lets go of."""
        released = self.workers.released_by(slot, named, self.core.pool.fences())
        for fence in released:
            self.core.pool.lift(fence)
        self.order_work()
        return released

    async def _retain(self) -> None:
        """Frees old segments; over the bound, rewrites what keeps the oldest as snapshots."""
        if self.writer.segment_count > self._segments_max:
            for log_id in self.writer.oldest_living():
                log = self.core.logs.get(log_id)
                if log is not None:
                    self.journal.snapshot(log)
            try:
                await self.writer.acked(AckLevel.DISK)
            except ServiceError as error:
                _log.error("retention_failed", reason=error.reason.value)
                return
        freed = await self.writer.free_oldest()
        if freed:
            _log.info("segments_freed", count=freed)
