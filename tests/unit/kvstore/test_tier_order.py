"""What is demoted first, what is evicted first, and what a full or failing NVMe tier does."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from services.kvstore.publishing import PublishOrder
from services.kvstore.state import LogState
from services.kvstore.store import Store
from services.kvstore.tiers.copies import Failure, Outcome, SlotCopy
from services.kvstore.tiers.demotion import Demoter, Watermarks, logs_due, prefixes_due
from services.kvstore.tiers.slots import Slots
from tests.unit.kvstore.cores import BLOCK, NOW, build_store, fill_work, open_log, take

PAGES = 40
MARKS = Watermarks(low=0.5, high=0.7)


_texts = itertools.count(1)


class Disk:
    """Writes at once, or fails as it is told."""

    def __init__(self, *outcomes: Outcome) -> None:
        self.outcomes = list(outcomes)
        self.written: list[SlotCopy] = []

    def write(self, copies: Sequence[SlotCopy]) -> Disk:
        """All of them come to the same."""
        self._now = self.outcomes.pop(0) if self.outcomes else None
        self._count = len(copies)
        if self._now is None:
            self.written += copies
        return self

    async def done(self) -> Sequence[Outcome]:
        """That."""
        return (self._now,) * self._count


async def _ready(_pages: object) -> None:
    return


def store_of(slots: int, pages: int = PAGES) -> Store:
    """A store with an NVMe tier."""
    store = build_store(pages=pages)
    store.core.slots = Slots(slots)
    return store


def demoter(store: Store, disk: Disk, marks: Watermarks = MARKS) -> Demoter:
    """Over that disk."""
    return Demoter(
        store.placement,
        store.core,
        disk,
        ready=_ready,
        order_work=lambda: fill_work(store),
        marks=marks,
    )


def kept(store: Store, blocks: int, used_s: float, **fields: str) -> LogState:
    """A finished log of its own text, used last then."""
    text = next(_texts)
    model = open_log(store, [text] * (blocks * BLOCK), **fields)
    log = model.prefill(finish="stop")
    store.keeper.close(log.log_id, is_dropped=False, wall_s=NOW.wall_s)
    log.last_used_s = used_s
    store.core.logs.add(log)
    return log


def publish(store: Store, log: LogState, tokens: int) -> None:
    """Its first tokens."""
    store.prefix_keeper.publish(
        PublishOrder(
            prefix_id="p1",
            name="p1",
            tenant=log.tenant,
            tenants=("*",),
            log_id=log.log_id,
            position=tokens,
            text_hash=b"",
            ids_hash=b"",
            history_end=b"",
            text_bytes=0,
            template_digest=b"",
            model="m",
            expire_wall_s=None,
        ),
        NOW.wall_s,
    )


def copy(store: Store, log: LogState) -> None:
    """All of it."""
    while (order := store.placement.begin_copy(log, 4)) is not None:
        store.placement.finish_copy(order, (None,) * len(order.copies))


async def test_demotion_waits_for_the_low_watermark_and_stops_at_the_high_one() -> None:
    """The logs used longest ago, until what is free or copied reaches the share that is wanted."""
    store = store_of(slots=PAGES)
    logs = [kept(store, 4, used_s=float(age)) for age in range(4)]
    assert store.core.pool.free_count == PAGES - 16
    assert logs_due(store.core, MARKS) == []
    logs += [kept(store, 4, used_s=float(age)) for age in range(4, 8)]
    # 8 are free, 28 are wanted: five logs of four pages.
    assert logs_due(store.core, MARKS) == logs[:5]
    disk = Disk()
    await demoter(store, disk).turn()
    assert [log.is_copied for log in logs] == [True] * 5 + [False] * 3
    assert len(disk.written) == 20
    assert store.core.pool.free_count == 8, "copying frees nothing"
    assert logs_due(store.core, MARKS) == []
    store.core.check_invariants()


async def test_what_is_written_or_not_sealed_is_not_copied() -> None:
    """A writer's log is no candidate; nor is a prompt whose worker died."""
    store = store_of(slots=PAGES)
    open_log(store, [1] * (2 * BLOCK)).checkpoint(2 * BLOCK)
    orphan = open_log(store, [2] * (2 * BLOCK))
    orphan.checkpoint(2 * BLOCK)
    store.keeper.raise_generation(orphan.log)
    disk = Disk()
    await demoter(store, disk, Watermarks(low=1.0, high=1.0)).turn()
    assert not disk.written


