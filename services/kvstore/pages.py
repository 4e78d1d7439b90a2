"""The page pool: which state each arena page is in, who holds it, how often it was granted.

Owns page states, page generations and holder counts. Pure: no I/O, no clock; it never touches a
page's bytes. Pages that become free are collected in order for the caller, who zeroes them before
they are written again.

Invariants (`check_invariants`): free + granted + live + shared + quarantined = pages; a free page
has no holder and no fence; a granted page has no holder; a page that a fenced writer may still
write (it has a *fence*) never becomes free before `lift`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import IntEnum, unique

from baton.errors import Reason, ServiceError


@unique
class PageState(IntEnum):
    """Where a page is in its life; held pages count as live (one holder) or shared."""

    FREE = 0
    GRANTED = 1
    HELD = 2
    QUARANTINED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """A fenced writer that may still write a page: its worker slot and what it wrote."""

    worker_slot: int
    log_id: bytes
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCounts:
    """Pages by state; their sum is the number of pages."""

    free: int
    granted: int
    live: int
    shared: int
    quarantined: int

    @property
    def total(self) -> int:
        """All pages."""
        return self.free + self.granted + self.live + self.shared + self.quarantined


class PagePool:
    """States of `page_count` pages, numbered from 0."""

    __slots__ = (
        "_fence_of",
        "_fenced",
        "_free",
        "_freed",
        "_generation",
        "_granted",
        "_holders",
        "_live",
        "_quarantined",
        "_shared",
        "_state",
        "page_count",
    )

    def __init__(self, page_count: int) -> None:
        assert page_count > 0, page_count
        self.page_count = page_count
        self._state = bytearray(page_count)
        self._generation = [0] * page_count
        self._holders = [0] * page_count
        # First in, first out: the page freed longest ago is granted next, so that its zeroing is
        # long done.
        self._free = deque(range(page_count))
        self._freed: list[int] = []
        self._fence_of: dict[int, Fence] = {}
        self._fenced: dict[Fence, set[int]] = {}
        self._granted = self._live = self._shared = self._quarantined = 0

    @property
    def free_count(self) -> int:
        """Pages that a grant could have now."""
        return len(self._free)

    def counts(self) -> PageCounts:
        """Pages by state."""
        return PageCounts(
            free=len(self._free),
            granted=self._granted,
            live=self._live,
            shared=self._shared,
            quarantined=self._quarantined,
        )

    def state(self, page: int) -> PageState:
        """The state of one page."""
        return PageState(self._state[page])

    def generation(self, page: int) -> int:
        """How often the page has been granted; 0 before the first time."""
        return self._generation[page]

    def holders(self, page: int) -> int:
        """How many logs, published prefixes and transfers refer to the page."""
        return self._holders[page]

    def grant(self, count: int) -> list[int]:
        """Takes `count` free pages for one writer; PAGES_EXHAUSTED, and nothing taken, if fewer."""
        if count > len(self._free):
            raise pages_exhausted(count, len(self._free))
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            self._state[page] = PageState.GRANTED
            self._generation[page] += 1
        self._granted += count
        return pages

    def commit(self, page: int) -> None:
        """A granted page now holds KV of one log."""
        assert self._state[page] == PageState.GRANTED, (page, self.state(page))
        self._state[page] = PageState.HELD
        self._granted -= 1
        self._live += 1
        self._holders[page] = 1

    def hold(self, page: int) -> None:
        """One more holder of a held page."""
        assert self._state[page] == PageState.HELD, (page, self.state(page))
        self._holders[page] += 1
        if self._holders[page] == 2:
            self._live -= 1
            self._shared += 1

    def drop(self, page: int) -> None:
        """One holder less; the last one frees the page, or quarantines it while it is fenced."""
        assert self._state[page] == PageState.HELD, (page, self.state(page))
        assert self._holders[page] > 0, page
        self._holders[page] -= 1
        left = self._holders[page]
        if left == 1:
            self._shared -= 1
            self._live += 1
        elif left == 0:
            self._live -= 1
            if page in self._fence_of:
                self._state[page] = PageState.QUARANTINED
                self._quarantined += 1
            else:
                self._release(page)

    def give_back(self, page: int) -> None:
        """A granted page whose writer is done with it by name becomes free."""
        assert self._state[page] == PageState.GRANTED, (page, self.state(page))
        self._granted -= 1
        self._release(page)

    def fence(self, page: int, fence: Fence) -> None:
        """A fenced writer may still write `page`: granted pages are quarantined at once, held ones
        when their last holder drops them.
        """
        assert page not in self._fence_of, page
        self._fence_of[page] = fence
        self._fenced.setdefault(fence, set()).add(page)
        if self._state[page] == PageState.GRANTED:
            self._state[page] = PageState.QUARANTINED
            self._granted -= 1
            self._quarantined += 1

    def lift(self, fence: Fence) -> int:
        """The fenced writer is gone, or named the log as released; returns the pages freed."""
        pages = sorted(self._fenced.pop(fence, ()))
        freed = 0
        for page in pages:
            del self._fence_of[page]
            if self._state[page] == PageState.QUARANTINED:
                self._quarantined -= 1
                self._release(page)
                freed += 1
        return freed

    def fences(self) -> list[Fence]:
        """Every fence that still covers pages."""
        return list(self._fenced)

    def take_freed(self) -> list[int]:
        """The pages that became free since the last call, in order; they are to be zeroed."""
        freed, self._freed = self._freed, []
        return freed

    def _release(self, page: int) -> None:
        self._state[page] = PageState.FREE
        self._free.append(page)
        self._freed.append(page)

    def check_invariants(self) -> None:
        """Asserts conservation and agreement of all the tables; walks every page."""
        counts = self.counts()
        assert counts.total == self.page_count, counts
        states = [PageState(state) for state in self._state]
        assert sorted(self._free) == [p for p, s in enumerate(states) if s is PageState.FREE]
        assert self._granted == states.count(PageState.GRANTED)
        assert self._quarantined == states.count(PageState.QUARANTINED)
        held = [p for p, s in enumerate(states) if s is PageState.HELD]
        assert self._live == sum(self._holders[p] == 1 for p in held)
        assert self._shared == sum(self._holders[p] >= 2 for p in held)
        assert all((self._holders[p] > 0) == (s is PageState.HELD) for p, s in enumerate(states))
        fenced = {page for pages in self._fenced.values() for page in pages}
        assert fenced == set(self._fence_of)
        for page, fence in self._fence_of.items():
            assert page in self._fenced[fence]
            assert states[page] in (PageState.HELD, PageState.QUARANTINED), (page, states[page])
        assert all(p in fenced for p, s in enumerate(states) if s is PageState.QUARANTINED)


def pages_exhausted(wanted: int, free: int) -> ServiceError:
    """The refusal of a grant that the arena cannot give now."""
    return ServiceError(
        Reason.PAGES_EXHAUSTED,
        f"{wanted} pages wanted, {free} free; retry later or start the kvstore with more "
        "--arena-bytes",
        metadata={"wanted": str(wanted), "free": str(free)},
        retry_after_s=0.5,
    )
