"""Many pages at once: the same as one after the other, whatever was done before."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.kvstore.pages import Fence, PagePool, PageState

PAGES = 12
FENCES = [Fence(worker_slot=slot, log_id=bytes(16), generation=slot + 1) for slot in range(2)]

steps = st.lists(
    st.tuples(
        st.sampled_from(["grant", "commit", "hold", "drop", "fence", "lift", "give_back"]),
        st.sets(st.integers(0, PAGES - 1), max_size=PAGES),
        st.integers(0, 1),
    ),
    max_size=40,
)


def apply(pool: PagePool, step: str, pages: list[int], *, is_bulk: bool) -> list[int]:
    """One step on the pages that can take it; the pages granted."""
    wanted = {"commit": PageState.GRANTED, "give_back": PageState.GRANTED}
    fitting = [p for p in pages if pool.state(p) is wanted.get(step, PageState.HELD)]
    many = {"commit": pool.commit_many, "hold": pool.hold_many, "drop": pool.drop_many}
    one = {
        "commit": pool.commit,
        "hold": pool.hold,
        "drop": pool.drop,
        "give_back": pool.give_back,
    }
    if step == "grant":
        return pool.grant(min(len(pages), pool.free_count))
    if is_bulk and step in many:
        many[step](fitting)
        return []
    for page in fitting:
        one[step](page)
    return []


@given(steps)
@settings(max_examples=150, deadline=None)
def test_many_pages_at_once_is_one_after_the_other(script: list[tuple[str, set[int], int]]) -> None:
    """Counts, states, generations and the order in which pages come back are the same."""
    bulk, single = PagePool(PAGES), PagePool(PAGES)
    for step, chosen, fence in script:
        pages = sorted(chosen)
        if step == "lift":
            assert bulk.lift(FENCES[fence]) == single.lift(FENCES[fence])
        elif step == "fence":
            for page in pages:
                can = bulk.state(page) in (PageState.GRANTED, PageState.HELD)
                if can and bulk.fence_of(page) is None:
                    bulk.fence(page, FENCES[fence])
                    single.fence(page, FENCES[fence])
        else:
            granted = apply(bulk, step, pages, is_bulk=True)
            assert granted == apply(single, step, pages, is_bulk=False)
            assert len({bulk.generation(page) for page in granted}) <= 1
        bulk.check_invariants()
        assert bulk.counts() == single.counts()
    everything = range(PAGES)
    for view in (PagePool.state, PagePool.generation, PagePool.holders):
        assert [view(bulk, p) for p in everything] == [view(single, p) for p in everything]
    assert bulk.take_freed() == single.take_freed()


def test_claimed_pages_come_back_under_the_generations_they_had() -> None:
    """A restart takes over what the log says is granted, and nothing is granted twice."""
    pool = PagePool(4, generation_floor=10)
    pool.claim({2: 7, 0: 9})
    assert (pool.generation(2), pool.generation(0)) == (7, 9)
    assert pool.grant(2) == [1, 3]
    assert pool.generation(3) == 11
    pool.check_invariants()