async def test_room_is_made_from_copied_logs_first() -> None:
    """However old the others are: nothing is lost as long as something copied is there."""
    store = store_of(slots=PAGES)
    old = [kept(store, 4, used_s=float(age)) for age in range(3)]
    copied = [kept(store, 4, used_s=100.0 + age) for age in range(2)]
    for log in copied:
        copy(store, log)
    fill_work(store)
    store.keeper.make_room(PAGES - 16)
    assert [log.committed for log in copied] == [0, 4 * BLOCK], "the one used longest ago"
    assert all(log.committed for log in old)
    assert copied[0].cold.tokens == 4 * BLOCK
    store.keeper.make_room(PAGES - 8)
    assert [log.committed for log in copied] == [0, 0]
    assert [bool(log.committed) for log in old] == [False, True, True]
    store.core.check_invariants()


async def test_a_published_prefix_is_copied_at_once_and_leaves_the_host_before_kv_is_lost() -> None:
    """Under pressure it is on NVMe only; it is still published."""
    store = store_of(slots=PAGES)
    source = kept(store, 4, used_s=1.0)
    publish(store, source, 3 * BLOCK + 2)
    (prefix,) = store.core.prefixes.all()
    assert prefixes_due(store.core) == [prefix]
    await demoter(store, Disk()).turn()
    assert prefix.cold.tokens == prefix.position
    store.keeper.close(source.log_id, is_dropped=True, wall_s=NOW.wall_s)
    other = kept(store, 4, used_s=0.0)
    store.keeper.make_room(PAGES - 5)
    assert prefix.rows == ()
    assert other.committed == 4 * BLOCK
    assert store.core.prefixes.get("p1") is prefix
    order = store.placement.begin_load(prefix, prefix.position, 0, 8)
    assert order is not None
    assert store.placement.finish_load(order, (None,) * 4, 1.0) == 4
    assert sum(row.tokens for row in prefix.rows) == prefix.position
    store.core.check_invariants()


async def test_a_full_tier_drops_the_oldest_copies_and_never_the_ones_of_later_use() -> None:
    """It does not grow; a log that was used before all that are there gets no copies."""
    store = store_of(slots=10)
    old, newer = kept(store, 4, used_s=1.0), kept(store, 4, used_s=2.0)
    for log in (old, newer):
        copy(store, log)
        store.home.give_up_kv(log, 0)
    newest = kept(store, 4, used_s=3.0)
    copy(store, newest)
    assert newest.is_copied
    assert (old.cold.tokens, newer.cold.tokens) == (2 * BLOCK, 4 * BLOCK), "its last blocks go"
    oldest = kept(store, 4, used_s=0.5)
    assert store.placement.begin_copy(oldest, 8) is None
    copy(store, kept(store, 4, used_s=4.0))
    assert (old.cold.tokens, newer.cold.tokens) == (0, 2 * BLOCK)
    store.core.check_invariants()


