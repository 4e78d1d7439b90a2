"""Logs from open to drop: reuse, forks, cuts, ends, eviction, leases, published prefixes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from baton.errors import Reason, ServiceError
from baton.kv.blocks import Scope
from baton.kv.digests import history_at, history_start
from baton.kv.manifest import Segment
from baton.kv.numeric import TORCH_BF16, TORCH_F32
from baton.kv.splice import splice
from services.kvstore.log.state import Parent
from services.kvstore.publishing import PublishOrder
from services.kvstore.state import FillPage, Phase
from services.kvstore.store import ForkOrder, Now, Store
from services.kvstore.workers import WorkerTable
from tests.unit.kvstore.cores import (
    BLOCK,
    KV,
    NOW,
    PREFILL,
    SCOPE,
    TOKENIZER,
    WorkerModel,
    build_store,
    fill_work,
    new_id,
    open_log,
    order,
    take,
)

PROMPT = list(range(100, 100 + 3 * BLOCK + 2))


def kept_log(store: Store, tokens: list[int], **changes: object) -> WorkerModel:
    """A log that was answered with one token and closed."""
    worker = open_log(store, tokens, **changes)
    worker.prefill(finish="stop")
    store.keeper.close(worker.log_id, is_dropped=False, wall_s=NOW.wall_s)
    return worker


def segment(store: Store, log_id: bytes, first: int, end: int, tokens: list[int]) -> Segment:
    """A segment of a log as a gateway would offer it."""
    return Segment(
        log_id=log_id,
        generation=0,
        from_position=first,
        to_position=end,
        history_start=history_at(KV, BLOCK, tokens[:first]) if first else history_start(KV),
        history_end=history_at(KV, BLOCK, tokens[:end]),
        kv_digest=KV,
        tokenizer_hash=TOKENIZER,
        block_tokens=BLOCK,
        numeric_class_id=TORCH_F32.id,
    )


def publish(store: Store, log_id: bytes, position: int, **changes: Any) -> str:
    """Publishes a prefix of a log of tenant acme; its id."""
    values: dict[str, Any] = {
        "prefix_id": f"pfx-{position}",
        "name": f"prefix {position}",
        "tenant": "acme",
        "tenants": ("guest",),
        "log_id": log_id,
        "position": position,
        "text_hash": b"",
        "ids_hash": b"",
        "history_end": b"",
        "text_bytes": 10,
        "template_digest": b"",
        "model": "tiny",
        "expire_wall_s": None,
    }
    wanted = PublishOrder(**{**values, **changes})
    return store.prefix_keeper.publish(wanted, NOW.wall_s).prefix_id


# --- reuse ------------------------------------------------------------------------------------


def test_second_prompt_shares_the_full_blocks_of_a_sealed_one() -> None:
    """Full blocks are referred to, not copied or computed again."""
    store = build_store()
    first = kept_log(store, PROMPT)
    second = open_log(store, [*PROMPT[: 2 * BLOCK], 1, 2, 3])
    assert second.log.cached_tokens == 2 * BLOCK
    assert [row.page for row in second.log.rows] == [row.page for row in first.log.rows[:2]]
    assert store.core.pool.counts().shared == 2
    store.core.check_invariants()


def test_fully_cached_prompt_still_computes_its_last_token() -> None:
    """Logits exist for a computed token only; the block before it is copied up to it."""
    store = build_store()
    kept_log(store, PROMPT)
    second = open_log(store, PROMPT[: 2 * BLOCK])
    assert second.log.cached_tokens == 2 * BLOCK - 1
    assert second.log.rows[1].tokens == BLOCK - 1
    second.prefill()
    store.core.check_invariants()


@pytest.mark.parametrize(
    "changes",
    [
        {"tenant": "other", "scope": Scope(tenant="other")},
        {"scope": Scope(tenant="acme", team="blue")},
        {"scope": Scope(tenant="acme", cache_salt="pepper")},
        {"numeric_class": TORCH_BF16},
        {"is_cacheable": False},
    ],
)
def test_prompt_outside_the_scope_or_class_finds_nothing(changes: dict[str, object]) -> None:
    """Tenants, teams, salts and numeric classes are kept apart by the key itself."""
    store = build_store()
    kept_log(store, PROMPT)
    assert open_log(store, PROMPT, **changes).log.cached_tokens == 0


def test_unsealed_log_serves_no_lookup() -> None:
    """Committed chunks of an unsealed log are for its next generation only (O2)."""
    store = build_store()
    open_log(store, PROMPT).checkpoint(2 * BLOCK)
    assert open_log(store, PROMPT).log.cached_tokens == 0


def test_uncacheable_log_is_not_offered() -> None:
    """cache_mode OFF neither reads nor fills."""
    store = build_store()
    kept_log(store, PROMPT, is_cacheable=False)
    assert open_log(store, PROMPT).log.cached_tokens == 0


def test_output_blocks_are_found_by_the_next_turn() -> None:
    """A chat continues its own answer: prompt and output together are the next prompt."""
    store = build_store()
    worker = open_log(store, PROMPT)
    worker.prefill(token=1)
    decode = take(store, worker.log_id, pages=4)
    for token in range(2, 2 + 2 * BLOCK):
        decode.append(token)
    decode.append(50, finish="length")
    history = list(decode.log.tokens)
    store.keeper.close(worker.log_id, is_dropped=False, wall_s=NOW.wall_s)
    following = open_log(store, [*history, 60, 61])
    assert following.log.cached_tokens == len(history) - 1, "the last token has no KV yet"
    store.core.check_invariants()


def test_parent_is_continued_from_any_position() -> None:
    """An edit starts inside a block: its slots are copied."""
    store = build_store()
    first = kept_log(store, PROMPT)
    base = Parent(log_id=first.log_id, generation=0, position=BLOCK + 3)
    child = open_log(store, [*PROMPT[: BLOCK + 3], 1, 2], base=base)
    assert child.log.cached_tokens == BLOCK + 3
    child.prefill()
    store.core.check_invariants()


def test_parent_with_other_tokens_or_of_another_tenant_is_refused() -> None:
    """The prompt is the truth; another tenant's log looks as if it was not there."""
    store = build_store()
    first = kept_log(store, PROMPT)
    base = Parent(log_id=first.log_id, generation=0, position=4)
    with pytest.raises(ServiceError) as other_tokens:
        open_log(store, [9, 9, 9, 9, 9], base=base)
    assert other_tokens.value.field == "prompt_token_ids"
    with pytest.raises(ServiceError) as other_tenant:
        open_log(store, PROMPT, base=base, tenant="other", scope=Scope(tenant="other"))
    assert other_tenant.value.reason is Reason.LOG_NOT_FOUND


