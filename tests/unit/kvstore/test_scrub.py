"""Which pages scrub takes, in which order and how fast; what damage does to who holds a page."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from baton.kv.numeric import TORCH_F32
from baton.testing.clock import ManualClock
from services.kvstore import scrub_targets
from services.kvstore.compaction import Compactor
from services.kvstore.operator_wire import scrub_to_proto
from services.kvstore.pages import Fence, PageState
from services.kvstore.publishing import PublishOrder
from services.kvstore.quotas import Tier
from services.kvstore.scrub import BATCH_PAGES_MAX, SCRUB_FENCE, Pace, Pass, batch_pages
from services.kvstore.scrub_targets import ArenaTarget
from services.kvstore.scrubbing import Scrubber
from services.kvstore.state import PageRow, Rows
from services.kvstore.store import Now, Store
from services.kvstore.workers import WorkerTable
from tests.unit.kvstore.cores import (
    BLOCK,
    DECODE,
    NOW,
    PREFILL,
    ListJournal,
    ListSink,
    WorkerModel,
    build_store,
    order,
)

PAGE_BYTES = 4096


def full(page: int, crc: int = 7) -> PageRow:
    """A full page."""
    return PageRow(page=page, page_generation=1, tokens=BLOCK, crc=crc)


def taken(rows: Rows) -> list[int]:
    """The pages of a pass over one table."""
    found = Pass(64, BLOCK)
    found.add(rows)
    found.begin()
    return found.take(64).pages.tolist()


def test_a_page_that_is_still_written_is_never_taken() -> None:
    """Neither a partial last page nor one whose copy is under way has a CRC to be judged by."""
    partial = PageRow(page=9, page_generation=1, tokens=3, slot_crcs=[1, 2, 3])
    assert taken(Rows([full(4), full(2), partial])) == [2, 4]
    rows = Rows([full(4)])
    rows.append(PageRow(page=5, page_generation=1, tokens=BLOCK), is_filling=True)
    assert taken(rows) == [4]
    rows.append(full(6))
    assert taken(rows) == [4], "what stands behind an unknown page waits for it"


def test_a_cut_row_of_a_full_page_is_checked_as_the_page_it_is() -> None:
    """A log cut inside a page keeps that page's CRC, and others may hold all of it."""
    cut = PageRow(page=3, page_generation=1, tokens=2, crc=77)
    found = Pass(64, BLOCK)
    found.add(Rows([full(1), cut]))
    found.begin()
    due = found.take(9)
    assert due.pages.tolist() == [1, 3]
    assert due.crcs.tolist() == [7, 77]


def test_a_page_of_many_logs_is_checked_once_a_pass() -> None:
    """Sharing costs scrub nothing."""
    found = Pass(64, BLOCK)
    for _ in range(5):
        found.add(Rows([full(1), full(2)]))
    found.begin()
    assert found.pages == 2
    taken_pages = [len(found.take(count)) for count in (1, 9, 9)]
    assert taken_pages == [1, 1, 0]
    assert found.is_over


def test_pace_spreads_a_pass_over_its_period_and_keeps_to_the_rate() -> None:
    """All are done when the period ends; a rate that is too low makes the pass longer."""
    pace = Pace(period_s=100.0, bytes_per_s=1 << 30)
    assert pace.due(50, PAGE_BYTES, 0.0) == 0
    assert pace.due(50, PAGE_BYTES, 50.0) == 25
    assert pace.due(50, PAGE_BYTES, 100.0) == pace.due(50, PAGE_BYTES, 1e6) == 50
    assert pace.due(0, PAGE_BYTES, 0.0) == 0
    slow = Pace(period_s=1.0, bytes_per_s=10 * PAGE_BYTES)
    assert slow.needs_s(1000, PAGE_BYTES) == pytest.approx(100.0)
    assert slow.due(1000, PAGE_BYTES, 2.0) == 20


def test_a_turn_makes_up_for_nothing_beyond_the_rate() -> None:
    """A process that stood still for an hour does not read an hour's pages at once."""
    pace = Pace(period_s=3600.0, bytes_per_s=100 * PAGE_BYTES)
    assert pace.most(PAGE_BYTES, 0.5) == 50
    assert pace.most(1 << 30, 0.5) == 1


async def test_a_late_turn_checks_no_more_than_the_rate_lets_it(bench: Bench) -> None:
    """The rest comes in the next turns."""
    bench.kept(LONG)
    bench.scrubber.pace = Pace(period_s=10.0, bytes_per_s=2 * PAGE_BYTES)
    await bench.scrubber.turn()
    bench.clock.advance(1000.0)
    seen = []
    for _ in range(3):
        await bench.scrubber.turn()
        seen.append(len(bench.seen))
    assert seen == [1, 2, 3]


