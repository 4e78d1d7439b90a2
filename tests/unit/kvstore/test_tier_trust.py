"""What may be believed across the tiers: other tenants' prefixes, distrusted and damaged KV."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from baton.kv.blocks import Scope
from services.kvstore.distrust import Distrust
from services.kvstore.keeper import leave_host
from services.kvstore.log.recovery import Recovered
from services.kvstore.log.state import Parent
from services.kvstore.log.store_records import CloseReason
from services.kvstore.prefixes import Prefix
from services.kvstore.state import FillPage, LogState, Rows, SlotSource
from services.kvstore.store import ForkOrder, Store
from services.kvstore.tiers import cold_room
from services.kvstore.tiers.copies import Failure
from services.kvstore.tiers.demotion import Watermarks
from services.kvstore.tiers.wants import wants_of_open
from tests.unit.kvstore.cores import (
    BLOCK,
    NOW,
    SCOPE,
    ListSink,
    fill_work,
    new_id,
    order,
    recovered_from,
    take,
)
from tests.unit.kvstore.test_cold_lookups import anywhere, kept, load
from tests.unit.kvstore.test_places import ARENA_ID, NVME_ID, came_back, tiered_store
from tests.unit.kvstore.test_tier_order import Disk, demoter, publish

SYSTEM = [(5 * index) % 40 + 1 for index in range(4 * BLOCK + 3)]
GUEST: dict[str, Any] = {"tenant": "guest", "scope": Scope(tenant="guest")}


def copied(store: Store, owner: LogState | Prefix) -> None:
    """All of it."""
    while (batch := store.placement.begin_copy(owner, 8)) is not None:
        store.placement.finish_copy(batch, (None,) * len(batch.copies))


def forked(store: Store, log: LogState, position: int) -> LogState:
    """A fork that nobody writes."""
    wanted = ForkOrder(log_id=new_id(), request_id="f", scope=SCOPE, sampling=None)
    parent = Parent(log_id=log.log_id, generation=log.generation, position=position)
    return store.fork(parent, wanted, None, NOW)


def restarted(sink: ListSink, *, is_same_arena: bool) -> Store:
    """The store that comes back."""
    recovered = recovered_from(sink.records, ARENA_ID if is_same_arena else None, NVME_ID)
    return came_back(recovered, is_same_arena=is_same_arena)


@pytest.mark.parametrize("is_same_arena", [False, True])
def test_behind_a_cold_prefix_a_restart_offers_nothing_of_it_as_the_guests_own(
    is_same_arena: bool,
) -> None:
    """The prefix is on NVMe only, the guest's log too (after a reboot) or in the host as well:
    withdrawing the prefix ends the guest's lookups of it, and of what hangs behind it.
    """
    sink = ListSink()
    store = tiered_store(sink)
    publish(store, kept(store, SYSTEM), len(SYSTEM))
    chat = kept(store, [*SYSTEM, *range(41, 60)], **GUEST)
    for owner in (*store.core.prefixes.all(), chat):
        copied(store, owner)
    leave_host(store.core, store.core.prefixes.all()[0])
    back = restarted(sink, is_same_arena=is_same_arena)
    prompt = [*chat.tokens, 60]
    hit = anywhere(back, prompt, GUEST["scope"])
    assert hit is not None
    assert hit.tokens >= len(SYSTEM)
    (prefix,) = back.core.prefixes.all()
    back.prefix_keeper.revoke(prefix.prefix_id, None, NOW.wall_s)
    assert anywhere(back, prompt, GUEST["scope"]) is None
    back.core.check_invariants()


def test_a_page_that_was_a_published_one_leads_nobody_behind_the_prefix() -> None:
    """Its places are forgotten late where much was freed at once; its next use is another text."""
    store = tiered_store(ListSink())
    publish(store, kept(store, SYSTEM), 4 * BLOCK)
    (prefix,) = store.core.prefixes.all()
    row = prefix.rows[0]
    tree = store.core.tree
    assert tree.published_child(None, row, "guest") is not None
    later = replace(row, page_generation=row.page_generation + 1)
    assert tree.published_child(None, later, "guest") is None
    assert tree.published_child(None, row, prefix.owner_tenant) is None


def test_distrust_reaches_each_logs_own_copy_of_a_shared_partial_block() -> None:
    """A fork shares its parent's last page, but its copy on NVMe is its own."""
    store = tiered_store(ListSink())
    log = kept(store, SYSTEM)
    fork = forked(store, log, len(log.tokens))
    assert fork.rows[-1].page == log.rows[-1].page
    copied(store, log)
    copied(store, fork)
    assert fork.cold[-1].page != log.cold[-1].page
    Distrust(store).logs({log.log_id: 4 * BLOCK}, NOW.wall_s)
    assert (fork.committed, fork.cold.tokens) == (4 * BLOCK, 4 * BLOCK)
    store.core.check_invariants()