def test_manifest_splices_two_logs_inside_a_block() -> None:
    """The block behind the joint is filled from both; full blocks are shared."""
    store = build_store()
    one, two = kept_log(store, PROMPT), kept_log(store, [*PROMPT[:11], *PROMPT[11:], 1, 2])
    base = splice(
        [segment(store, one.log_id, 0, 11, PROMPT), segment(store, two.log_id, 11, 24, PROMPT)]
    )
    wanted = order([*PROMPT, 7], base=base)
    store.open(wanted, PREFILL, NOW)
    fills = [item for item in store.core.work if isinstance(item, FillPage)]
    assert [len(fill.sources) for fill in fills] == [2]
    fill_work(store)
    log = store.core.logs[wanted.log_id]
    assert log.cached_tokens == 24
    assert log.rows[0].page == one.log.rows[0].page
    assert log.rows[2].page == two.log.rows[2].page
    store.core.check_invariants()


def test_manifest_naming_a_log_that_is_not_granted_is_refused_naming_the_segment() -> None:
    """A manifest is a proposal; rights are checked when it is opened."""
    store = build_store()
    one = kept_log(store, PROMPT)
    base = splice([segment(store, one.log_id, 0, 16, PROMPT)])
    with pytest.raises(ServiceError) as refused:
        open_log(store, PROMPT, base=base, tenant="guest", scope=Scope(tenant="guest"))
    assert refused.value.reason is Reason.BLOCK_NOT_FOUND
    assert refused.value.metadata["segment"] == "0"
    store.core.check_invariants()


