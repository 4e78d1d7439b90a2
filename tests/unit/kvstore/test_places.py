"""Copies on the NVMe tier after a restart, at every cut of the log: as they were, or a miss.

Random lives of a store over slots are recorded, with what the cold tables were after each step;
then the log is cut behind each of its records, and what a restart makes of the rest is compared.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from baton.errors import ServiceError
from baton.kv.blocks import scope_secret
from baton.kv.numeric import TORCH_F32
from services.kvstore.core import Core, Limits
from services.kvstore.lease import LeaseTable
from services.kvstore.log.fields import BodyReader
from services.kvstore.log.format import RecordType
from services.kvstore.log.journal import LogJournal, RecordSink
from services.kvstore.log.recovery import Recovered
from services.kvstore.log.store_records import Place
from services.kvstore.pages import PagePool
from services.kvstore.prefixes import Prefix
from services.kvstore.publishing import PublishOrder
from services.kvstore.restart import Standing, index_some, restore
from services.kvstore.state import LogState
from services.kvstore.store import Store
from services.kvstore.tiers.copies import Failure, Outcome
from services.kvstore.tiers.slots import Slots
from tests.unit.kvstore.cores import (
    BLOCK,
    KV,
    NOW,
    PREFILL,
    TOKENIZER,
    ListSink,
    WorkerModel,
    fill_work,
    open_log,
    recovered_from,
    take,
)

ARENA_ID = bytes(16)
NVME_ID = b"\x09" * 16
PAGES = 40
SLOTS = 24

Cold = tuple[tuple[int, int, int], ...]
"""(Slot, slot generation, tokens) of each copy."""


def tiered_store(sink: RecordSink, floor: int = 0, pages: int = PAGES) -> Store:
    """A store over pages and slots whose records are made in full."""
    limits = Limits(block_tokens=BLOCK, kv_digest=KV, tokenizer_hash=TOKENIZER)
    core = Core(
        limits=limits,
        pool=PagePool(pages, floor),
        leases=LeaseTable(10.0),
        journal=LogJournal(sink, limits, ARENA_ID, 10.0, nvme_id=NVME_ID),
        slots=Slots(SLOTS, floor),
    )
    return Store(core, lambda scope: scope_secret(bytes(32), 1, scope))


def cold_of(owners: Sequence[LogState | Prefix]) -> dict[bytes | str, Cold]:
    """The copies of each owner that has any."""
    return {
        owner.prefix_id if isinstance(owner, Prefix) else owner.log_id: tuple(
            (row.page, row.page_generation, row.tokens) for row in owner.cold
        )
        for owner in owners
        if owner.cold
    }


def everybody(store: Store) -> list[LogState | Prefix]:
    """All logs and published prefixes."""
    return [*store.core.logs.values(), *store.core.prefixes.all()]


@dataclass
class Life:
    """A store that lives; `seen` are (records so far, the cold tables then)."""

    sink: ListSink = field(default_factory=ListSink)
    models: list[WorkerModel] = field(default_factory=list)
    seen: list[tuple[int, dict[bytes | str, Cold]]] = field(default_factory=lambda: [(0, {})])

    def __post_init__(self) -> None:
        self.store = tiered_store(self.sink)

    def step(self, what: int, which: int, size: int) -> None:
        """One thing, if it can be done now; all that it did is as if the disk had done it."""
        owners = everybody(self.store)
        owner = owners[which % len(owners)] if owners else None
        try:
            self._do(what, owner, size)
        except (ServiceError, IndexError, StopIteration):
            pass
        finally:
            fill_work(self.store)
        self.store.core.check_invariants()
        self.seen.append((len(self.sink.records), cold_of(everybody(self.store))))

    def _do(self, what: int, owner: LogState | Prefix | None, size: int) -> None:
        store = self.store
        if what == 0 or owner is None:
            tokens = [size % 3 + 1] * (size % 4 * BLOCK + 3)
            self.models.append(open_log(store, tokens, PREFILL, output_pages=1))
            return
        match what:
            case 1 | 2 | 3:
                copy(store, owner, 1 + size % 4, _outcomes(size))
            case 4:
                load(store, owner, size)
            case 5 if isinstance(owner, Prefix):
                evict_prefix(store, owner)
            case 6 if isinstance(owner, Prefix):
                store.prefix_keeper.revoke(owner.prefix_id, owner.owner_tenant, NOW.wall_s)
            case _ if isinstance(owner, LogState):
                self._act(what, owner, size)

    def _act(self, what: int, log: LogState, size: int) -> None:
        store = self.store
        model = next(model for model in self.models if model.log_id == log.log_id)
        match what:
            case 5:
                store.home.give_up_kv(log, size % 3)
            case 6 if log.cold:
                store.placement.slot_damaged(log.cold[size % len(log.cold)].page)
            case 7:
                model.prefill()
            case 8:
                for token in range(size % 12):
                    model.append(token + 1)
            case 9:
                store.truncate(log.log_id, log.generation, max(log.position - size, 1), NOW)
            case 10:
                store.keeper.close(log.log_id, is_dropped=size % 3 == 0, wall_s=NOW.wall_s)
            case 11:
                again = take(store, log.log_id)
                self.models[self.models.index(model)] = again
            case 12:
                store.core.journal.snapshot(log)
                for prefix in store.core.prefixes.all():
                    if prefix.log_id == log.log_id:
                        store.core.journal.published(prefix)
            case 13:
                publish(store, log, size)
            case 14:
                # All of what demotion and promotion do for one conversation.
                store.keeper.close(log.log_id, is_dropped=False, wall_s=NOW.wall_s)
                copy(store, log, 4, (None,) * 4)
                store.home.give_up_kv(log, size % 2)
                load(store, log, 1 + size)


def _outcomes(size: int) -> tuple[Outcome, ...]:
    """Mostly the disk does what it is told."""
    if size % 11 == 7:
        return (None, Failure.DAMAGED, None, None)
    return (None,) * 4


def copy(store: Store, owner: LogState | Prefix, blocks: int, outcomes: Sequence[Outcome]) -> None:
    """Demotion of some blocks."""
    order = store.placement.begin_copy(owner, blocks)
    if order is not None:
        store.placement.finish_copy(order, outcomes[: len(order.copies)])


def load(store: Store, owner: LogState | Prefix, tokens: int) -> None:
    """Promotion of some positions."""
    order = store.placement.begin_load(owner, tokens, len(owner.rows), 4)
    if order is not None:
        outcomes = (None,) * len(order.copies)
        store.placement.finish_load(order, outcomes, NOW.monotonic_s)


def evict_prefix(store: Store, prefix: Prefix) -> None:
    """What `Keeper.make_room` does with a prefix all of which is on the NVMe tier."""
    if prefix.rows and prefix.cold.tokens == prefix.position:
        for row in prefix.rows:
            store.core.pool.drop(row.page)
        prefix.rows = ()
        store.core.journal.promoted(prefix, 0)
        store.core.drain_freed()


def publish(store: Store, log: LogState, size: int) -> None:
    """A prefix of the log under a new name."""
    name = f"pfx-{len(store.core.prefixes)}-{log.log_id.hex()[:4]}"
    store.prefix_keeper.publish(
        PublishOrder(
            prefix_id=name,
            name=name,
            tenant=log.tenant,
            tenants=(),
            log_id=log.log_id,
            position=1 + size % max(log.committed, 1),
            text_hash=b"",
            ids_hash=b"",
            history_end=b"",
            text_bytes=0,
            template_digest=bytes(16),
            model="m",
            expire_wall_s=None,
        ),
        NOW.wall_s,
    )


STEPS = st.lists(
    st.tuples(st.integers(0, 14), st.integers(0, 20), st.integers(0, 60)), min_size=4, max_size=40
)


def lived(steps: Sequence[tuple[int, int, int]]) -> Life:
    """A store that has done these things."""
    life = Life()
    for step in steps:
        life.step(*step)
    return life


def recovered_cold(recovered: Recovered) -> dict[bytes | str, Cold]:
    """What the records give back."""
    return cold_of([*recovered.logs.values(), *recovered.prefixes])


def test_cold_tables_at_every_cut_of_some_lives() -> None:
    """Behind a whole step exactly; inside one, what it was before or after, block by block. A
    failure names its seed.
    """
    live_and_compare(range(10))


@pytest.mark.more
def test_cold_tables_at_every_cut_of_many_lives() -> None:
    """What the lives did is counted, so that it is known."""
    counts = live_and_compare(range(10, 110))
    assert min(counts[kind] for kind in ("NVME made", "NVME cut", "HOST made", "HOST cut")) > 3


def live_and_compare(seeds: Iterable[int]) -> Counter[str]:
    """Lives of 40 random steps each; how often each kind of PLACE was made."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        drawn = random.Random(seed)
        life = lived(
            [(drawn.randint(0, 14), drawn.randint(0, 20), drawn.randint(0, 60)) for _ in range(40)]
        )
        for kind, body, _ in life.sink.records:
            if kind is RecordType.PLACE:
                place = Place.decode(BodyReader(body))
                is_cut = place.from_position == place.to_position
                counts[f"{place.tier.name} {'cut' if is_cut else 'made'}"] += 1
        try:
            compare_every_cut(life)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
    return counts


