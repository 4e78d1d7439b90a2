"""The page pool: which state each arena page is in, who holds it, how often it was granted.

Owns page states, page generations and holder counts. Pure: no I/O, no clock; it never touches a
page's bytes. Pages that become free are collected in order for the caller, who zeroes them before
they are written again.

Invariants (`check_invariants`): free + granted + live + shared + quarantined = pages; a free page
has no holder and no fence; a granted page has no holder; a page that a fenced writer may still
write (it has a *fence*) never becomes free before `lift`.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, unique
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from baton.errors import Reason, ServiceError
from services.kvstore.quotas import Charges

PageNumbers: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]


@unique
class PageState(IntEnum):
    """Where a page is in its life; held pages count as live (one holder) or shared."""

    FREE = 0
    GRANTED = 1
    HELD = 2
    QUARANTINED = 3


RUN_PAGES_MIN: Final = 256
"""From so many pages on it pays to treat them as a run."""

# The plain numbers: comparing bytes with an enum's members is several times slower.
FREE: Final = PageState.FREE.value
GRANTED: Final = PageState.GRANTED.value
HELD: Final = PageState.HELD.value
QUARANTINED: Final = PageState.QUARANTINED.value


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


class PageQueue:
    """Free pages, first in, first out, kept in runs as they came: thousands go in at once."""

    __slots__ = ("_count", "_first", "_runs")

    def __init__(self, pages: Iterable[int]) -> None:
        self._runs: deque[array[int]] = deque((array("I", pages),))
        # Pages of the first run that are gone already.
        self._first = 0
        self._count = len(self._runs[0])

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        skipped = self._first
        for run in self._runs:
            yield from run[skipped:]
            skipped = 0

    def push(self, page: int) -> None:
        """One more, the last."""
        self._runs[-1].append(page)
        self._count += 1

    def push_many(self, pages: array[int]) -> None:
        """More of them, in order."""
        if len(pages) < RUN_PAGES_MIN:
            self._runs[-1].extend(pages)
        else:
            self._runs.append(pages)
        self._count += len(pages)

    def pop(self, count: int) -> list[int]:
        """The first `count`, which are there."""
        assert count <= self._count
        self._count -= count
        popped: list[int] = []
        while count:
            run, first = self._runs[0], self._first
            taken = run[first : first + count].tolist()
            popped += taken
            count -= len(taken)
            self._first += len(taken)
            if self._first == len(run):
                self._first = 0
                self._runs.popleft()
                if not self._runs:
                    self._runs.append(array("I"))
        return popped


class PagePool:
    """States of `page_count` pages, numbered from 0.

    Each table is a typed array for single pages and a numpy view of the same memory for many: what
    a log of any length holds is counted in one go. Pages given as `many` are distinct.
    `generation_floor` is what every page's generation starts from. `charges`, where quotas are
    held, is told of every page that stops being free and of every one that is free again.
    """

    __slots__ = (
        "_fence_marks",
        "_fence_of",
        "_fenced",
        "_free",
        "_freed",
        "_generation",
        "_generations",
        "_granted",
        "_holder_counts",
        "_holders",
        "_live",
        "_quarantined",
        "_shared",
        "_state",
        "_states",
        "charges",
        "page_count",
    )

    def __init__(self, page_count: int, generation_floor: int = 0) -> None:
        assert page_count > 0, page_count
        self.page_count = page_count
        self.charges: Charges | None = None
        self._state = bytearray(page_count)
        self._states = np.frombuffer(self._state, dtype=np.uint8)
        self._generation = array("Q", [generation_floor]) * page_count
        self._generations = np.frombuffer(self._generation, dtype=np.uint64)
        self._holders = array("I", [0]) * page_count
        self._holder_counts = np.frombuffer(self._holders, dtype=np.uint32)
        # First in, first out: the page freed longest ago is granted next, so that its zeroing is
        # long done.
        self._free = PageQueue(range(page_count))
        self._freed = array("I")
        self._fence_of: dict[int, Fence] = {}
        self._fenced: dict[Fence, set[int]] = {}
        self._fence_marks = np.zeros(page_count, dtype=np.bool_)
        self._granted = self._live = self._shared = self._quarantined = 0

    @property
    def free_count(self) -> int:
        """Pages that a grant could have now."""
        return len(self._free)

    def free_pages(self) -> list[int]:
        """Pages that a grant could have now, the next one first."""
        return list(self._free)

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
        """The number of the page's latest grant; the floor before the first one."""
        return self._generation[page]

    def generations(self, pages: PageNumbers) -> list[int]:
        """`generation` of each page."""
        found: list[int] = self._generations[_index(pages)].tolist()
        return found

    def holders(self, page: int) -> int:
        """How many logs, published prefixes and transfers refer to the page."""
        return self._holders[page]

    def holder_counts(self) -> npt.NDArray[np.uint32]:
        """`holders` of every page; the caller's own copy."""
        return self._holder_counts.copy()

    def is_held(self, page: int, page_generation: int) -> bool:
        """Whether the page is in use, and still in this use of it."""
        return self._state[page] == HELD and self._generation[page] == page_generation

    def grant(self, count: int, tenant: str | None = None) -> list[int]:
        """Takes `count` free pages for one writer; PAGES_EXHAUSTED, and nothing taken, if fewer.

        All get one page generation, over the last one of each: the record of a run is one extent.
        They are charged to `tenant`; whether its quota lets it have them was asked before.
        """
        if count > len(self._free):
            raise pages_exhausted(count, len(self._free))
        pages = self._free.pop(count)
        if count == 1:
            self._state[pages[0]] = GRANTED
            self._generation[pages[0]] += 1
        elif count:
            index = _index(pages)
            self._states[index] = GRANTED
            self._generations[index] = self._generations[index].max() + 1
        self._granted += count
        if self.charges is not None:
            self.charges.charge(pages, tenant)
        return pages

    def claim(self, pages: Mapping[int, int]) -> None:
        """At a restart: free pages are granted under exactly these page generations.

        They are charged to nobody before the tables are filled (`quota_book.recharge`).
        """
        assert all(self._state[page] == PageState.FREE for page in pages)
        self._free = PageQueue(page for page in self._free if page not in pages)
        for page, page_generation in pages.items():
            self._state[page] = GRANTED
            self._generation[page] = page_generation
        self._granted += len(pages)
        if self.charges is not None:
            self.charges.charge(list(pages), None)

    def commit(self, page: int) -> None:
        """A granted page now holds KV of one log."""
        assert self._state[page] == GRANTED, (page, self.state(page))
        self._state[page] = HELD
        self._granted -= 1
        self._live += 1
        self._holders[page] = 1

    def commit_many(self, pages: PageNumbers) -> None:
        """`commit` of each page."""
        index = _index(pages)
        assert (self._states[index] == GRANTED).all()
        self._states[index] = HELD
        self._holder_counts[index] = 1
        self._granted -= len(index)
        self._live += len(index)

    def hold(self, page: int) -> None:
        """One more holder of a held page."""
        assert self._state[page] == HELD, (page, self.state(page))
        self._holders[page] += 1
        if self._holders[page] == 2:
            self._live -= 1
            self._shared += 1

    def hold_many(self, pages: PageNumbers) -> None:
        """`hold` of each page."""
        index = _run_or_index(pages)
        assert (self._states[index] == HELD).all()
        holders = self._holder_counts[index] + np.uint32(1)
        self._holder_counts[index] = holders
        second = int(np.count_nonzero(holders == 2))
        self._live -= second
        self._shared += second

    def drop(self, page: int) -> None:
        """One holder less; the last one frees the page, or quarantines it while it is fenced."""
        assert self._state[page] == HELD, (page, self.state(page))
        assert self._holders[page] > 0, page
        self._holders[page] -= 1
        left = self._holders[page]
        if left == 1:
            self._shared -= 1
            self._live += 1
        elif left == 0:
            self._live -= 1
            if page in self._fence_of:
                self._state[page] = QUARANTINED
                self._quarantined += 1
            else:
                self._release(page)

    def drop_many(self, pages: PageNumbers) -> None:
        """`drop` of each page."""
        index = _index(pages)
        assert (self._states[index] == HELD).all()
        holders = self._holder_counts[index]
        assert (holders > 0).all()
        holders -= 1
        self._holder_counts[index] = holders
        alone = int(np.count_nonzero(holders == 1))
        self._shared -= alone
        self._live += alone
        gone = index[holders == 0]
        self._live -= len(gone)
        is_fenced = self._fence_marks[gone]
        fenced, freed = gone[is_fenced], gone[~is_fenced]
        self._states[fenced] = QUARANTINED
        self._quarantined += len(fenced)
        self._states[freed] = FREE
        if self.charges is not None:
            self.charges.uncharge_many(freed)
        released = array("I", freed.astype(np.uint32).tobytes())
        self._freed.extend(released)
        self._free.push_many(released)

    def give_back(self, page: int) -> None:
        """A granted page whose writer is done with it by name becomes free."""
        assert self._state[page] == GRANTED, (page, self.state(page))
        self._granted -= 1
        self._release(page)

    def fence(self, page: int, fence: Fence) -> None:
        """A fenced writer may still write `page`: granted pages are quarantined at once, held ones
        when their last holder drops them.
        """
        assert page not in self._fence_of, page
        self._fence_of[page] = fence
        self._fence_marks[page] = True
        self._fenced.setdefault(fence, set()).add(page)
        if self._state[page] == GRANTED:
            self._state[page] = QUARANTINED
            self._granted -= 1
            self._quarantined += 1

    def disown(self, page: int) -> None:
        """The page will not be used again in this life: no tenant pays for it."""
        if self.charges is not None:
            self.charges.disown(page)

    def lift(self, fence: Fence) -> int:
        """The fenced writer is gone, or named the log as released; returns the pages freed."""
        pages = sorted(self._fenced.pop(fence, ()))
        freed = 0
        for page in pages:
            del self._fence_of[page]
            self._fence_marks[page] = False
            if self._state[page] == QUARANTINED:
                self._quarantined -= 1
                self._release(page)
                freed += 1
        return freed

    def fences(self) -> list[Fence]:
        """Every fence that still covers pages."""
        return list(self._fenced)

    def fence_of(self, page: int) -> Fence | None:
        """The fenced writer that may still write the page."""
        return self._fence_of.get(page)

    def fenced_pages(self, fence: Fence) -> dict[int, int]:
        """The pages a fence covers, with their page generations."""
        return {page: self._generation[page] for page in sorted(self._fenced.get(fence, ()))}

    def take_freed(self) -> list[int]:
        """The pages that became free since the last call, in order; they are to be zeroed."""
        return self.take_freed_array().tolist()

    def take_freed_array(self) -> array[int]:
        """`take_freed`, as an array."""
        freed, self._freed = self._freed, array("I")
        return freed

    def _release(self, page: int) -> None:
        self._state[page] = FREE
        if self.charges is not None:
            self.charges.uncharge(page)
        self._free.push(page)
        self._freed.append(page)

    def check_invariants(self) -> None:
        """Asserts conservation and agreement of all the tables; walks every page."""
        counts = self.counts()
        assert counts.total == self.page_count, counts
        states, holders = self._states, self._holder_counts
        assert sorted(self._free) == np.flatnonzero(states == FREE).tolist()
        assert self._granted == np.count_nonzero(states == GRANTED)
        quarantined = states == QUARANTINED
        assert self._quarantined == np.count_nonzero(quarantined)
        assert np.array_equal(holders > 0, states == HELD)
        assert self._live == np.count_nonzero(holders == 1)
        assert self._shared == np.count_nonzero(holders >= 2)
        marks = self._fence_marks
        assert set(self._fence_of) == set(np.flatnonzero(marks).tolist())
        assert sum(len(pages) for pages in self._fenced.values()) == len(self._fence_of)
        for page, fence in self._fence_of.items():
            assert page in self._fenced[fence]
        assert not np.any(marks & (states != HELD) & ~quarantined), "a fence over no written page"
        assert not np.any(quarantined & ~marks), "quarantined, and nobody says for whom"
        if self.charges is not None:
            self.charges.check_invariants(states == FREE)


def _run_or_index(pages: PageNumbers) -> npt.NDArray[np.int64] | slice:
    """A slice where the pages are a run, which is many times faster than an index."""
    index = _index(pages)
    is_run = len(index) >= RUN_PAGES_MIN and index[-1] - index[0] == len(index) - 1
    if is_run and (np.diff(index) == 1).all():
        return slice(int(index[0]), int(index[-1]) + 1)
    return index


def _index(pages: PageNumbers) -> npt.NDArray[np.int64]:
    return np.asarray(pages, dtype=np.int64)


def pages_exhausted(wanted: int, free: int) -> ServiceError:
    """The refusal of a grant that the arena cannot give now."""
    return ServiceError(
        Reason.PAGES_EXHAUSTED,
        f"{wanted} pages wanted, {free} free; retry later or start the kvstore with more "
        "--arena-bytes",
        metadata={"wanted": str(wanted), "free": str(free)},
        retry_after_s=0.5,
    )