def test_distrust_reaches_host_and_copies_after_a_restart_too() -> None:
    """What is a copy of what is known again: the named log has it on NVMe only, a fork in the host;
    and the other way round.
    """
    for named_is_cold in (True, False):
        sink = ListSink()
        store = tiered_store(sink)
        log = kept(store, SYSTEM)
        copied(store, log)
        fork = forked(store, log, 4 * BLOCK)
        store.home.give_up_kv(log, 0)
        back = restarted(sink, is_same_arena=True)
        cold, both = back.core.logs[log.log_id], back.core.logs[fork.log_id]
        assert (cold.committed, both.committed) == (0, 4 * BLOCK - 1)
        named = cold if named_is_cold else both
        Distrust(back).logs({named.log_id: BLOCK}, NOW.wall_s)
        assert both.committed == BLOCK
        assert (cold.cold.tokens, both.cold.tokens) == (BLOCK, BLOCK)
        back.core.check_invariants()


def found_damaged(store: Store, log: LogState, block: int) -> None:
    """As the page worker tells of a page that is not what its record says."""
    row = log.rows[block]
    store.home.discard_tail(
        FillPage(
            log_id=log.log_id,
            generation=log.generation,
            block_index=block,
            target=row,
            sources=(SlotSource(row=row, first_slot=0, tokens=row.tokens),),
        )
    )


def test_a_damaged_page_is_read_from_nvme_although_somebody_still_holds_it() -> None:
    """It stood for its copy until it was found damaged; from then on the copy is read."""
    store = tiered_store(ListSink())
    log = kept(store, SYSTEM)
    copied(store, log)
    holder = forked(store, log, len(log.tokens))
    row = log.rows[1]
    found_damaged(store, log, 1)
    assert log.committed == BLOCK
    assert holder.rows[1].page == row.page
    load(store, log, len(SYSTEM))
    assert log.committed == len(SYSTEM)
    assert log.rows[1].page != row.page
    store.core.check_invariants()


def differing(recovered: Recovered, log_id: bytes, block: int) -> None:
    """One of the log's copies is of other bytes."""
    log = recovered.logs[log_id]
    rows = list(log.cold)
    rows[block] = replace(rows[block], crc=99)
    log.cold = Rows(rows)


def test_a_restart_drops_copies_that_are_not_of_what_the_host_has() -> None:
    """The store ran without the tier meanwhile and the KV was computed again, say: it starts, and
    believes the host.
    """
    sink = ListSink()
    store = tiered_store(sink)
    log = kept(store, SYSTEM)
    copied(store, log)
    for block, left in ((2, 2 * BLOCK), (3, 3 * BLOCK)):
        recovered = recovered_from(sink.records, ARENA_ID, NVME_ID)
        differing(recovered, log.log_id, block)
        back = came_back(recovered, is_same_arena=True).core.logs[log.log_id]
        assert (back.committed, back.cold.tokens) == (len(SYSTEM), left)


