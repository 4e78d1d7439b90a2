"""How fast does KV come back from the NVMe tier, against what the disk itself gives?

One conversation's pages (the bundled model's size, 368,640 bytes each) are demoted, given up in the
host and promoted again, by the store's own code: slots granted and held, every page compared with
its CRC, records made, free pages zeroed beside it. In turn with it, in the same run, the disk
alone: the same file with direct I/O, the same runs of slots, as many threads, into the same pages,
and nothing else. Ratios are medians of the turns' ratios: each of ours over the mean of the disk's
before and after it.

`promotion_gbps`, `nvme_disk_read_gbps`, `promotion_vs_disk`; `demotion_gbps`,
`nvme_disk_write_gbps`, `demotion_vs_disk` (both with fdatasync). None where the temporary
directory's file system does not take direct I/O: a cache would be measured (TMPDIR names another).
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np

from baton.clock import SystemClock
from baton.kv.blocks import Scope, scope_secret
from baton.kv.crc import ByteArray
from baton.kv.layout import KvDtype, KvGeometry, page_crc
from baton.kv.numeric import TORCH_BF16
from services.kvstore.arena import Arena, ArenaSpec
from services.kvstore.core import Core, Limits
from services.kvstore.importing import Importer, ImportOrder
from services.kvstore.lease import LeaseTable
from services.kvstore.log.format import RecordAddress, RecordType
from services.kvstore.log.journal import LogJournal
from services.kvstore.page_worker import PageWorker
from services.kvstore.pages import PagePool
from services.kvstore.state import LogState
from services.kvstore.store import Now, Store
from services.kvstore.tiers.demotion import Demoter, Watermarks
from services.kvstore.tiers.disk_queue import RUN_BYTES_MAX, THREADS
from services.kvstore.tiers.nvme_tier import NvmePlan, NvmeTier, open_file
from services.kvstore.tiers.promotion import Asked, Promoter, Want

Values = dict[str, float | None]

# 30 layers x (K, V) x 3 heads x 64 x 2 bytes: the bundled model in bf16.
GEOMETRY: Final = KvGeometry(
    layers=30, kv_heads=3, head_dim=64, head_dim_v=64, block_tokens=16, dtype=KvDtype.BF16
)
SLOT: Final = GEOMETRY.slot_bytes
MEMORY: Final = "/dev/shm"  # noqa: S108 - a directory of its own in it
RUN_SLOTS: Final = max(1, RUN_BYTES_MAX // SLOT)
BYTES: Final = 384 << 20
BYTES_QUICK: Final = 96 << 20
TURNS: Final = 7
TURNS_QUICK: Final = 3
NAMES: Final = (
    "promotion_gbps",
    "nvme_disk_read_gbps",
    "promotion_vs_disk",
    "demotion_gbps",
    "nvme_disk_write_gbps",
    "demotion_vs_disk",
)


def measure(quick: bool) -> Values:
    """See the module; under 30 s, quick under 5 s."""
    pages = (BYTES_QUICK if quick else BYTES) // SLOT
    turns = TURNS_QUICK if quick else TURNS
    with (
        tempfile.TemporaryDirectory(prefix="bench-nvme-") as disk,
        tempfile.TemporaryDirectory(prefix="bench-nvme-", dir=MEMORY) as memory,
        ThreadPoolExecutor(1, thread_name_prefix="pages") as executor,
    ):
        site = _Site(Path(disk), Path(memory), pages, executor)
        try:
            return asyncio.run(_measure(site, pages, turns))
        finally:
            site.remove()


def table(values: Values) -> str:
    """The figures for people."""
    if values.get("promotion_vs_disk") is None:
        return "NVMe tier: not measured, the temporary directory takes no direct I/O (set TMPDIR)"
    lines = [f"NVMe tier, pages of {SLOT} bytes, direct I/O, {THREADS} threads; GB/s"]
    for ours, disk, ratio, label in (
        ("promotion_gbps", "nvme_disk_read_gbps", "promotion_vs_disk", "promotion, verified"),
        (
            "demotion_gbps",
            "nvme_disk_write_gbps",
            "demotion_vs_disk",
            "demotion, verified, on disk",
        ),
    ):
        lines.append(
            f"  {label:28}{values[ours]:7.2f}   the disk alone {values[disk]:7.2f}   "
            f"{values[ratio]:5.2f} of it"
        )
    return "\n".join(lines)


class _NoLog:
    """Takes the records and keeps none."""

    def submit(self, kind: RecordType, payload: bytes, address: RecordAddress) -> None:
        """Forgets it."""


class _Site:
    """The parts of a store that move pages between tiers, and one kept log."""

    def __init__(self, disk: Path, memory: Path, pages: int, executor: ThreadPoolExecutor) -> None:
        clock = SystemClock()
        limits = Limits(
            block_tokens=GEOMETRY.block_tokens, kv_digest=bytes(16), tokenizer_hash=bytes(8)
        )
        self.arena = Arena.open(
            ArenaSpec(
                directory=memory,
                node_id="bench",
                arena_bytes=pages * SLOT,
                geometry=GEOMETRY,
                kv_digest=bytes(16),
                arena_id=bytes(16),
            )
        )
        self.file = open_file(
            NvmePlan(directory=disk, nvme_bytes=pages * SLOT), "bench", GEOMETRY, bytes(16)
        )
        self.nvme = NvmeTier(self.file, self.arena, clock)
        self.core = Core(
            limits=limits,
            pool=PagePool(pages),
            leases=LeaseTable(10.0),
            journal=LogJournal(_NoLog(), limits, bytes(16), 10.0, nvme_id=self.file.file_id),
            slots=self.nvme.slots,
        )
        self.store = Store(self.core, lambda scope: scope_secret(bytes(32), 1, scope))
        self.work = PageWorker(self.arena, executor, lambda _: None, lambda _: None)
        self.now = Now(monotonic_s=clock.monotonic_s(), wall_s=clock.wall_s())
        self.promoter = Promoter(
            self.store.placement,
            self.nvme.queue,
            clock,
            SLOT,
            ready=self.work.ready,
            order_work=self.order_work,
            spawn=self.spawn,
        )
        # All of the arena is one log: it is due at once.
        self.demoter = Demoter(
            self.store.placement,
            self.core,
            self.nvme.queue,
            ready=self.work.ready,
            order_work=self.order_work,
            marks=Watermarks(low=2.0, high=2.0),
        )
        self.group: asyncio.TaskGroup | None = None

    def spawn(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Runs a promotion."""
        assert self.group is not None
        self.group.create_task(work, name=name)

    def order_work(self) -> None:
        """As `Runtime.order_work`."""
        self.work.order(self.core.take_work())

    def keep_log(self, pages: int) -> LogState:
        """A log that fills the arena, of random bytes."""
        importer = Importer(self.store)
        rows = importer.reserve(b"\2" * 16, pages * GEOMETRY.block_tokens, "bench")
        draw = np.random.default_rng(7)
        for row in rows:
            self.arena.page(row.page)[:] = draw.integers(0, 256, SLOT, dtype=np.uint8)
            row.crc = page_crc(GEOMETRY, self.arena.page(row.page))
        order = ImportOrder(
            log_id=b"\2" * 16,
            request_id="bench",
            body_hash=bytes(32),
            tenant="bench",
            scope=Scope(tenant="bench"),
            label_digest=bytes(16),
            numeric_class=TORCH_BF16.text,
            numeric_class_id=TORCH_BF16.id,
            ttl_s=None,
        )
        ids = [index % 1000 for index in range(pages * GEOMETRY.block_tokens)]
        return importer.adopt(order, rows, ids, self.now)

    def remove(self) -> None:
        """Ends the threads and removes both files."""
        if self.nvme.queue.stop():
            self.file.remove()
            self.arena.remove()