def test_what_is_checked_at_once_is_bounded() -> None:
    """By pages and by bytes, and is never nothing."""
    assert batch_pages(4096) == BATCH_PAGES_MAX
    assert batch_pages(1 << 20) == 16
    assert batch_pages(1 << 30) == 1


# --- the shell, over cores without an arena -------------------------------------------------


class Bench:
    """A scrubber over pure cores; `bad` are the pages whose bytes are not those of their record."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pages: int = 64) -> None:
        self.store: Store = build_store(pages)
        self.clock = ManualClock()
        self.bad: set[int] = set()
        self.seen: list[int] = []
        self.meanwhile: Callable[[], None] = lambda: None
        runtime: Any = SimpleNamespace(
            core=self.store.core,
            store=self.store,
            clock=self.clock,
            arena=SimpleNamespace(slot_bytes=PAGE_BYTES),
            now=lambda: Now(monotonic_s=self.clock.monotonic_s(), wall_s=NOW.wall_s),
            order_work=lambda: None,
        )
        monkeypatch.setattr(scrub_targets, "damaged_pages", self.check)
        self.executor = ThreadPoolExecutor(1)
        pace = Pace(period_s=10.0, bytes_per_s=1 << 30)
        self.runtime = runtime
        self.target = ArenaTarget(runtime, self.executor)
        self.scrubber = Scrubber(runtime, self.target, [], pace)
        self.host = self.scrubber.progress(Tier.HOST)

    def check(self, _arena: object, due: Any) -> list[int]:
        """In place of the bytes."""
        pages = due.pages.tolist()
        self.seen += pages
        self.meanwhile()
        return [at for at, page in enumerate(pages) if page in self.bad]

    async def whole_pass(self) -> None:
        """From its begin to its end."""
        passes = self.host.passes
        async with asyncio.timeout(30.0):
            while self.host.passes == passes:
                await self.scrubber.turn()
                if self.host.passes == passes:
                    self.clock.advance(2.5)
        self.store.core.check_invariants()

    def kept(self, tokens: list[int]) -> bytes:
        """A log that was prefilled and ended."""
        one = order(tokens)
        self.store.open(one, PREFILL, NOW)
        WorkerModel(self.store, one.log_id, PREFILL).prefill(token=5)
        self.store.keeper.close(one.log_id, is_dropped=False, wall_s=NOW.wall_s)
        return one.log_id


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A scrubber and its store."""
    return Bench(monkeypatch)


LONG = list(range(10, 10 + 3 * BLOCK + 2))


async def test_a_pass_checks_every_full_page_once_and_the_next_begins_a_period_later(
    bench: Bench,
) -> None:
    """The partial tail is left alone."""
    log = bench.store.core.logs[bench.kept(LONG)]
    await bench.whole_pass()
    assert sorted(bench.seen) == sorted(log.rows.pages().tolist()[:3])
    assert bench.host.last_pages == 3
    seen = len(bench.seen)
    await bench.scrubber.turn()
    assert len(bench.seen) == seen, "its period is not over"
    await bench.whole_pass()
    assert len(bench.seen) == 2 * seen


async def test_damage_is_quarantined_and_every_holder_keeps_what_stands_before_it(
    bench: Bench,
) -> None:
    """Two logs share the page: both lose it and what follows, lookups end before it, and it is
    never granted again.
    """
    first = bench.kept(LONG)
    second = bench.kept([*LONG[: 3 * BLOCK], 99, 98])
    core = bench.store.core
    page = core.logs[first].rows[1].page
    assert core.logs[second].rows[1].page == page
    bench.bad = {page}
    await bench.whole_pass()
    for log_id in (first, second):
        log = core.logs[log_id]
        assert log.committed == BLOCK
        assert log.position > 3 * BLOCK, "tokens stay"
    assert core.pool.state(page) is PageState.QUARANTINED
    assert core.pool.fence_of(page) == SCRUB_FENCE
    one = order([*LONG, 1])
    assert bench.store.open(one, PREFILL, NOW).cached_tokens == BLOCK
    granted = core.pool.grant(core.pool.free_count)
    assert page not in granted
    for other in granted:
        core.pool.give_back(other)
    assert bench.host.damaged_pages == 1
    await bench.whole_pass()
    assert bench.host.damaged_pages == 1, "it is told once"


async def test_who_writes_a_log_with_a_damaged_page_is_stopped(bench: Bench) -> None:
    """Its writer reads the page at every step: it is fenced as one whose lease is over, and the
    next owner computes the rest again.
    """
    one = order(LONG)
    bench.store.open(one, PREFILL, NOW)
    worker = WorkerModel(bench.store, one.log_id, PREFILL)
    worker.prefill()
    log = worker.log
    generation = log.generation
    bench.bad = {log.rows[0].page}
    await bench.whole_pass()
    assert log.writer is None
    assert log.generation == generation + 1
    assert log.committed == 0
    assert log.expires_wall_s is not None
    taken = bench.store.home.take(
        log.log_id, log.generation, DECODE, TORCH_F32, pages=1, now_s=NOW.monotonic_s
    )
    assert taken.position == len(LONG) + 1


