"""Versions of a published name, pins, prefixes of another tokenizer or of a log that was cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from baton.errors import Reason, ServiceError
from baton.kv.blocks import Scope
from baton.kv.numeric import TORCH_F32
from baton.kv.splice import splice
from services.kvstore.log.reader import scan_directory
from services.kvstore.log.recovery import recover
from services.kvstore.log.store_records import Publish
from services.kvstore.prefixes import Prefix
from services.kvstore.restart import Standing, restore
from services.kvstore.store import Store
from tests.unit.kvstore.cores import (
    BLOCK,
    NOW,
    ListSink,
    WorkerModel,
    build_store,
    open_log,
    recovered_from,
    take,
)
from tests.unit.kvstore.test_compaction import running
from tests.unit.kvstore.test_places import copy, tiered_store
from tests.unit.kvstore.test_restart import ARENA_ID, PAGES, Life, came_back
from tests.unit.kvstore.test_store import PROMPT, publish, segment

GUEST = {"tenant": "guest", "scope": Scope(tenant="guest")}
OTHER = [*reversed(PROMPT)]


def kept(store: Store, tokens: list[int]) -> WorkerModel:
    """A sealed log that ended."""
    model = open_log(store, tokens)
    model.prefill(finish="stop")
    return model


def named(store: Store, **more: object) -> Prefix:
    """The prefix of that id."""
    prefix_id = publish(store, name="rules", **more)  # type: ignore[arg-type]  # filled by callers
    return store.core.prefixes.find(prefix_id)


def test_a_newer_version_takes_the_place_of_the_older_ones() -> None:
    """In the same step; its pages go, and what is found is the new one."""
    store = build_store()
    one, two = kept(store, PROMPT), kept(store, OTHER)
    named(store, log_id=one.log_id, position=2 * BLOCK, prefix_id="a")
    new = named(store, log_id=two.log_id, position=BLOCK, prefix_id="b", version=2)
    assert [prefix.prefix_id for prefix in store.core.prefixes.all()] == ["b"]
    assert new.version == 2
    assert open_log(store, PROMPT, **GUEST).log.cached_tokens == 0
    assert open_log(store, OTHER, **GUEST).log.cached_tokens == BLOCK
    for version in (1, 2):
        with pytest.raises(ServiceError) as refused:
            named(store, log_id=one.log_id, position=BLOCK, prefix_id="c", version=version)
        assert refused.value.reason is Reason.ALREADY_EXISTS
    store.core.check_invariants()


def test_a_pinned_version_stays_unless_the_new_one_says_the_same() -> None:
    """Who unpins publishes the same content without the pin."""
    store = build_store()
    one, two = kept(store, PROMPT), kept(store, OTHER)
    named(store, log_id=one.log_id, position=BLOCK, prefix_id="a", is_pinned=True)
    named(store, log_id=two.log_id, position=BLOCK, prefix_id="b", version=2)
    assert len(store.core.prefixes) == 2
    named(store, log_id=one.log_id, position=BLOCK, prefix_id="c", version=3)
    assert [prefix.prefix_id for prefix in store.core.prefixes.all()] == ["c"]


def test_the_end_of_a_pinned_prefix_does_not_come() -> None:
    """Only that of the other."""
    store = build_store()
    one = kept(store, PROMPT)
    for prefix_id, is_pinned in (("a", False), ("b", True)):
        publish(
            store,
            one.log_id,
            BLOCK,
            prefix_id=prefix_id,
            name=prefix_id,
            expire_wall_s=NOW.wall_s + 5,
            is_pinned=is_pinned,
        )
    store.prefix_keeper.expire(NOW.wall_s + 6)
    assert [prefix.prefix_id for prefix in store.core.prefixes.all()] == ["b"]


def test_pins_hold_half_of_the_arena_at_most() -> None:
    """QUOTA_EXCEEDED, naming how many; without a pin it is published."""
    store = build_store(8)
    one = kept(store, [*range(5 * BLOCK)])
    publish(store, one.log_id, 4 * BLOCK, is_pinned=True)
    with pytest.raises(ServiceError) as refused:
        publish(store, one.log_id, BLOCK, is_pinned=True)
    assert refused.value.reason is Reason.QUOTA_EXCEEDED
    assert "4 pages of at most 4" in refused.value.message
    publish(store, one.log_id, BLOCK)


def test_a_pin_that_takes_the_place_of_another_needs_no_room_beside_it() -> None:
    """The same content pinned again, for another time or for others: the older one goes."""
    store = build_store(8)
    one = kept(store, [*range(5 * BLOCK)])
    pinned = {"log_id": one.log_id, "position": 4 * BLOCK, "is_pinned": True}
    named(store, prefix_id="a", **pinned)
    named(store, prefix_id="b", version=2, **pinned)
    assert [prefix.prefix_id for prefix in store.core.prefixes.all()] == ["b"]
    with pytest.raises(ServiceError) as refused:
        publish(store, one.log_id, BLOCK, is_pinned=True)
    assert refused.value.reason is Reason.QUOTA_EXCEEDED
    store.core.check_invariants()


@pytest.mark.parametrize("is_pinned", [False, True])
def test_a_pinned_prefix_keeps_its_pages_when_room_is_made(is_pinned: bool) -> None:
    """One with copies on NVMe gives its pages up, a pinned one does not."""
    store = tiered_store(ListSink(), pages=16)
    one = kept(store, PROMPT)
    publish(store, one.log_id, 2 * BLOCK, is_pinned=is_pinned)
    (prefix,) = store.core.prefixes.all()
    copy(store, prefix, 4, (None,) * 4)
    assert prefix.cold.tokens == 2 * BLOCK
    store.keeper.close(one.log_id, is_dropped=True, wall_s=NOW.wall_s)
    store.keeper.make_room(16)
    assert bool(prefix.rows) is is_pinned
    store.core.check_invariants()


def test_version_and_pin_are_there_after_a_restart() -> None:
    """And the tokenizer they were published with."""
    life = Life()
    model = open_log(life.store, PROMPT)
    model.prefill(finish="stop")
    publish(life.store, model.log_id, BLOCK + 2, version=7, is_pinned=True)
    life.store.keeper.close(model.log_id, is_dropped=True, wall_s=NOW.wall_s)
    (old,) = life.store.core.prefixes.all()
    store, _ = came_back(life.sink, locked=set())
    (new,) = store.core.prefixes.all()
    assert replace(new, rows=old.rows, model=old.model) == old
    assert (new.version, new.is_pinned) == (7, True)


def test_a_record_of_the_first_version_is_as_it_was() -> None:
    """Version and flags stand in records only where they say something."""
    record = Publish(
        prefix_id="p",
        name="n",
        owner_tenant="t",
        tenants=("u",),
        text_hash=bytes(32),
        ids_hash=bytes(32),
        history_end=bytes(32),
        template_digest=bytes(16),
        kv_digest=bytes(16),
        tokenizer_hash=bytes(8),
        numeric_class_id=1,
        text_bytes=2,
        created_wall_ms=3,
    )
    assert len(replace(record, version=2).encode()) == len(record.encode()) + 8


# --- another tokenizer ------------------------------------------------------------------------


def came_back_reading(sink: ListSink, tokenizer_hash: bytes) -> Store:
    """A store that reads with another tokenizer, from the records of one before."""
    store = build_store(PAGES, ListSink())
    store.core.limits = replace(store.core.limits, tokenizer_hash=tokenizer_hash)
    standing = Standing(
        is_same_arena=True,
        locked_slots=frozenset(),
        model="m",
        class_text=lambda _class_id: TORCH_F32.text,
    )
    restored = restore(store, recovered_from(sink.records, ARENA_ID), standing, NOW)
    assert restored.lost_prefixes == []
    return store


def test_a_prefix_of_another_tokenizer_is_kept_and_not_found() -> None:
    """Its manifest is refused naming both hashes, whatever tokenizer the manifest states."""
    life = Life()
    model = open_log(life.store, PROMPT)
    model.prefill(finish="stop")
    publish(life.store, model.log_id, 2 * BLOCK)
    life.store.keeper.close(model.log_id, is_dropped=True, wall_s=NOW.wall_s)
    (old,) = life.store.core.prefixes.all()
    published_with = old.tokenizer_hash
    served = b"another!"
    store = came_back_reading(life.sink, served)
    (stale,) = store.core.prefixes.all()
    assert stale.tokenizer_hash == published_with
    assert open_log(store, PROMPT, **GUEST).log.cached_tokens == 0
    for stated in (published_with, served):
        offered = segment(store, old.log_id, 0, 2 * BLOCK, PROMPT)
        base = splice([replace(offered, tokenizer_hash=stated)])
        with pytest.raises(ServiceError) as refused:
            open_log(store, PROMPT, base=base, **GUEST)
        assert refused.value.reason is Reason.TOKENIZER_MISMATCH
        assert published_with.hex() in refused.value.message
        assert served.hex() in refused.value.message
    back, _ = came_back(life.sink, locked=set())
    assert open_log(back, PROMPT, **GUEST).log.cached_tokens == 2 * BLOCK


# --- a log that was cut -----------------------------------------------------------------------


@pytest.mark.parametrize("is_continued", [False, True])
async def test_a_prefix_whose_log_was_cut_inside_it_survives_compaction(
    tmp_path: Path, is_continued: bool
) -> None:
    """The log's own SNAPSHOT has other tokens, or too few: the prefix goes on apart from it."""
    async with running(tmp_path) as bench:
        store = bench.store
        source = open_log(store, PROMPT)
        source.prefill(token=5, finish="stop")
        publish(store, source.log_id, 2 * BLOCK)
        (prefix,) = store.core.prefixes.all()
        tokens, old_id = tuple(prefix.token_ids), prefix.log_id
        log = store.truncate(source.log_id, source.log.generation, BLOCK + 2, NOW)
        if is_continued:
            writer = take(store, source.log_id, pages=4)
            for _ in range(2 * BLOCK):
                writer.append(99)
        version = store.core.prefixes.version
        bench.compactor._rewrite({source.log_id})
        await bench.work()
        assert prefix.log_id != old_id
        assert store.core.prefixes.version > version
        store.core.check_invariants()
        bench.compactor._rewrite({f"prefix:{prefix.prefix_id}".encode()})
        await bench.work()
    recovered = recover(scan_directory(tmp_path), arena_id=bytes(16))
    (found,) = recovered.prefixes
    assert (found.log_id, tuple(found.token_ids)) == (prefix.log_id, tokens)
    assert found.rows == prefix.rows
    assert list(recovered.logs[source.log_id].tokens) == list(log.tokens)
    assert prefix.log_id not in recovered.logs
