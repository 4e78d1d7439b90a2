"""A kvstore of two tiers in one process: real arena, real NVMe file and threads, real cores.

Owns the workers that write KV into it (a number that follows from all tokens before it, so that one
wrong slot makes everything behind it wrong) and the check of every byte against it. Restarts it
from its records, with its arena or with a fresh one.
"""

from __future__ import annotations

import asyncio
import os
import zlib
from collections.abc import AsyncIterator, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from baton.clock import SystemClock
from baton.errors import Reason, ServiceError
from baton.ids import new_log_id
from baton.kv.blocks import scope_secret
from baton.kv.digests import chunk_list_digest, history_at
from baton.kv.layout import KvDtype, KvGeometry, page_crc, slot_crcs
from baton.kv.manifest import Manifest, Segment
from baton.kv.numeric import TORCH_F32
from services.kvstore.arena import Arena, ArenaSpec
from services.kvstore.core import Core, Limits
from services.kvstore.lease import LeaseTable
from services.kvstore.log.journal import LogJournal
from services.kvstore.page_worker import PageWorker
from services.kvstore.pages import PagePool
from services.kvstore.prefixes import Prefix
from services.kvstore.publishing import PublishOrder
from services.kvstore.restart import Standing, index_some, restore
from services.kvstore.state import FillPage, LogState, PageRow, Writer
from services.kvstore.store import Now, Store
from services.kvstore.tiers.demotion import Demoter, Watermarks
from services.kvstore.tiers.disk_queue import DiskQueue
from services.kvstore.tiers.nvme_file import NvmeFile, NvmeSpec
from services.kvstore.tiers.promotion import Asked, Promoter, Want
from services.kvstore.tiers.slots import Slots
from services.kvstore.tiers.wants import wants_of_open
from services.kvstore.writes import AppendItem, SealEnd
from tests.unit.kvstore.cores import KV, TOKENIZER, ListSink, order, recovered_from

BLOCK: Final = 8
GEOMETRY: Final = KvGeometry(
    layers=1, kv_heads=1, head_dim=32, head_dim_v=32, block_tokens=BLOCK, dtype=KvDtype.F32
)
ROW: Final = 32
MARK: Final = 1 << 24
LEASE_S: Final = 1e6
CLOCK: Final = SystemClock()
WRITERS: Final = [Writer(worker_id=f"w{slot}", slot=slot, incarnation=1) for slot in range(3)]
EXPECTED: Final = frozenset({Reason.PAGES_EXHAUSTED, Reason.PROMPT_TOO_LONG})


def kv_chain(tokens: Sequence[int]) -> list[int]:
    """The KV number of each position: that of the token behind all tokens before it."""
    numbers: list[int] = []
    kv = 0
    for token in tokens:
        kv = zlib.crc32(int(token).to_bytes(4, "little"), kv) % MARK
        numbers.append(kv)
    return numbers


