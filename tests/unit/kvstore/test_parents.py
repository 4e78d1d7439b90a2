"""Open with a parent: its KV, or more of what the prompt's tokens find. And after a restart."""

from __future__ import annotations

import pytest

from services.kvstore.log.state import Parent
from services.kvstore.store import Store
from tests.unit.kvstore.cores import (
    BLOCK,
    ListSink,
    WorkerModel,
    build_store,
    open_log,
    recovered_from,
)
from tests.unit.kvstore.test_store import PROMPT, kept_log


def begun(store: Store, tokens: list[int], parent: WorkerModel, position: int) -> WorkerModel:
    """A log that goes on from another one's first tokens."""
    base = Parent(log_id=parent.log_id, generation=0, position=position)
    return open_log(store, tokens, base=base)


@pytest.mark.parametrize("position", [3, BLOCK, 2 * BLOCK + 5, len(PROMPT)])
def test_a_parent_whose_kv_was_evicted_is_found_again_by_tokens(position: int) -> None:
    """Another log has the same beginning: only what nobody has is computed."""
    store = build_store(sink=ListSink())
    parent, other = kept_log(store, PROMPT), kept_log(store, [*PROMPT, 1, 2, 3])
    store.home.give_up_kv(store.core.logs[parent.log_id], 0)
    child = begun(store, [*PROMPT[:position], 7, 8], parent, position)
    assert child.log.cached_tokens == position
    assert child.log.parent_id == parent.log_id
    assert other.log.rows
    store.core.check_invariants()


def test_with_nobody_else_all_is_computed() -> None:
    """Tokens outlive KV: the parent is still good for them."""
    store = build_store()
    parent = kept_log(store, PROMPT)
    store.home.give_up_kv(store.core.logs[parent.log_id], 0)
    child = begun(store, [*PROMPT, 7], parent, len(PROMPT))
    assert child.log.cached_tokens == 0
    child.prefill()
    store.core.check_invariants()


def test_an_edit_that_was_undone_is_not_computed_again() -> None:
    """Behind the change the parent has other tokens; the log before the change has these."""
    store = build_store()
    first = kept_log(store, PROMPT)
    changed = kept_log(store, [*PROMPT[:4], 9, *PROMPT[5:]])
    again = begun(store, PROMPT, changed, 4)
    assert again.log.cached_tokens == len(PROMPT) - 1
    assert again.log.rows[0].page == first.log.rows[0].page
    store.core.check_invariants()


def test_a_request_without_the_cache_has_its_parents_kv_only() -> None:
    """It named the parent; it did not ask for what others left."""
    store = build_store()
    kept_log(store, PROMPT)
    changed = kept_log(store, [*PROMPT[:4], 9, *PROMPT[5:]])
    base = Parent(log_id=changed.log_id, generation=0, position=4)
    again = open_log(store, PROMPT, base=base, is_cacheable=False)
    assert again.log.cached_tokens == 4


@pytest.mark.parametrize("evicted_blocks", [None, 0, 1, 2])
@pytest.mark.parametrize("position", [1, 3, BLOCK, BLOCK + 1, len(PROMPT)])
def test_a_restart_gives_back_what_was_found_by_tokens(
    evicted_blocks: int | None, position: int
) -> None:
    """The record names the parent, and the KV that came from elsewhere; also where that reaches
    further than the parent did.
    """
    sink = ListSink()
    store = build_store(sink=sink)
    parent, other = kept_log(store, PROMPT), kept_log(store, [*PROMPT, 1, 2, 3])
    if evicted_blocks is not None:
        store.home.give_up_kv(store.core.logs[parent.log_id], evicted_blocks)
    child = begun(store, [*PROMPT, 1, 2, 8], parent, position)
    assert child.log.cached_tokens == len(PROMPT) + 2
    assert other.log.rows
    child.prefill()
    log = child.log
    back = recovered_from(sink.records, bytes(16)).logs[child.log_id]
    assert list(back.tokens) == list(log.tokens)
    assert back.cached_tokens == log.cached_tokens
    assert back.rows == log.rows
    assert (back.parent_id, back.parent_position) == (parent.log_id, position)


@pytest.mark.parametrize("tokens", [2, 5, BLOCK - 1])
def test_a_restart_believes_no_page_of_a_parent_that_was_not_taken(tokens: int) -> None:
    """A few tokens more than the parent has, in a copy that fills one partial page."""
    sink = ListSink()
    store = build_store(sink=sink)
    parent = kept_log(store, PROMPT[:2])
    kept_log(store, PROMPT)
    child = begun(store, [*PROMPT[:tokens], 7, 8], parent, 1)
    assert child.log.cached_tokens == tokens
    back = recovered_from(sink.records, bytes(16)).logs[child.log_id]
    assert back.committed <= tokens
    assert [row.page for row in back.rows] in ([], [row.page for row in child.log.rows])
    child.prefill()
    back = recovered_from(sink.records, bytes(16)).logs[child.log_id]
    assert back.rows == child.log.rows