def test_manifest_whose_history_is_not_the_prompts_is_refused() -> None:
    """KV of other tokens would be served as the prompt's."""
    store = build_store()
    one = kept_log(store, PROMPT)
    base = splice([segment(store, one.log_id, 0, 16, PROMPT)])
    with pytest.raises(ServiceError) as refused:
        open_log(store, [1, *PROMPT[1:]], base=base)
    assert refused.value.field == "segments[0].history_end"


# --- published prefixes -----------------------------------------------------------------------


def test_published_prefix_outlives_its_log_until_it_is_revoked() -> None:
    """The prefix holds its own pages; revoking ends lookups, and users keep what they have."""
    store = build_store()
    one = kept_log(store, PROMPT)
    prefix_id = publish(store, one.log_id, 2 * BLOCK)
    store.keeper.close(one.log_id, is_dropped=True, wall_s=NOW.wall_s)
    store.core.check_invariants()
    base = splice([segment(store, one.log_id, 0, 2 * BLOCK, PROMPT)])
    guest = {"tenant": "guest", "scope": Scope(tenant="guest")}
    user = open_log(store, PROMPT, base=base, **guest)
    assert user.log.cached_tokens == 2 * BLOCK
    store.prefix_keeper.revoke(prefix_id, "acme", NOW.wall_s)
    with pytest.raises(ServiceError):
        open_log(store, PROMPT, base=base, **guest)
    user.prefill()
    store.core.check_invariants()


def test_prefix_is_found_by_those_it_names_only() -> None:
    """An unnamed tenant is refused as if the log was not there."""
    store = build_store()
    one = kept_log(store, PROMPT)
    publish(store, one.log_id, 2 * BLOCK, tenants=("friend",))
    base = splice([segment(store, one.log_id, 0, 2 * BLOCK, PROMPT)])
    with pytest.raises(ServiceError) as refused:
        open_log(store, PROMPT, base=base, tenant="guest", scope=Scope(tenant="guest"))
    assert refused.value.reason is Reason.BLOCK_NOT_FOUND
    assert store.core.prefixes.visible_to("guest") == []


def test_prefix_expires_and_frees_its_pages() -> None:
    """Wall time ends a prefix; its pages come back."""
    store = build_store()
    one = kept_log(store, PROMPT)
    publish(store, one.log_id, BLOCK, expire_wall_s=NOW.wall_s + 5)
    store.keeper.close(one.log_id, is_dropped=True, wall_s=NOW.wall_s)
    store.prefix_keeper.expire(NOW.wall_s + 5)
    assert store.core.pool.counts().free == 64


def test_publish_beyond_the_kv_or_with_wrong_hashes_is_refused() -> None:
    """What is offered must be there and be what it is called."""
    store = build_store()
    one = kept_log(store, PROMPT)
    for changes, field in (
        ({"position": 99}, "prefix.log.position"),
        ({"ids_hash": b"x" * 32}, "prefix.segment.ids_hash"),
        ({"history_end": b"x" * 32}, "prefix.segment.history_end"),
        ({"name": ""}, "prefix.name"),
    ):
        with pytest.raises(ServiceError) as refused:
            publish(store, one.log_id, **{"position": BLOCK, **changes})
        assert refused.value.field == field
    store.core.check_invariants()


# --- forks, cuts, ends ------------------------------------------------------------------------


def test_fork_shares_pages_and_copies_the_tail_when_it_is_taken() -> None:
    """Two branches of one history never write one page."""
    store = build_store()
    one = kept_log(store, PROMPT)
    fork = ForkOrder(log_id=new_id(), request_id="f", scope=SCOPE, sampling=None)
    parent = Parent(log_id=one.log_id, generation=0, position=BLOCK + 4)
    child = store.fork(parent, fork, None, NOW)
    assert child.committed == BLOCK + 3
    store.core.check_invariants()
    decode = take(store, fork.log_id)
    decode.append(1)
    assert decode.log.rows[1].page != one.log.rows[1].page
    assert list(decode.log.tokens) == [*PROMPT[: BLOCK + 4], 1]
    store.core.check_invariants()