def test_a_prefix_whose_recorded_tokens_are_not_the_published_ones_is_withdrawn() -> None:
    """Its log was cut and went on otherwise, then all records were written again: its copies would
    be another text's KV.
    """
    sink = ListSink()
    store = tiered_store(sink)
    log = kept(store, SYSTEM)
    publish(store, log, 4 * BLOCK)
    (prefix,) = store.core.prefixes.all()
    copied(store, prefix)
    store.truncate(log.log_id, log.generation, BLOCK, NOW)
    writer = take(store, log.log_id)
    for token in range(60, 60 + 4 * BLOCK):
        writer.append(token)
    # What compaction writes of a log from which a prefix was published.
    store.core.journal.snapshot(log)
    store.core.journal.published(prefix)
    fill_work(store)
    back = restarted(sink, is_same_arena=True)
    assert back.core.prefixes.all() == []
    assert back.core.slots is not None
    assert back.core.slots.page_of(prefix.cold[2].page) is None
    back.core.check_invariants()


def test_logs_that_ended_are_not_remembered_by_the_order_of_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many had copies once."""
    monkeypatch.setattr(cold_room, "SLACK", 16)
    store = tiered_store(ListSink())
    room = store.placement.room
    for _ in range(64):
        log = kept(store, SYSTEM[: BLOCK + 1])
        copied(store, log)
        store.keeper.drop(log, CloseReason.EXPIRED)
        fill_work(store)
    assert len(room._heap) <= 32
    assert len(room._used) <= 32


def test_a_copy_is_found_by_whoever_shares_it_when_the_one_that_offered_it_ends() -> None:
    """A fork offers its parent's copies as its own; then it is dropped, or gives its own up."""
    for is_dropped in (True, False):
        store = tiered_store(ListSink())
        log = kept(store, SYSTEM)
        copied(store, log)
        fork = forked(store, log, len(log.tokens))
        if is_dropped:
            store.keeper.drop(fork, CloseReason.DELETED)
        else:
            store.placement.cut_copies(fork, 0)
        store.home.give_up_kv(log, 0)
        if not is_dropped:
            store.home.give_up_kv(fork, 0)
        fill_work(store)
        (want,) = wants_of_open(store, order([*SYSTEM, 60]))
        assert want.owner is log
        assert want.tokens == len(SYSTEM)
        assert wants_of_open(store, order([*SYSTEM, 60], **GUEST)) == []


async def test_a_damaged_published_page_is_not_written_again_and_again() -> None:
    """It never becomes a copy; the other prefixes do."""
    store = tiered_store(ListSink())
    publish(store, kept(store, SYSTEM), 4 * BLOCK)
    (prefix,) = store.core.prefixes.all()
    disk = Disk(Failure.DAMAGED)
    demotion = demoter(store, disk, Watermarks(low=0.0, high=0.0))
    await demotion.turn()
    await demotion.turn()
    assert disk.written == []
    assert prefix.cold.tokens == 0
    assert demotion.off is None
    store.core.check_invariants()


async def test_a_log_that_is_taken_while_it_is_copied_is_left_alone_from_then_on() -> None:
    """Its tail would be copied again with every token."""
    store = tiered_store(ListSink())
    log = forked(store, kept(store, SYSTEM), len(SYSTEM))
    copied(store, log)
    assert log.cold.tokens == len(SYSTEM) - 1
    writer = take(store, log.log_id)
    writer.append(60)
    assert store.placement.begin_copy(log, 8) is None
    store.keeper.raise_generation(log)
    assert store.placement.begin_copy(log, 8) is not None


def test_a_page_that_is_found_damaged_while_a_load_relies_on_it_is_nobodys_block() -> None:
    """The other blocks of the load were read; the page was only taken over."""
    store = tiered_store(ListSink())
    log = kept(store, SYSTEM)
    copied(store, log)
    holder = forked(store, log, len(log.tokens))
    store.home.give_up_kv(log, 0)
    batch = store.placement.begin_load(log, len(SYSTEM), 0, 8)
    assert batch is not None
    assert batch.pages[:4] == tuple(holder.rows.pages().tolist()[:4])
    found_damaged(store, holder, 2)
    assert store.placement.finish_load(batch, (None,) * len(batch.copies), 1.0) == 2
    assert (log.committed, holder.committed) == (2 * BLOCK, 2 * BLOCK)
    store.core.check_invariants()
