"""The page pool: conservation, fences, and the order in which pages come back."""

from __future__ import annotations

import pytest

from baton.errors import Reason, ServiceError
from services.kvstore.pages import Fence, PagePool, PageState

FENCE = Fence(worker_slot=3, log_id=bytes(16), generation=4)


def test_grant_beyond_the_free_pages_takes_nothing() -> None:
    """A refused grant must leave the pool as it was, with a hint when to come back."""
    pool = PagePool(4)
    pool.grant(3)
    with pytest.raises(ServiceError) as refused:
        pool.grant(2)
    assert refused.value.reason is Reason.PAGES_EXHAUSTED
    assert refused.value.retry_after_s is not None
    assert pool.free_count == 1
    pool.check_invariants()


def test_each_grant_of_a_page_has_another_page_generation() -> None:
    """A reference to an earlier use of a page must never fit a later one."""
    pool = PagePool(1)
    (page,) = pool.grant(1)
    first = pool.generation(page)
    pool.give_back(page)
    pool.grant(1)
    assert pool.generation(page) == first + 1


def test_page_is_free_only_after_its_last_holder_drops_it() -> None:
    """Sharing counts holders; live and shared follow the count."""
    pool = PagePool(2)
    (page,) = pool.grant(1)
    pool.commit(page)
    pool.hold(page)
    assert (pool.counts().live, pool.counts().shared) == (0, 1)
    pool.drop(page)
    assert (pool.counts().live, pool.counts().shared) == (1, 0)
    assert pool.take_freed() == []
    pool.drop(page)
    assert pool.take_freed() == [page]
    pool.check_invariants()


def test_fenced_granted_page_is_quarantined_until_the_fence_is_lifted() -> None:
    """A fenced writer may still write it: no timeout frees it (O4)."""
    pool = PagePool(2)
    (page,) = pool.grant(1)
    pool.fence(page, FENCE)
    assert pool.state(page) is PageState.QUARANTINED
    assert pool.counts().quarantined == 1
    assert pool.lift(FENCE) == 1
    assert pool.state(page) is PageState.FREE
    pool.check_invariants()


def test_fenced_held_page_is_quarantined_when_dropped_and_free_when_lifted_first() -> None:
    """Whichever comes last, the drop or the lift, frees a tail page that was being written."""
    pool = PagePool(2)
    one, other = pool.grant(2)
    for page in (one, other):
        pool.commit(page)
        pool.fence(page, FENCE)
    pool.drop(one)
    assert pool.state(one) is PageState.QUARANTINED
    pool.lift(FENCE)
    assert pool.state(one) is PageState.FREE
    assert pool.state(other) is PageState.HELD
    pool.drop(other)
    assert pool.state(other) is PageState.FREE
    pool.check_invariants()


def test_page_freed_longest_ago_is_granted_first() -> None:
    """Zeroing has then long been done, and nobody waits for it."""
    pool = PagePool(3)
    first, second, third = pool.grant(3)
    pool.give_back(third)
    pool.give_back(first)
    assert pool.grant(2) == [third, first]
    assert second not in pool.take_freed()
