"""What a restart makes of a log: the tables of before, less what nobody may still have.

Random lives of a store are recorded; then its records alone, and which worker slots are still
locked, have to give the same tables again.
"""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from baton.kv.numeric import TORCH_F32
from services.kvstore.log.recovery import Recovered
from services.kvstore.pages import Fence, PageState
from services.kvstore.publishing import PublishOrder
from services.kvstore.restart import Restored, Standing, index_some, restore
from services.kvstore.state import LogState, Phase, Writer
from services.kvstore.store import Store
from tests.unit.kvstore.cores import (
    BLOCK,
    DECODE,
    NOW,
    PREFILL,
    ListSink,
    WorkerModel,
    build_store,
    fill_work,
    open_log,
    recovered_from,
)

ARENA_ID = bytes(16)
PAGES = 40
PROMPT = list(range(1, 2 * BLOCK + 4))


def came_back(
    sink: ListSink, *, locked: set[int], is_same_arena: bool = True
) -> tuple[Store, Restored]:
    """A fresh store from the records of another."""
    arena_id = ARENA_ID if is_same_arena else None
    recovered: Recovered = recovered_from(sink.records, arena_id)
    assert not recovered.damaged
    store = build_store(PAGES, ListSink())
    standing = Standing(
        is_same_arena=is_same_arena,
        locked_slots=frozenset(locked),
        model="m",
        class_text=lambda class_id: TORCH_F32.text if class_id == TORCH_F32.id else "",
    )
    restored = restore(store, recovered, standing, NOW)
    index_some(store, restored.unindexed, 1 << 30)
    return store, restored