async def _measure(site: _Site, pages: int, turns: int) -> Values:
    if not site.file.is_direct:
        return dict.fromkeys(NAMES)
    site.nvme.queue.start()
    async with asyncio.TaskGroup() as group:
        site.group = group
        working = group.create_task(site.work.run())
        log = site.keep_log(pages)
        demoted, written = await _demotions(site, log, pages, turns)
        promoted, read = await _promotions(site, log, pages, turns)
        site.work.end()
        await working
    size = pages * SLOT
    return {
        "promotion_gbps": size / statistics.median(promoted) / 1e9,
        "nvme_disk_read_gbps": size / statistics.median(read) / 1e9,
        "promotion_vs_disk": _median_ratio(promoted, read),
        "demotion_gbps": size / statistics.median(demoted) / 1e9,
        "nvme_disk_write_gbps": size / statistics.median(written) / 1e9,
        "demotion_vs_disk": _median_ratio(demoted, written),
    }


def _median_ratio(ours: Sequence[float], disk: Sequence[float]) -> float:
    """Rates: each of ours over the mean of the disk's before and after it."""
    return statistics.median(
        (before + after) / 2 / own for own, before, after in zip(ours, disk, disk[1:], strict=False)
    )


async def _demotions(
    site: _Site, log: LogState, pages: int, turns: int
) -> tuple[list[float], list[float]]:
    """Seconds of demotions, and of the disk alone: one more, around them."""
    ours: list[float] = []
    disk = [await _timed(asyncio.to_thread(_whole_file, site, pages, site.file.write_run))]
    for _ in range(turns):
        site.store.placement.cut_copies(log, 0)
        ours.append(await _timed(_demote(site, log)))
        disk.append(await _timed(asyncio.to_thread(_whole_file, site, pages, site.file.write_run)))
    return ours, disk


async def _demote(site: _Site, log: LogState) -> None:
    while not log.is_copied:
        await site.demoter.turn()
        assert site.demoter.off is None, site.demoter.off


async def _promotions(
    site: _Site, log: LogState, pages: int, turns: int
) -> tuple[list[float], list[float]]:
    # The disk alone wrote every page to the slot of its number; the log's are where they were.
    site.store.placement.cut_copies(log, 0)
    await _demote(site, log)
    ours: list[float] = []
    disk: list[float] = []
    for turn in range(turns + 1):
        site.store.home.give_up_kv(log, 0)
        site.order_work()
        await site.work.settled()
        disk.append(await _timed(asyncio.to_thread(_whole_file, site, pages, site.file.read_run)))
        if turn < turns:
            ours.append(await _timed(_promote(site, log)))
            assert log.committed == log.position
    return ours, disk


async def _promote(site: _Site, log: LogState) -> None:
    want = Want(owner=log, tokens=log.position)
    await site.promoter.prepare([want], Asked(prompt_tokens=log.position, tokens_per_s=None))


async def _timed(work: Awaitable[object]) -> float:
    began_s = time.perf_counter()
    await work
    return time.perf_counter() - began_s


def _whole_file(site: _Site, pages: int, call: Callable[[int, Sequence[ByteArray]], None]) -> None:
    """The disk alone: every slot from or into the page of its number, by as many threads."""

    def one(first: int) -> None:
        count = min(RUN_SLOTS, pages - first)
        call(first, [site.arena.slot(page) for page in range(first, first + count)])

    with ThreadPoolExecutor(THREADS) as threads:
        for _ in threads.map(one, range(0, pages, RUN_SLOTS)):
            pass
    site.file.flush()