async def test_a_page_that_has_another_use_meanwhile_is_not_judged(bench: Bench) -> None:
    """What a pass knows of a page ends with the page's use."""
    log = bench.store.core.logs[bench.kept(LONG)]
    pages = set(log.rows.pages().tolist())
    await bench.scrubber.turn()
    assert bench.host.current is not None
    bench.store.home.give_up_kv(log, 0)
    bench.bad = set(range(64))
    await bench.whole_pass()
    assert pages.isdisjoint(bench.seen)
    assert bench.host.damaged_pages == 0


async def test_a_page_that_is_freed_under_the_check_is_not_judged(bench: Bench) -> None:
    """It is zeroed, perhaps granted again: its bytes say nothing of the log that had it."""
    log_id = bench.kept(LONG)
    log = bench.store.core.logs[log_id]
    bench.bad = set(range(64))
    bench.meanwhile = lambda: bench.store.home.give_up_kv(log, 0)
    await bench.whole_pass()
    assert bench.seen
    assert bench.host.damaged_pages == 0
    assert bench.store.core.pool.fence_of(bench.seen[0]) is None


async def test_a_published_prefix_with_a_damaged_page_is_withdrawn(bench: Bench) -> None:
    """Nobody is offered what is not whole."""
    log_id = bench.kept(LONG)
    publish(bench.store, log_id, 2 * BLOCK)
    bench.bad = {bench.store.core.logs[log_id].rows[1].page}
    await bench.whole_pass()
    assert not bench.store.core.prefixes.all()
    journal = bench.store.core.journal
    assert isinstance(journal, ListJournal)
    assert "revoked" in journal.calls


def publish(store: Store, log_id: bytes, position: int) -> None:
    """Offers the beginning of a log."""
    store.prefix_keeper.publish(
        PublishOrder(
            prefix_id="pfx-1",
            name="one",
            tenant="acme",
            tenants=(),
            log_id=log_id,
            position=position,
            text_hash=b"",
            ids_hash=b"",
            history_end=b"",
            text_bytes=0,
            template_digest=b"",
            model="tiny",
            expire_wall_s=None,
        ),
        NOW.wall_s,
    )


async def test_scrub_that_is_off_does_nothing(bench: Bench) -> None:
    """A period of zero."""
    bench.kept(LONG)
    idle = Scrubber(bench.runtime, bench.target, [], None)
    await idle.turn()
    assert bench.seen == []
    assert not scrub_to_proto(idle.tiers(), PAGE_BYTES, idle.pace).HasField("period")


async def test_the_report_says_what_was_done(bench: Bench) -> None:
    """Passes, pages, damage, and when."""
    bench.kept(LONG)
    await bench.whole_pass()
    scrubber = bench.scrubber
    (tier,) = scrub_to_proto(scrubber.tiers(), PAGE_BYTES, scrubber.pace).tiers
    assert (tier.tier, tier.passes, tier.checked_pages, tier.damaged_pages) == ("host", 1, 3, 0)
    assert tier.last_pass_pages == 3
    assert tier.last_pass_time.seconds == int(NOW.wall_s)


def test_quarantine_survives_everything_but_the_store() -> None:
    """No worker's end and no renewal lifts scrub's fence."""
    store = build_store(8)
    pages = store.core.pool.grant(2)
    store.core.pool.commit_many(np.array(pages))
    store.core.pool.fence(pages[0], SCRUB_FENCE)
    store.core.pool.drop_many(pages)
    for slot in range(4):
        store.keeper.worker_gone(slot, NOW.wall_s)
    assert store.core.pool.counts().quarantined == 1


def test_compaction_tells_of_writers_fences_and_not_of_scrubs() -> None:
    """A record of scrub's would keep a page from a store that may find it sound."""
    sink = ListSink()
    store = build_store(8, sink=sink)
    pages = store.core.pool.grant(2)
    writers = Fence(worker_slot=1, log_id=bytes(range(16)), generation=3)
    store.core.pool.fence(pages[0], writers)
    store.core.pool.commit(pages[1])
    store.core.pool.fence(pages[1], SCRUB_FENCE)
    unused: Any = None
    journal: Any = store.core.journal
    compactor = Compactor(
        core=store.core,
        journal=journal,
        writer=unused,
        workers=WorkerTable(),
        clock=unused,
        segments_max=2,
    )
    assert compactor._tell_fences_again() == {writers}
    assert [address.log_id for _, _, address in sink.records] == [writers.log_id]
