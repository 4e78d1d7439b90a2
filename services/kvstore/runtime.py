"""The running store: pure cores, log, arena and clock put together on one event loop.

Owns the order in which an operation becomes real: core first (atomic, in memory), then its records
to the log and its page work to the page worker, then the answer, at the log's ack level. Owns the
once-in-a-while work: leases, TTLs, dead workers. Never speaks protobuf.
"""

from __future__ import annotations

from typing import Final

import structlog

from baton.clock import Clock
from baton.tracing import span
from services.kvstore.arena import Arena
from services.kvstore.compaction import Compactor
from services.kvstore.log.journal import LogJournal
from services.kvstore.log.writer import LogWriter
from services.kvstore.maps import Maps
from services.kvstore.page_worker import PageNumbers, PageWorker
from services.kvstore.pages import Fence
from services.kvstore.quota_book import QuotaBook
from services.kvstore.state import AckLevel, FillPage
from services.kvstore.store import Now, Store
from services.kvstore.tiers.demotion import Demoter
from services.kvstore.tiers.device import DeviceTier
from services.kvstore.tiers.nvme_tier import NvmeTier
from services.kvstore.tiers.promotion import Promoter
from services.kvstore.workers import Former, WorkerTable

SWEEP_INTERVAL_S: Final = 0.5
OWN_STOP_MIN_S: Final = 0.5

_log = structlog.stdlib.get_logger("services.kvstore")


class Runtime:
    """One kvstore's moving parts. `segments_max` bounds the log directory."""

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
        self.maps = Maps(self.core)
        self.former: dict[bytes, Former] = {}
        self.quotas: QuotaBook | None = None
        self.devices: DeviceTier | None = None
        self.nvme: NvmeTier | None = None
        self.promoter: Promoter | None = None
        self.demoter: Demoter | None = None
        self.compactor = Compactor(
            core=self.core,
            journal=journal,
            writer=writer,
            workers=self.workers,
            clock=clock,
            segments_max=segments_max,
        )
        self._swept_s = clock.monotonic_s()
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

    async def ready(self, pages: PageNumbers, level: AckLevel) -> None:
        """As `acked`, and the pages are zeroed or filled, as they were ordered to be."""
        self.order_work()
        with span("pages_ready", pages=len(pages)):
            await self.pages.ready(pages)
        with span("log_ack"):
            await self.writer.acked(level)

    async def readable(self, log_id: bytes, pages: PageNumbers) -> None:
        """What a reader of the log is told is acked, and the pages it is told of are filled."""
        self.order_work()
        await self.pages.ready(pages)
        await self.writer.settled(log_id)

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

    def filled(self, work: FillPage) -> None:
        """A copy was made."""
        self.store.home.filled(work)

    async def sweep(self) -> None:
        """What the clock does; every `SWEEP_INTERVAL_S`."""
        self.progress += 1
        now = self.now()
        self._excuse_own_stop(now.monotonic_s)
        self.find_dead_workers(now.wall_s)
        for log_id in self.store.keeper.expire_leases(now.monotonic_s, now.wall_s):
            _log.warning("lease_expired", log_id=log_id.hex())
        self.store.session_keeper.expire(now.wall_s)
        self.store.keeper.expire_logs(now.wall_s)
        self.maps.expire(now.monotonic_s)
        self.store.prefix_keeper.expire(now.wall_s)
        if self.devices is not None:
            self.devices.turn(now.monotonic_s)
        self.order_work()

    def _excuse_own_stop(self, now_s: float) -> None:
        """Workers are not to blame for the time in which this process itself stood still."""
        stopped_s = now_s - self._swept_s - SWEEP_INTERVAL_S
        self._swept_s = now_s
        if stopped_s > OWN_STOP_MIN_S:
            _log.warning("store_stood_still", seconds=round(stopped_s, 3))
            self.core.leases.extend(stopped_s)

    def find_dead_workers(self, wall_s: float) -> None:
        """A slot whose lock is gone cannot write any more: fence its logs, free its pages."""
        for slot in self.workers.watched_slots():
            if self.arena.is_slot_locked(slot):
                continue
            worker_id = self.workers.gone(slot)
            lost = self.store.keeper.worker_gone(slot, wall_s)
            self.maps.worker_gone(slot)
            if worker_id is not None:
                if self.devices is not None:
                    self.devices.gone(worker_id)
                self.core.leases.forget_worker(worker_id)
                _log.warning("worker_gone", worker_id=worker_id, slot=slot, logs=len(lost))
        self.order_work()

    def release_named(self, slot: int, named: set[tuple[bytes, int]]) -> list[Fence]:
        """A renewal names what its worker writes: lifts the fences it lets go of."""
        released = self.workers.released_by(slot, named, self.core.pool.fences())
        for fence in released:
            self.store.keeper.lift(fence)
        self.order_work()
        return released