def test_truncate_cuts_under_a_new_generation_and_goes_on_elsewhere() -> None:
    """An edit is a record; the old writer is fenced by it."""
    store = build_store()
    worker = open_log(store, PROMPT)
    worker.prefill(token=1)
    decode = take(store, worker.log_id, pages=2)
    for token in (2, 3, 4):
        decode.append(token)
    store.truncate(worker.log_id, decode.generation, len(PROMPT) + 2, NOW)
    assert list(decode.log.tokens) == [*PROMPT, 1, 2]
    with pytest.raises(ServiceError) as refused:
        decode.append(9)
    assert refused.value.reason is Reason.STALE_GENERATION
    again = take(store, worker.log_id)
    again.append(8)
    assert list(again.log.tokens) == [*PROMPT, 1, 2, 8]
    store.core.check_invariants()


def test_cancel_fences_first_and_is_idempotent() -> None:
    """A cancelled prefill is dropped, its pages quarantined until its worker lets go."""
    store = build_store()
    worker = open_log(store, PROMPT)
    worker.checkpoint(BLOCK + 1)
    generation = store.keeper.cancel(worker.log_id, NOW.wall_s)
    assert generation == 2
    assert store.keeper.cancel(worker.log_id, NOW.wall_s) == generation
    with pytest.raises(ServiceError) as refused:
        store.writes.checkpoint(worker.log_id, 1, (9, 10), [], 0.0)
    assert refused.value.reason is Reason.STALE_GENERATION
    counts = store.core.pool.counts()
    assert counts.quarantined == 4
    assert counts.free == 60
    store.core.check_invariants()
    store.keeper.worker_gone(PREFILL.slot, NOW.wall_s)
    assert store.core.pool.counts().free == 64


def test_cancelled_decode_keeps_the_log_for_reuse() -> None:
    """The client went away; what was computed serves the next request."""
    store = build_store()
    worker = open_log(store, PROMPT)
    worker.prefill()
    take(store, worker.log_id)
    store.keeper.cancel(worker.log_id, NOW.wall_s)
    assert worker.log.phase is Phase.KEPT
    assert worker.log.finish_reason == "cancelled"
    assert open_log(store, PROMPT).log.cached_tokens == len(PROMPT) - 1


def test_dropped_log_leaves_nothing_but_its_generation() -> None:
    """`store: false`: closed means gone; a late writer is told that it is stale."""
    store = build_store()
    worker = open_log(store, PROMPT, drop_at_end=True)
    worker.prefill(finish="stop")
    store.keeper.close(worker.log_id, is_dropped=False, wall_s=NOW.wall_s)
    store.keeper.close(worker.log_id, is_dropped=False, wall_s=NOW.wall_s)
    assert store.core.pool.counts().free == 64
    assert len(store.core.tree) == 0
    with pytest.raises(ServiceError) as refused:
        store.core.current(worker.log_id, 1)
    assert refused.value.reason is Reason.STALE_GENERATION


def test_kept_log_ends_with_its_ttl() -> None:
    """Wall time ends keeping, never ownership."""
    store = build_store()
    worker = kept_log(store, PROMPT, ttl_s=60.0)
    assert store.keeper.expire_logs(NOW.wall_s + 59) == []
    assert store.keeper.expire_logs(NOW.wall_s + 60) == [worker.log_id]
    assert store.core.pool.counts().free == 64


def test_full_arena_evicts_the_kv_of_the_least_recently_used_kept_log() -> None:
    """Tokens outlive KV: the evicted log can still be a parent, at the price of computing it."""
    store = build_store(pages=12)
    old = kept_log(store, PROMPT)
    new = kept_log(store, [1, *PROMPT])
    old.log.last_used_s, new.log.last_used_s = 1.0, 2.0
    open_log(store, [2, *PROMPT])
    assert old.log.committed == 0
    assert new.log.committed == len(PROMPT) + 1
    assert list(old.log.tokens[: len(PROMPT)]) == PROMPT
    store.core.check_invariants()


def test_base_is_not_evicted_to_make_room_for_its_own_child() -> None:
    """The base is pinned while room is made."""
    store = build_store(pages=7)
    one = kept_log(store, PROMPT)
    base = Parent(log_id=one.log_id, generation=0, position=len(PROMPT))
    child = open_log(store, [*PROMPT, 1, 2], base=base)
    assert child.log.cached_tokens == len(PROMPT)
    store.core.check_invariants()


