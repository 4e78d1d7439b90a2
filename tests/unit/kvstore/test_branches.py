"""Branches of a log at every position, and what a dead one leaves."""

from __future__ import annotations

import pytest

from services.kvstore.log.state import Parent
from services.kvstore.store import ForkOrder, Store
from tests.unit.kvstore.cores import (
    BLOCK,
    NOW,
    SCOPE,
    WorkerModel,
    build_store,
    new_id,
    open_log,
    pages_of,
    take,
)

PROMPT = list(range(100, 100 + 3 * BLOCK + 2))


def branched_log(store: Store, state: str) -> WorkerModel:
    """A log of PROMPT and some output: being written, ended by its writer, or closed."""
    worker = open_log(store, PROMPT, is_cacheable=False)
    worker.prefill(token=1)
    decode = take(store, worker.log_id, pages=3)
    for token in range(2, BLOCK + 4):
        decode.append(token)
    decode.append(50, finish=None if state == "written" else "stop")
    if state == "kept":
        store.keeper.close(worker.log_id, is_dropped=False, wall_s=NOW.wall_s)
    return decode


@pytest.mark.parametrize("state", ["written", "ended", "kept"])
@pytest.mark.parametrize("is_edit", [False, True])
def test_every_position_of_a_log_is_branched_and_goes_on(state: str, is_edit: bool) -> None:
    """In the prompt and in the output, by a fork or by other tokens behind the cut; the parent is
    as it was, whatever becomes of the branches.
    """
    store = build_store(pages=400)
    parent = branched_log(store, state).log
    tokens, rows = list(parent.tokens), list(parent.rows)
    children = []
    for position in range(1, len(tokens) + 1):
        at = Parent(log_id=parent.log_id, generation=0, position=position)
        if is_edit:
            child = open_log(store, [*tokens[:position], 90, 91], base=at)
            child.prefill(token=92)
            expected = [*tokens[:position], 90, 91, 92]
        else:
            fork = ForkOrder(log_id=new_id(), request_id="f", scope=SCOPE, sampling=None)
            log = store.fork(at, fork, None, NOW)
            assert log.committed == min(parent.committed, position - 1)
            child = take(store, fork.log_id, pages=1)
            child.append(92)
            expected = [*tokens[:position], 92]
        assert list(child.log.tokens) == expected
        shared = min(parent.committed, position - (not is_edit)) // BLOCK
        assert [row.page for row in child.log.rows[:shared]] == [row.page for row in rows[:shared]]
        children.append(child)
        store.core.check_invariants()
    assert (list(parent.tokens), list(parent.rows)) == (tokens, rows)
    store.keeper.close(parent.log_id, is_dropped=True, wall_s=NOW.wall_s)
    store.core.check_invariants()
    for child in children[::2]:
        store.keeper.close(child.log_id, is_dropped=True, wall_s=NOW.wall_s)
        store.core.check_invariants()
    for child in children[1::2]:
        assert all(store.core.pool.holders(row.page) for row in child.log.rows)


def test_pages_of_a_dead_branch_are_freed_and_those_its_children_share_are_not() -> None:
    """A closed log costs what its living forks need of it, and nothing when they have ended."""
    store = build_store()
    parent = open_log(store, PROMPT, is_cacheable=False)
    parent.prefill(finish="stop")
    order_of = ForkOrder(log_id=new_id(), request_id="f", scope=SCOPE, sampling=None)
    store.fork(Parent(log_id=parent.log_id, generation=0, position=BLOCK + 1), order_of, None, NOW)
    store.keeper.close(parent.log_id, is_dropped=True, wall_s=NOW.wall_s)
    assert store.core.pool.counts().free == 63
    store.core.check_invariants()
    store.keeper.close(order_of.log_id, is_dropped=True, wall_s=NOW.wall_s)
    assert store.core.pool.counts().free == 64


def test_a_repeated_request_for_pages_is_told_the_pages_of_the_lost_answer() -> None:
    """Nobody would use, or give back, pages that nobody was told of."""
    store = build_store()
    worker = open_log(store, [1, 2, 3])
    granted = store.home.grant_up_to(worker.log, 2)
    before = store.core.pool.counts()
    assert store.home.grant_again(worker.log, 2) == granted
    assert store.core.pool.counts() == before
    few = list(worker.log.granted)
    assert pages_of(store.home.grant_again(worker.log, len(few) + 1))[:-1] == few