def compare_every_cut(life: Life) -> None:
    """What the records up to each one give, against what was there when it was made."""
    for before, after in zip(life.seen, life.seen[1:], strict=False):
        for end in range(before[0] + 1, after[0] + 1):
            found = recovered_cold(recovered_from(life.sink.records[:end], ARENA_ID, NVME_ID))
            if end == after[0]:
                assert found == after[1]
                continue
            for owner, cold in found.items():
                known = (before[1].get(owner, ()), after[1].get(owner, ()))
                for index, copied in enumerate(cold):
                    assert any(copied in table[index : index + 1] for table in known)


@settings(max_examples=20, deadline=None)
@given(STEPS, st.booleans(), st.data())
def test_restart_holds_the_slots_and_goes_on(
    steps: list[tuple[int, int, int]], is_same_arena: bool, data: st.DataObject
) -> None:
    """Also under another arena, as after a power cut: copies are what is left of KV then. Slots
    that nobody refers to are free.
    """
    life = lived(steps)
    end = data.draw(st.integers(0, len(life.sink.records)))
    recovered = recovered_from(
        life.sink.records[:end], ARENA_ID if is_same_arena else None, NVME_ID
    )
    expected = recovered_cold(recovered)
    store = came_back(recovered, is_same_arena=is_same_arena)
    slots = store.core.slots
    assert slots is not None
    found = cold_of(everybody(store))
    for owner, cold in found.items():
        assert expected[owner][: len(cold) - 1] == cold[:-1]
    held = {slot for cold in found.values() for slot, _, _ in cold}
    assert slots.free_count == SLOTS - len(held)
    for owner_now in everybody(store):
        copy(store, owner_now, 4, (None,) * 4)
        load(store, owner_now, 1 << 20)
        store.core.check_invariants()