class Life:
    """A store, its records, and who writes what."""

    def __init__(self) -> None:
        self.sink = ListSink()
        self.store = build_store(PAGES, self.sink)
        self.models: list[WorkerModel] = []

    def open(self, seed: int, blocks: int) -> None:
        """A log with its writer; the prompt may be one that was seen."""
        tokens = [seed % 3 + 1] * (blocks * BLOCK + 3)
        try:
            self.models.append(open_log(self.store, tokens, PREFILL, output_pages=seed % 3))
        except Exception:  # noqa: BLE001 - no room: nothing was done
            return

    def act(self, index: int, what: int) -> None:
        """One of the things that can be done with a log, if it can be done now."""
        if not self.models:
            return
        model = self.models[index % len(self.models)]
        log = self.store.core.logs.get(model.log_id)
        if log is None:
            return
        try:
            self._do(model, log, what)
        except Exception:  # noqa: BLE001 - refused: nothing was done
            return
        finally:
            fill_work(self.store)

    def _do(self, model: WorkerModel, log: LogState, what: int) -> None:
        store, keeper = self.store, self.store.keeper
        match what % 9:
            case 0:
                model.checkpoint(min(log.committed + BLOCK // 2 + 1, log.prompt_tokens))
            case 1 | 2 if log.phase is Phase.PREFILL:
                model.prefill()
            case 1 | 2 | 3 | 4:
                model.append(what, "stop" if what % 7 == 0 else None)
            case 5:
                writer = DECODE if what % 2 else PREFILL
                store.home.take(
                    model.log_id,
                    log.generation,
                    writer,
                    TORCH_F32,
                    pages=1,
                    now_s=NOW.monotonic_s,
                )
                model.generation, model.writer, model.chunks = log.generation, writer, []
            case 6 if what % 4:
                keeper.close(model.log_id, is_dropped=what % 4 == 1, wall_s=NOW.wall_s)
            case 7 if log.writer is not None and what % 2:
                keeper.raise_generation(log)
            case 8:
                store.truncate(model.log_id, log.generation, max(log.position - 3, 1), NOW)


STEPS = st.lists(
    st.tuples(st.sampled_from(("open", "act")), st.integers(0, 40), st.integers(0, 80)),
    min_size=1,
    max_size=40,
)


def lived(steps: list[tuple[str, int, int]]) -> Life:
    """A store that has done these things."""
    life = Life()
    for kind, first, second in steps:
        if kind == "open":
            life.open(first, 1 + second % 3)
        else:
            life.act(first, second)
    life.store.core.check_invariants()
    return life


def tables(store: Store) -> dict[bytes, tuple[object, ...]]:
    """All that a restart has to find of every log. That somebody closed it is no record of its own:
    it is sealed, has an end or not, and nobody writes it.
    """
    return {
        log.log_id: (
            list(log.tokens),
            log.generation,
            (log.is_sealed, log.finish_reason),
            log.writer,
            dict(log.granted),
            [(row.page, row.page_generation, row.tokens, row.crc) for row in log.rows],
            log.committed,
            log.cached_tokens,
            log.prompt_tokens,
        )
        for log in store.core.logs.values()
    }


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_with_every_worker_alive_the_tables_are_those_of_before(
    steps: list[tuple[str, int, int]],
) -> None:
    """Logs, writers, granted pages and holders; and every page that was fenced is again."""
    life = lived(steps)
    before = life.store.core
    store, restored = came_back(life.sink, locked={PREFILL.slot, DECODE.slot})
    assert tables(store) == tables(life.store)
    after = store.core
    for page in range(PAGES):
        assert after.pool.holders(page) == before.pool.holders(page), page
        if before.pool.state(page) is PageState.QUARANTINED:
            assert after.pool.state(page) is PageState.QUARANTINED, page
        if before.pool.state(page) is PageState.GRANTED:
            assert after.pool.state(page) is PageState.GRANTED, page
    assert len(after.leases) == len(before.leases)
    assert set(restored.dirty) == set(after.pool.free_pages())


@settings(max_examples=100, deadline=None)
@given(STEPS, st.sampled_from([set(), {PREFILL.slot}, {DECODE.slot}]))
def test_who_is_gone_holds_nothing_and_who_lives_keeps_all(
    steps: list[tuple[str, int, int]], locked: set[int]
) -> None:
    """A dead writer's log has a new generation, and none of its pages is quarantined."""
    life = lived(steps)
    store, _ = came_back(life.sink, locked=locked)
    for log_id, old in life.store.core.logs.items():
        new = store.core.logs[log_id]
        is_dead = old.writer is not None and old.writer.slot not in locked
        assert new.generation == old.generation + is_dead
        assert new.writer == (None if is_dead else old.writer)
        assert list(new.tokens) == list(old.tokens)
        assert list(new.rows) == list(old.rows)
    for fence in store.core.pool.fences():
        assert fence.worker_slot in locked
    assert all(log.writer.slot in locked for log in store.core.logs.values() if log.writer)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_under_another_arena_tokens_are_left_and_nothing_else(
    steps: list[tuple[str, int, int]],
) -> None:
    """Every writer is fenced, and remembered: the same run of it may attach again."""
    life = lived(steps)
    store, restored = came_back(life.sink, locked=set(), is_same_arena=False)
    assert store.core.pool.counts().free == PAGES
    for log_id, old in life.store.core.logs.items():
        new = store.core.logs[log_id]
        assert list(new.tokens) == list(old.tokens)
        assert (new.committed, list(new.rows), new.writer) == (0, [], None)
        assert (log_id in restored.former) == (old.writer is not None)
        if old.writer is not None:
            assert restored.former[log_id].generation == old.generation == new.generation - 1


def test_page_that_was_given_to_another_since_is_lost_with_all_behind_it() -> None:
    """Two rows name one page: the newer use of it counts."""
    life = Life()
    model = open_log(life.store, PROMPT, PREFILL)
    model.prefill()
    recovered = recovered_from(life.sink.records, ARENA_ID)
    page = recovered.logs[model.log_id].rows[1].page
    recovered.page_generations[page] = 99
    store = build_store(PAGES, ListSink())
    standing = Standing(
        is_same_arena=True, locked_slots=frozenset(), model="m", class_text=lambda _class_id: ""
    )
    restored = restore(store, recovered, standing, NOW)
    log = store.core.logs[model.log_id]
    assert (log.committed, len(log.rows), restored.cut) == (BLOCK, 1, 1)
    assert store.core.pool.state(page) is PageState.FREE


def test_published_prefix_holds_its_pages_again_and_one_that_lost_them_is_withdrawn() -> None:
    """Under the same arena it serves; under another there is nothing to serve."""
    life = Life()
    model = open_log(life.store, PROMPT, PREFILL)
    model.prefill(finish="stop")
    life.store.prefix_keeper.publish(
        PublishOrder(
            prefix_id="p1",
            name="system",
            tenant="acme",
            tenants=("guest",),
            log_id=model.log_id,
            position=BLOCK + 2,
            text_hash=b"t" * 32,
            ids_hash=b"",
            history_end=b"",
            text_bytes=9,
            template_digest=b"",
            model="m",
            expire_wall_s=None,
        ),
        NOW.wall_s,
    )
    life.store.keeper.close(model.log_id, is_dropped=True, wall_s=NOW.wall_s)
    (old,) = life.store.core.prefixes.all()
    store, restored = came_back(life.sink, locked=set())
    (new,) = store.core.prefixes.all()
    assert replace(new, rows=old.rows, hits=old.hits) == old
    assert list(new.rows) == list(old.rows)
    assert restored.lost_prefixes == []
    other, restored = came_back(life.sink, locked=set(), is_same_arena=False)
    assert other.core.prefixes.all() == []
    assert restored.lost_prefixes == ["p1"]


@pytest.mark.parametrize("is_taken", [False, True])
def test_tail_that_a_fenced_writer_may_still_write_stays_away(is_taken: bool) -> None:
    """Its slot is locked: the partial page it committed is not given to anybody (O4, O7)."""
    life = Life()
    model = open_log(life.store, PROMPT, PREFILL)
    model.checkpoint(BLOCK + 3)
    tail = model.log.rows[-1].page
    if is_taken:
        life.store.home.take(model.log_id, 1, DECODE, TORCH_F32, pages=1, now_s=NOW.monotonic_s)
    else:
        life.store.keeper.raise_generation(model.log)
        life.store.keeper.close(model.log_id, is_dropped=True, wall_s=NOW.wall_s)
    fill_work(life.store)
    store, _ = came_back(life.sink, locked={PREFILL.slot, DECODE.slot})
    fence = Fence(worker_slot=PREFILL.slot, log_id=model.log_id, generation=1)
    assert store.core.pool.state(tail) is PageState.QUARANTINED
    assert tail in store.core.pool.fenced_pages(fence)
    gone, _ = came_back(life.sink, locked={DECODE.slot})
    assert gone.core.pool.state(tail) is PageState.FREE


def test_what_is_not_sealed_serves_no_lookup_after_a_restart_either() -> None:
    """Committed chunks are for the log's next generation only (O2)."""
    life = Life()
    sealed = open_log(life.store, PROMPT, PREFILL)
    sealed.prefill()
    half = open_log(life.store, [9, *PROMPT], PREFILL)
    half.checkpoint(2 * BLOCK)
    store, _ = came_back(life.sink, locked=set())
    assert store.core.logs[half.log_id].phase is Phase.PREFILL
    assert open_log(store, [*PROMPT, 1], DECODE).log.cached_tokens == len(PROMPT)
    assert open_log(store, [9, *PROMPT, 1], DECODE).log.cached_tokens == 0
    next_writer = Writer(worker_id="prefill-1", slot=2, incarnation=1)
    taken = store.home.take(half.log_id, 2, next_writer, TORCH_F32, pages=1, now_s=NOW.monotonic_s)
    assert taken.generation == 3
    assert store.core.logs[half.log_id].committed == 2 * BLOCK