def test_open_without_room_changes_nothing() -> None:
    """Refused with a hint when to come back; the running log is untouched."""
    store = build_store(pages=6)
    open_log(store, PROMPT)
    with pytest.raises(ServiceError) as refused:
        open_log(store, PROMPT)
    assert refused.value.reason is Reason.PAGES_EXHAUSTED
    assert len(store.core.logs) == 1
    store.core.check_invariants()


def test_prompt_that_never_fits_is_refused_for_good() -> None:
    """No retry makes an arena larger."""
    with pytest.raises(ServiceError) as refused:
        open_log(build_store(pages=2), PROMPT)
    assert refused.value.reason is Reason.PROMPT_TOO_LONG


def test_draining_store_opens_nothing() -> None:
    """Open logs finish, new ones go elsewhere."""
    store = build_store()
    store.is_draining = True
    with pytest.raises(ServiceError) as refused:
        open_log(store, PROMPT)
    assert refused.value.reason is Reason.DRAINING


# --- leases and workers -----------------------------------------------------------------------


def test_expired_lease_fences_the_log_and_leaves_it_to_be_taken() -> None:
    """Progress renews; without it another worker may go on from the same tokens."""
    store = build_store()
    worker = open_log(store, PROMPT)
    worker.checkpoint(BLOCK, now_s=NOW.monotonic_s + 5)
    assert store.keeper.expire_leases(NOW.monotonic_s + 14.9, NOW.wall_s) == []
    assert store.keeper.expire_leases(NOW.monotonic_s + 15, NOW.wall_s) == [worker.log_id]
    with pytest.raises(ServiceError) as refused:
        store.writes.checkpoint(worker.log_id, 1, (BLOCK, BLOCK + 1), [], 0.0)
    assert refused.value.reason is Reason.STALE_GENERATION
    second = take(store, worker.log_id, pages=4)
    second.prefill()
    store.core.check_invariants()


def test_renewal_without_progress_does_not_count() -> None:
    """A stuck loop's timer must not keep a log for ever."""
    leases = build_store().core.leases
    assert leases.has_progressed("w", 1, 5)
    assert not leases.has_progressed("w", 1, 5)
    assert leases.has_progressed("w", 1, 6)
    assert leases.has_progressed("w", 2, 1)


def test_dead_workers_logs_are_fenced_and_its_pages_come_back() -> None:
    """The lock is gone: nothing of it can be written any more."""
    store = build_store()
    worker = open_log(store, PROMPT)
    worker.checkpoint(BLOCK + 1)
    assert store.keeper.worker_gone(PREFILL.slot, NOW.wall_s) == [worker.log_id]
    counts = store.core.pool.counts()
    assert counts.quarantined == 0
    assert counts.granted == 0
    assert worker.log.committed == BLOCK + 1
    store.core.check_invariants()


def test_two_renewals_without_the_log_release_a_live_workers_pages() -> None:
    """One renewal may have been sent before the fence was known; the second was not."""
    store = build_store()
    table = WorkerTable()
    slot = table.new_slot("prefill-0", lambda _slot: False)
    worker = open_log(store, PROMPT)
    store.keeper.cancel(worker.log_id, NOW.wall_s)
    pool = store.core.pool
    assert table.released_by(slot, {(worker.log_id, 1)}, pool.fences()) == []
    assert table.released_by(slot, set(), pool.fences()) == []
    released = table.released_by(slot, set(), pool.fences())
    assert [fence.log_id for fence in released] == [worker.log_id]
    assert table.released_by(slot + 1, set(), pool.fences()) == []


def test_request_for_zero_or_too_many_tokens_is_refused_naming_the_field() -> None:
    """Sizes are checked before anything is allocated."""
    store = build_store(vocabulary_size=200)
    for tokens in ([], [200]):
        with pytest.raises(ServiceError) as refused:
            store.open(replace(order([1]), tokens=tokens), PREFILL, Now(monotonic_s=0, wall_s=0))
        assert refused.value.field == "prompt_token_ids"
