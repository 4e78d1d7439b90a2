"""Attacks on the kvstore's cores: small cases that once broke a promise, or were tried and did not.

Each is named after what must not happen.
"""

from __future__ import annotations

from tests.unit.kvstore.cores import BLOCK, NOW, build_store, fill_work, open_log


def test_a_cut_does_not_change_what_lookups_find() -> None:
    """O2, O7: a truncated log's full pages stay findable as full pages, or not at all."""
    store = build_store()
    tokens = list(range(3 * BLOCK))
    first = open_log(store, tokens)
    first.prefill()
    store.truncate(first.log_id, first.generation, 2 * BLOCK - 2, NOW)
    fill_work(store)
    second = open_log(store, tokens, request_id="r2")
    store.core.check_invariants()
    assert sum(row.tokens for row in second.log.rows) == second.log.committed


def test_a_log_that_its_writer_ended_and_nobody_closed_ends_with_its_time() -> None:
    """A gateway that dies before Close leaves nothing for ever: the sweep looks at such a log."""
    store = build_store(pages=8)
    ended = open_log(store, list(range(5)))
    ended.prefill(token=3, finish="stop")
    store.core.check_invariants()
    store.keeper.expire_logs(NOW.wall_s)
    store.keeper.expire_logs(NOW.wall_s + 1e6)
    fill_work(store)
    assert not store.core.logs
    assert store.core.pool.counts().free == 8


def test_kv_of_a_log_that_its_writer_ended_can_make_room() -> None:
    """What nobody closed is evicted like what was closed."""
    store = build_store(pages=4)
    ended = open_log(store, list(range(3 * BLOCK)))
    ended.prefill(token=3, finish="stop")
    other = open_log(store, [60 + index for index in range(2 * BLOCK)], request_id="r2")
    assert other.log.writer is not None
    store.core.check_invariants()
