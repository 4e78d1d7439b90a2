"""Stores with bytes for the model tests: a page work that is done at once, workers that write real
KV, writers that were fenced and write on.

Owns the doubles; asserts what a writer may expect of its pages, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from baton.kv.blocks import scope_secret
from baton.kv.digests import ChunkPage, chunk_list_digest
from baton.kv.layout import page_crc, slot_crc, slot_crcs
from baton.kv.numeric import TORCH_F32
from services.kvstore.core import Core, Limits
from services.kvstore.lease import LeaseTable
from services.kvstore.log.journal import LogJournal
from services.kvstore.moving.arrival import Arrivals
from services.kvstore.moving.departure import Departures
from services.kvstore.page_worker import PageWorker
from services.kvstore.pages import PagePool, PageState
from services.kvstore.restart import Standing, index_some, restore
from services.kvstore.rows import PageRow
from services.kvstore.state import LogState, Writer
from services.kvstore.store import Now, Store
from services.kvstore.writes import AppendItem, SealEnd, chunk_of
from tests.cluster.memory import BLOCK, GEOMETRY, PAGES, ArenaMemory, kv_of
from tests.unit.kvstore.cores import KV, TOKENIZER, ListSink, recovered_from

GENERATION_BITS: Final = 20
LEASE_S: Final = 10.0
LIMITS: Final = Limits(block_tokens=BLOCK, kv_digest=KV, tokenizer_hash=TOKENIZER)
ARENA_ID_BYTES: Final = 16


@dataclass(slots=True)
class Ghost:
    """A fenced writer that has not noticed: what it would still write."""

    writer: Writer
    log_id: bytes
    generation: int
    spots: list[tuple[int, int]]


@dataclass(slots=True)
class BytesSite:
    """One store over real bytes, its log, and both halves of moving."""

    name: str
    starts: int = 1
    sink: ListSink = field(default_factory=ListSink)
    arena: ArenaMemory = field(default_factory=lambda: ArenaMemory(bytes(ARENA_ID_BYTES)))
    store: Store = field(init=False)
    departures: Departures = field(init=False)
    arrivals: Arrivals = field(init=False)
    damaged: int = 0
    # Worker slots whose process has this arena mapped.
    alive: frozenset[int] = frozenset(range(3))
    _pages: PageWorker = field(init=False)

    def __post_init__(self) -> None:
        self._build()

    def _build(self) -> None:
        journal = LogJournal(self.sink, LIMITS, self.arena.spec.arena_id, LEASE_S)
        core = Core(
            limits=LIMITS,
            pool=PagePool(PAGES, self.starts << GENERATION_BITS),
            leases=LeaseTable(LEASE_S),
            journal=journal,
        )
        self.store = Store(core, lambda scope: scope_secret(bytes(32), 1, scope))
        self.departures = Departures(core, self.store.home, self.store.keeper, journal.snapshot_of)
        self.arrivals = Arrivals(core, self.store.home, self.store.chains, lease_s=10.0)
        any_arena: Any = self.arena
        any_executor: Any = None
        self._pages = PageWorker(
            any_arena, any_executor, self._on_damaged, lambda work: self.store.home.filled(work)
        )

    def _on_damaged(self, work: Any) -> None:
        self.damaged += 1
        self.store.home.discard_tail(work)

    def work(self) -> None:
        """Page work, at once and in order."""
        while work := self.store.core.take_work():
            self._pages._finish(self._pages._work(work))

    def restart(self, now: Now, *, is_same_arena: bool, locked: frozenset[int]) -> None:
        """A crash after everything was acked, and what the log gives back."""
        self.starts += 1
        # After a fresh arena the workers map that one.
        self.alive = locked if is_same_arena else frozenset(range(3))
        if not is_same_arena:
            self.arena = ArenaMemory(self.starts.to_bytes(ARENA_ID_BYTES, "little"))
        self._build()
        recovered = recovered_from(self.sink.records, self.arena.spec.arena_id)
        assert recovered.damaged == set()
        standing = Standing(
            is_same_arena=is_same_arena,
            locked_slots=locked,
            model="m",
            class_text=lambda _class_id: TORCH_F32.text,
        )
        restored = restore(self.store, recovered, standing, now)
        index_some(self.store, restored.unindexed, 1 << 30)
        moved = ((log_id, one.to_home) for log_id, one in recovered.moved.items())
        self.departures.adopt(moved, now.monotonic_s)
        # Nobody is granted a page before it was zeroed.
        for page in restored.dirty:
            assert self.store.core.pool.state(page) is PageState.FREE
            self.arena.zero(page)
        self.work()


class Hand:
    """The writer of one log: writes KV into its pages and reports them."""

    def __init__(self, site: BytesSite, log_id: bytes, writer: Writer) -> None:
        self.site, self.log_id, self.writer = site, log_id, writer
        self.generation = self.log.generation
        self.chunks: list[list[ChunkPage]] = []
        for page in self.log.granted:
            assert site.arena.is_blank(page, 0), "a granted page holds foreign bytes"
        tail = self.log.committed % BLOCK
        if tail:
            assert site.arena.is_blank(self.log.rows[-1].page, tail), "a tail that is not fresh"

    @property
    def log(self) -> LogState:
        """The log as the store has it."""
        return self.site.store.core.logs[self.log_id]

    def is_current(self) -> bool:
        """Still the writer."""
        log = self.site.store.core.logs.get(self.log_id)
        return log is not None and log.generation == self.generation and log.writer is not None

    def table(self) -> list[tuple[int, int]]:
        """(page, page generation) of each block it may write."""
        log = self.log
        return [
            *((row.page, row.page_generation) for row in log.rows),
            *log.granted.items(),
        ]

    def room(self) -> int:
        """Positions its pages have slots for."""
        return len(self.table()) * BLOCK

    def ghost(self) -> Ghost:
        """What it would write if nobody told it that its time is over."""
        log, table = self.log, self.table()
        spots = [
            (table[position // BLOCK][0], position % BLOCK)
            for position in range(log.committed, self.room())
        ]
        return Ghost(self.writer, self.log_id, self.generation, spots)

    def grant(self, pages: int) -> None:
        """More pages, blank ones."""
        site = self.site
        given = site.store.home.grant(self.log_id, self.generation, self.writer.worker_id, pages)
        site.work()
        for one in given:
            assert site.arena.is_blank(one.page, 0), "a granted page holds foreign bytes"

    def write(self, first: int, end: int) -> None:
        """Puts the KV of positions [first, end) where it belongs."""
        log, arena, table = self.log, self.site.arena, self.table()
        kv = 0
        for position in range(end):
            kv = kv_of(log.tokens[position], kv)
            if position >= first:
                arena.put(table[position // BLOCK][0], position % BLOCK, kv, position)

    def checkpoint(self, end: int, now_s: float) -> None:
        """Writes and commits up to `end`."""
        log, arena, table = self.log, self.site.arena, self.table()
        first = log.committed
        self.write(first, end)
        rows = []
        for index in range(first // BLOCK, -(-end // BLOCK)):
            page, page_generation = table[index]
            tokens = min(BLOCK, end - index * BLOCK)
            is_full = tokens == BLOCK
            content = arena.page(page)
            rows.append(
                PageRow(
                    page=page,
                    page_generation=page_generation,
                    tokens=tokens,
                    crc=page_crc(GEOMETRY, content) if is_full else None,
                    slot_crcs=[] if is_full else list(slot_crcs(GEOMETRY, content, 0, tokens)),
                )
            )
        self.chunks.append(chunk_of(rows, first, BLOCK))
        done = self.site.store.writes.checkpoint(
            self.log_id, self.generation, (first, end), rows, now_s
        )
        assert done == end

    def seal(self, token: int | None, finish: str | None, now_s: float) -> None:
        """Ends prefill."""
        digest = chunk_list_digest(KV, self.chunks)
        end = SealEnd(token_id=token, finish_reason=finish)
        self.site.store.seal(self.log_id, self.generation, digest, end, now_s)
        self.site.work()

    def item(self, token: int, finish: str | None) -> AppendItem:
        """The next append, its slot written."""
        log = self.log
        position = log.position
        self.write(position - 1, position)
        page, page_generation = self.table()[(position - 1) // BLOCK]
        slot = (position - 1) % BLOCK
        content = self.site.arena.page(page)
        return AppendItem(
            log_id=self.log_id,
            generation=self.generation,
            position=position,
            token_id=token,
            page=page,
            page_generation=page_generation,
            slot_crc=slot_crc(GEOMETRY, content, slot),
            page_crc=page_crc(GEOMETRY, content) if slot == BLOCK - 1 else None,
            finish_reason=finish,
        )