@pytest.mark.parametrize("failure", [Failure.IO, Failure.FULL])
async def test_a_write_that_fails_turns_demotion_off_and_nothing_else(failure: Failure) -> None:
    """The store goes on, what is copied stays readable, the reason is kept."""
    store = store_of(slots=PAGES)
    first, second = kept(store, 4, used_s=1.0), kept(store, 4, used_s=2.0)
    disk = Disk(None, failure)
    one = demoter(store, disk, Watermarks(low=1.0, high=1.0))
    await one.turn()
    assert one.off is failure
    assert (first.is_copied, second.cold.tokens) == (True, 0)
    await one.turn()
    assert len(disk.written) == 4
    store.home.give_up_kv(first, 0)
    order = store.placement.begin_load(first, 4 * BLOCK, 0, 8)
    assert order is not None
    assert store.placement.finish_load(order, (None,) * 4, 1.0) == 4
    kept(store, 4, used_s=3.0)
    store.core.check_invariants()


async def test_a_page_that_is_damaged_when_it_is_copied_is_given_up() -> None:
    """Damage is not carried to the other tier."""
    store = store_of(slots=PAGES)
    log = kept(store, 4, used_s=1.0)
    order = store.placement.begin_copy(log, 8)
    assert order is not None
    assert store.placement.finish_copy(order, (None, None, Failure.DAMAGED, None)) == 2
    assert (log.committed, log.cold.tokens) == (2 * BLOCK, 2 * BLOCK)
    store.core.check_invariants()


async def test_a_slot_that_cannot_be_read_is_given_up_by_all_who_have_it() -> None:
    """And never used again."""
    store = store_of(slots=PAGES)
    log = kept(store, 4, used_s=1.0)
    copy(store, log)
    publish(store, log, 3 * BLOCK)
    (prefix,) = store.core.prefixes.all()
    copy(store, prefix)  # type: ignore[arg-type]  # an owner is either
    assert prefix.cold.pages().tolist() == log.cold.pages().tolist()[:3], "the slots are shared"
    store.home.give_up_kv(log, 0)
    slot = log.cold[1].page
    order = store.placement.begin_load(log, 4 * BLOCK, 0, 8)
    assert order is not None
    # The prefix is still in the host: its pages are the log's again, and only one block is read.
    assert len(order.copies) == 1
    store.placement.finish_load(order, (None,), 1.0)
    assert log.rows.pages().tolist()[:3] == [row.page for row in prefix.rows]
    assert store.placement.slot_damaged(slot) == [log, prefix]
    assert (log.cold.tokens, prefix.cold.tokens) == (BLOCK, BLOCK)
    store.core.check_invariants()


async def test_what_is_taken_and_written_again_cuts_its_copies() -> None:
    """KV that was recomputed is other bytes than its copies; those before it stay."""
    store = store_of(slots=PAGES)
    model = open_log(store, [3] * (3 * BLOCK + 2))
    log = model.prefill(token=5)
    store.keeper.raise_generation(log)
    copy(store, log)
    assert log.cold.tokens == 3 * BLOCK + 2
    store.home.give_up_kv(log, 1)
    writer = take(store, log.log_id, pages=3)
    assert log.cold.tokens == 3 * BLOCK + 2
    writer.checkpoint(3 * BLOCK + 2)
    assert log.cold.tokens == BLOCK
    store.core.check_invariants()


async def test_truncation_and_drop_cut_and_drop_copies() -> None:
    """No slot is held for a position that is gone."""
    store = store_of(slots=PAGES)
    log = kept(store, 4, used_s=1.0)
    copy(store, log)
    store.truncate(log.log_id, log.generation, 2 * BLOCK + 3, NOW)
    assert log.cold.tokens == 2 * BLOCK + 2
    store.keeper.close(log.log_id, is_dropped=True, wall_s=NOW.wall_s)
    slots = store.core.slots
    assert slots is not None
    assert slots.free_count == PAGES
    store.core.check_invariants()


def test_without_a_tier_nothing_is_due_and_nothing_is_wanted() -> None:
    """A store of one tier behaves as ever."""
    store = build_store(pages=PAGES)
    log = kept(store, 4, used_s=1.0)
    assert not log.is_copied
    assert store.placement.begin_copy(log, 4) is None
    assert store.placement.missing_tokens(log, 100) == 0
    store.core.check_invariants()