class TierWorld:
    """One node: files that outlive it, and its store while it runs."""

    def __init__(self, directory: Path, *, pages: int, slots: int) -> None:
        self.directory = directory
        self.pages, self.slots = pages, slots
        self.sink = ListSink()
        self.starts = 0
        self.counts: dict[str, int] = {}

    # --- life -------------------------------------------------------------------------------

    @asynccontextmanager
    async def running(self, marks: Watermarks) -> AsyncIterator[None]:
        """The store from a restart to its end."""
        self._open_files()
        thread = ThreadPoolExecutor(1)
        self.page_worker = PageWorker(self.arena, thread, self._damaged)
        self.queue = DiskQueue(self.file, self.arena, CLOCK, threads=2)
        self.queue.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks, self._loads = tasks, []
                running = tasks.create_task(self.page_worker.run())
                self._build(marks)
                try:
                    yield
                finally:
                    await asyncio.gather(*self._loads)
                    self.page_worker.end()
                    await running
        finally:
            self.queue.stop()
            thread.shutdown()
            self.file.close()
            self.arena.close()

    def lose_arena(self) -> None:
        """The host was rebooted."""
        for path in self.directory.glob("arena-*.kv"):
            path.unlink()

    def _open_files(self) -> None:
        self.starts += 1
        self.arena = Arena.open(
            ArenaSpec(
                directory=self.directory,
                node_id="n0",
                arena_bytes=self.pages * GEOMETRY.slot_bytes,
                geometry=GEOMETRY,
                kv_digest=KV,
                arena_id=self.starts.to_bytes(16, "little"),
            )
        )
        self.file = NvmeFile.open(
            NvmeSpec(
                directory=self.directory,
                node_id="n0",
                nvme_bytes=self.slots * GEOMETRY.slot_bytes,
                geometry=GEOMETRY,
                kv_digest=KV,
                file_id=b"nvme".ljust(16),
            )
        )

    def _build(self, marks: Watermarks) -> None:
        limits = Limits(block_tokens=BLOCK, kv_digest=KV, tokenizer_hash=TOKENIZER)
        arena_id, nvme_id = self.arena.spec.arena_id, self.file.file_id
        self.journal = LogJournal(self.sink, limits, arena_id, LEASE_S, nvme_id=nvme_id)
        self.core = Core(
            limits=limits,
            pool=PagePool(self.pages, self.arena.generation_floor),
            leases=LeaseTable(LEASE_S),
            journal=self.journal,
        )
        self.core.slots = Slots(self.file.slot_count, self.file.generation_floor)
        self.store = Store(self.core, lambda scope: scope_secret(bytes(32), 1, scope))
        standing = Standing(
            is_same_arena=self.arena.is_reattached,
            locked_slots=frozenset(),
            model="m",
            class_text=lambda _: TORCH_F32.text,
        )
        recovered = recovered_from(self.sink.records, arena_id, nvme_id)
        assert not recovered.damaged
        restored = restore(self.store, recovered, standing, self.now())
        index_some(self.store, restored.unindexed, 1 << 20)
        self.page_worker.soil(restored.dirty, lambda page: self.core.pool.state(page) == 0)
        self.demoter = Demoter(
            self.store.placement,
            self.core,
            self.queue,
            ready=self.page_worker.ready,
            order_work=self.order_work,
            marks=marks,
        )
        self.promoter = Promoter(
            self.store.placement,
            self.queue,
            CLOCK,
            self.file.slot_bytes,
            ready=self.page_worker.ready,
            order_work=self.order_work,
            spawn=self._spawn,
        )
        self.order_work()

    def _spawn(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        self._loads.append(self._tasks.create_task(work, name=name))

    def now(self) -> Now:
        """Both clocks."""
        return Now(monotonic_s=CLOCK.monotonic_s(), wall_s=CLOCK.wall_s())

    def order_work(self) -> None:
        """As the runtime does."""
        self.page_worker.order(self.core.take_work())

    def _damaged(self, work: FillPage) -> None:
        self.store.home.discard_tail(work)
        self.order_work()

    def count(self, name: str) -> None:
        """One more of something the test is to have seen."""
        self.counts[name] = self.counts.get(name, 0) + 1

    # --- workers ----------------------------------------------------------------------------

    async def open(
        self, tokens: list[int], writer: Writer, *, loads: bool = True, **fields: Any
    ) -> LogState | None:
        """A log, after what it would begin with was loaded; None where there is no room."""
        wanted = order(tokens, log_id=new_log_id(), **fields)
        if loads:
            await self.load(wants_of_open(self.store, wanted), len(tokens))
        try:
            self.store.open(wanted, writer, self.now())
        except ServiceError as error:
            self.order_work()
            if error.reason not in {*EXPECTED, Reason.BLOCK_NOT_FOUND}:
                raise
            self.count(f"refused {error.reason}")
            return None
        log = self.core.logs[wanted.log_id]
        await self.settle(log)
        return log

    async def load(self, wants: list[Want], tokens: int, rate: float | None = None) -> int:
        """Promotes."""
        return await self.promoter.prepare(wants, Asked(prompt_tokens=tokens, tokens_per_s=rate))

    async def settle(self, log: LogState) -> None:
        """Waits for the page work of a log."""
        self.order_work()
        await self.page_worker.ready(log.rows.pages())
        await self.page_worker.ready(list(log.granted))
        self.order_work()

    def put(self, page: int, slot: int, kv: int, position: int) -> None:
        """A worker writes one KV slot."""
        numbers = self.arena.page(page).view("<f4")
        numbers[slot * ROW] = kv
        numbers[(BLOCK + slot) * ROW] = position + 1

    def checkpoint(self, log: LogState, end: int) -> None:
        """The log's writer computes KV up to `end`, as far as its pages go."""
        first, spare = log.committed, list(log.granted.items())
        end = min(end, (len(log.rows) + len(spare)) * BLOCK)
        if end <= first:
            return
        numbers = kv_chain(log.tokens[:end])
        rows: list[PageRow] = []
        for block in range(first // BLOCK, -(-end // BLOCK)):
            tokens = min(BLOCK, end - block * BLOCK)
            if block < len(log.rows):
                page, generation = log.rows[block].page, log.rows[block].page_generation
            else:
                page, generation = spare.pop(0)
            for position in range(max(first, block * BLOCK), block * BLOCK + tokens):
                self.put(page, position % BLOCK, numbers[position], position)
            is_full = tokens == BLOCK
            content = self.arena.page(page)
            rows.append(
                PageRow(
                    page=page,
                    page_generation=generation,
                    tokens=tokens,
                    crc=page_crc(GEOMETRY, content) if is_full else None,
                    slot_crcs=[] if is_full else list(slot_crcs(GEOMETRY, content, 0, tokens)),
                )
            )
        span = (first, end)
        now_s = self.now().monotonic_s
        self.store.writes.checkpoint(log.log_id, log.generation, span, rows, now_s)

    def seal(self, log: LogState, token: int, chunks: list[Any]) -> None:
        """Ends prefill."""
        digest = chunk_list_digest(KV, chunks)
        end = SealEnd(token_id=token, finish_reason=None)
        self.store.seal(log.log_id, log.generation, digest, end, self.now().monotonic_s)

    def prefill(self, log: LogState, token: int) -> bool:
        """The rest of the prompt; False where pages are missing."""
        self.checkpoint(log, log.prompt_tokens)
        if log.committed < log.prompt_tokens:
            return False
        self.seal(log, token, log.chunks)
        return True

    async def append(self, log: LogState, token: int, finish: str | None = None) -> bool:
        """One token of a sealed log; computes what is missing first."""
        assert log.writer is not None
        needed = -(-log.position // BLOCK) - len(log.rows) - len(log.granted)
        if needed > 0:
            try:
                self.store.home.grant(log.log_id, log.generation, log.writer.worker_id, needed)
            except ServiceError as error:
                if error.reason not in EXPECTED:
                    raise
                self.order_work()
                return False
            await self.settle(log)
        self.checkpoint(log, log.position - 1)
        if log.committed < log.position - 1:
            return False
        position = log.committed
        if position % BLOCK == 0:
            page, generation = next(iter(log.granted.items()))
        else:
            page, generation = log.rows[-1].page, log.rows[-1].page_generation
        slot = position % BLOCK
        self.put(page, slot, kv_chain(log.tokens)[position], position)
        content = self.arena.page(page)
        item = AppendItem(
            log_id=log.log_id,
            generation=log.generation,
            position=log.position,
            token_id=token,
            page=page,
            page_generation=generation,
            slot_crc=next(iter(slot_crcs(GEOMETRY, content, slot, 1))),
            page_crc=page_crc(GEOMETRY, content) if slot == BLOCK - 1 else None,
            finish_reason=finish,
        )
        self.store.writes.append(item, log.writer.worker_id, self.now().monotonic_s)
        return True

    def publish(self, log: LogState, position: int, name: str) -> Prefix:
        """A published prefix of its first positions."""
        return self.store.prefix_keeper.publish(
            PublishOrder(
                prefix_id=name,
                name=name,
                tenant=log.tenant,
                tenants=("*",),
                log_id=log.log_id,
                position=position,
                text_hash=b"",
                ids_hash=b"",
                history_end=b"",
                text_bytes=0,
                template_digest=b"",
                model="m",
                expire_wall_s=None,
            ),
            self.now().wall_s,
        )

    def manifest_of(self, prefix: Prefix) -> Manifest:
        """A history of one published prefix."""
        ids = list(prefix.token_ids)
        segment = Segment(
            log_id=prefix.log_id,
            generation=0,
            from_position=0,
            to_position=prefix.position,
            history_start=history_at(KV, BLOCK, []),
            history_end=history_at(KV, BLOCK, ids),
            kv_digest=KV,
            tokenizer_hash=TOKENIZER,
            block_tokens=BLOCK,
            numeric_class_id=prefix.numeric_class_id,
        )
        return Manifest(segments=(segment,))

    # --- checks -----------------------------------------------------------------------------

    def check_host(self, owner: LogState | Prefix) -> None:
        """Every byte that counts in the host is what its tokens make it."""
        tokens = owner.token_ids if isinstance(owner, Prefix) else owner.tokens
        self._check(owner.rows, tokens, lambda page: self.arena.page(page))

    def check_copies(self, owner: LogState | Prefix) -> None:
        """And on NVMe."""
        tokens = owner.token_ids if isinstance(owner, Prefix) else owner.tokens
        data = self.file.spec.path.read_bytes()
        size, start = GEOMETRY.slot_bytes, 4096

        def content(slot: int) -> Any:
            begin = start + slot * size
            return np.frombuffer(data[begin : begin + GEOMETRY.page_bytes], dtype=np.uint8).copy()

        self._check(owner.cold, tokens, content)

    def _check(self, rows: Sequence[PageRow], tokens: Sequence[int], content: Any) -> None:
        if not rows:
            return
        numbers = kv_chain(tokens)
        for block, row in enumerate(rows):
            page = content(row.page)
            if row.crc is not None:
                assert page_crc(GEOMETRY, page) == row.crc, (block, row)
            else:
                found = list(slot_crcs(GEOMETRY, page, 0, row.tokens))
                assert found == row.slot_crcs, (block, row)
            floats = page.view("<f4")
            for slot in range(row.tokens):
                position = block * BLOCK + slot
                assert floats[slot * ROW] == numbers[position], (block, slot, row)
                assert floats[(BLOCK + slot) * ROW] == position + 1, (block, slot, row)

    def owners(self) -> list[LogState | Prefix]:
        """Everybody who has KV."""
        return [*self.core.logs.values(), *self.core.prefixes.all()]

    def flip(self, slot: int, at: int) -> None:
        """Changes one byte of a slot on disk."""
        offset = 4096 + slot * GEOMETRY.slot_bytes + at % GEOMETRY.page_bytes
        with self.file.spec.path.open("r+b") as file:
            file.seek(offset)
            (byte,) = file.read(1)
            file.seek(offset)
            file.write(bytes([byte ^ 0x10]))
            file.flush()
            os.fsync(file.fileno())

    def check_all(self, *, is_disk_bad: bool = False) -> None:
        """Conservation, and every byte of both tiers; of a bad disk only of the host."""
        self.core.check_invariants()
        for owner in self.owners():
            self.check_host(owner)
            if not is_disk_bad:
                self.check_copies(owner)
