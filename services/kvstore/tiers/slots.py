"""The NVMe tier's slots: who holds which, and which host page stands in which slot already.

Owns slot states (a `PagePool` of slots: a slot is granted while it is written, held by each cold
row and by each running read of it, free otherwise) and the map from a use of a host page to its
copy. Pure: no I/O; never touches a slot's bytes.

Invariants: a retired slot is never granted again in this life of the store; the map names only held
slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from services.kvstore.pages import PageCounts, PageNumbers, PagePool, PageState


class Slots:
    """States of `slot_count` slots, numbered from 0. `generation_floor`: as of `PagePool`."""

    def __init__(self, slot_count: int, generation_floor: int = 0) -> None:
        self.pool = PagePool(slot_count, generation_floor)
        self._retired: set[int] = set()
        # A use of a host page (page, page generation) -> slot, and back.
        self._copies: dict[int, tuple[int, int]] = {}
        self._page_of: dict[int, int] = {}

    @property
    def slot_count(self) -> int:
        """All slots."""
        return self.pool.page_count

    @property
    def free_count(self) -> int:
        """Slots that a grant could have now."""
        return self.pool.free_count

    @property
    def retired_count(self) -> int:
        """Slots that failed, and are not used again in this life."""
        return len(self._retired)

    def counts(self) -> PageCounts:
        """Slots by state; retired ones count as held."""
        return self.pool.counts()

    def generation(self, slot: int) -> int:
        """The slot generation of the slot's latest use."""
        return self.pool.generation(slot)

    def is_current(self, slot: int, slot_generation: int) -> bool:
        """Whether the slot is held, and still in this use of it, and has not failed."""
        return self.pool.is_held(slot, slot_generation) and slot not in self._retired

    def grant(self, count: int) -> list[int]:
        """Takes `count` free slots to be written; PAGES_EXHAUSTED, and nothing taken, if fewer."""
        return self.pool.grant(count)

    def written(self, slots: PageNumbers) -> None:
        """Granted slots stand on disk: each is held once, by the caller."""
        self.pool.commit_many(slots)

    def give_back(self, slots: Iterable[int]) -> None:
        """Granted slots that were not written, or in vain, are free."""
        for slot in slots:
            self.pool.give_back(slot)
        self._forget_freed()

    def hold(self, slots: PageNumbers) -> None:
        """One more holder of each."""
        self.pool.hold_many(slots)

    def drop(self, slots: PageNumbers) -> None:
        """One holder less of each; the last one frees it, and it is a copy of nothing any more."""
        self.pool.drop_many(slots)
        self._forget_freed()

    def retire(self, slot: int) -> None:
        """The slot's bytes could not be read, written or believed: it is held for good."""
        if slot in self._retired:
            return
        state = self.pool.state(slot)
        assert state in (PageState.GRANTED, PageState.HELD), (slot, state)
        if state is PageState.GRANTED:
            self.pool.commit(slot)
        else:
            self.pool.hold(slot)
        self.pool.disown(slot)
        self._retired.add(slot)
        self._forget(slot)

    def copy_of(self, page: int, page_generation: int) -> int | None:
        """The slot that has the content of this use of a host page."""
        found = self._copies.get(page)
        return found[1] if found is not None and found[0] == page_generation else None

    def page_of(self, slot: int) -> tuple[int, int] | None:
        """The use of a host page (page, page generation) that has the slot's content."""
        page = self._page_of.get(slot)
        return None if page is None else (page, self._copies[page][0])

    def note_copy(self, page: int, page_generation: int, slot: int) -> None:
        """A held slot has the content of this use of a host page, which is full."""
        assert self.pool.state(slot) is PageState.HELD, (slot, self.pool.state(slot))
        known = self._copies.get(page)
        if known is not None:
            self._page_of.pop(known[1], None)
        self._forget(slot)
        self._copies[page] = (page_generation, slot)
        self._page_of[slot] = page

    def forget_pages(self, pages: Iterable[int]) -> None:
        """These host pages are used for something else."""
        if not self._copies:
            return
        for page in pages:
            known = self._copies.pop(page, None)
            if known is not None:
                del self._page_of[known[1]]

    def restore(self, generations: Mapping[int, int], holders: Mapping[int, int]) -> None:
        """At a restart, of an empty table: slots with their slot generations and holder counts."""
        assert self.pool.free_count == self.slot_count
        held = {slot: generations[slot] for slot in holders}
        self.pool.claim(held)
        self.pool.commit_many(list(held))
        for slot, count in holders.items():
            for _ in range(count - 1):
                self.pool.hold(slot)

    def _forget_freed(self) -> None:
        for slot in self.pool.take_freed():
            self._forget(slot)

    def _forget(self, slot: int) -> None:
        page = self._page_of.pop(slot, None)
        if page is not None:
            del self._copies[page]

    def check_invariants(self, holders: Mapping[int, int], writing: Sequence[int] = ()) -> None:
        """Asserts conservation, that each slot has exactly `holders` (slot -> count) and that those
        `writing` are the granted ones.
        """
        self.pool.check_invariants()
        expected = np.zeros(self.slot_count, dtype=np.int64)
        for slot, count in holders.items():
            expected[slot] += count
        for slot in self._retired:
            expected[slot] += 1
        actual = self.pool.holder_counts()
        wrong = np.flatnonzero(expected != actual).tolist()
        assert not wrong, [(slot, int(actual[slot]), int(expected[slot])) for slot in wrong]
        granted = {s for s in range(self.slot_count) if self.pool.state(s) is PageState.GRANTED}
        assert granted == set(writing), (granted, writing)
        assert self._page_of == {slot: page for page, (_, slot) in self._copies.items()}
        for slot in self._page_of:
            assert self.pool.state(slot) is PageState.HELD, slot
            assert slot not in self._retired