@settings(max_examples=15, deadline=None)
@given(STEPS, st.data())
def test_missing_places_cost_copies_and_nothing_else(
    steps: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    """A damaged PLACE gives no log up: tokens are the same, and the tables agree."""
    life = lived(steps)
    kept = [
        record
        for record in life.sink.records
        if record[0] is not RecordType.PLACE or data.draw(st.booleans())
    ]
    whole = recovered_from(life.sink.records, ARENA_ID, NVME_ID)
    found = recovered_from(kept, ARENA_ID, NVME_ID)
    assert not found.damaged
    tokens = {log_id: list(log.tokens) for log_id, log in whole.logs.items()}
    assert {log_id: list(log.tokens) for log_id, log in found.logs.items()} == tokens
    came_back(found, is_same_arena=True)


def came_back(recovered: Recovered, *, is_same_arena: bool) -> Store:
    """A fresh store from what the records gave; every worker is gone."""
    store = tiered_store(ListSink(), 1 << 32)
    standing = Standing(
        is_same_arena=is_same_arena,
        locked_slots=frozenset(),
        model="m",
        class_text=lambda class_id: TORCH_F32.text if class_id == TORCH_F32.id else "",
    )
    restored = restore(store, recovered, standing, NOW)
    index_some(store, restored.unindexed, 1 << 30)
    return store
