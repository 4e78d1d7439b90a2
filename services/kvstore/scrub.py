"""Which stored pages are due to be checked, and how many at a time.

Owns a pass over one tier: what it covers, its order and its pace. Pure; time is passed in. It only
takes pages that are immutable and of a known CRC: one that is still written is never judged. In the
arena these are the full ones; copies on NVMe are never written again, partial ones neither.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from services.kvstore.pages import Fence
from services.kvstore.rows import PageArray, PageRow, Rows, cut_row

SCRUB_SLOT: Final = 0xFFFF_FFFF
SCRUB_FENCE: Final = Fence(worker_slot=SCRUB_SLOT, log_id=bytes(16), generation=0)
"""Over pages whose memory does not keep what is written: no worker has this slot, so nobody lifts
it in this life of the store, and nothing records it.
"""

BATCH_PAGES_MAX: Final = 64
BATCH_BYTES_MAX: Final = 16 << 20
"""Most that is checked in one go: a few milliseconds of the thread's time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Every byte once in `period_s`, at most `bytes_per_s`."""

    period_s: float
    bytes_per_s: int

    def needs_s(self, pages: int, page_bytes: int) -> float:
        """Seconds that a pass over so many pages takes."""
        return max(self.period_s, pages * page_bytes / self.bytes_per_s)

    def due(self, pages: int, page_bytes: int, elapsed_s: float) -> int:
        """Pages of a pass that should be done so long after its begin."""
        share = min(1.0, elapsed_s / self.needs_s(pages, page_bytes))
        return min(pages, math.ceil(pages * share))

    def most(self, page_bytes: int, turn_s: float) -> int:
        """Pages of one turn: what was missed while the process stood still is not made up for at
        once.
        """
        return max(1, int(self.bytes_per_s * turn_s / page_bytes))


def batch_pages(page_bytes: int) -> int:
    """Pages that are checked in one go."""
    return max(1, min(BATCH_PAGES_MAX, BATCH_BYTES_MAX // page_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """Pages to be checked: which use of them, and what their content must hash to.

    `partial` has the rows of those that are not full, by page.
    """

    pages: PageArray
    generations: npt.NDArray[np.uint64]
    crcs: npt.NDArray[np.uint32]
    block_tokens: int
    partial: Mapping[int, PageRow]

    def __len__(self) -> int:
        return len(self.pages)

    def only(self, chosen: Sequence[int]) -> Due:
        """Those of the pages, by their index."""
        at = np.array(chosen, dtype=np.int64)
        return Due(
            pages=self.pages[at],
            generations=self.generations[at],
            crcs=self.crcs[at],
            block_tokens=self.block_tokens,
            partial=self.partial,
        )

    def row(self, at: int) -> PageRow:
        """What one page must hold."""
        page = int(self.pages[at])
        partial = self.partial.get(page)
        if partial is not None:
            return partial
        return PageRow(
            page=page,
            page_generation=int(self.generations[at]),
            tokens=self.block_tokens,
            crc=int(self.crcs[at]),
        )


class Pass:
    """One pass: what stood in the tables at its begin, in the order of the pages."""

    def __init__(self, page_count: int, block_tokens: int, *, has_partial: bool = False) -> None:
        self._block_tokens = block_tokens
        self._has_partial = has_partial
        self._partial: dict[int, PageRow] = {}
        self._generations = np.zeros(page_count, dtype=np.uint64)
        self._crcs = np.zeros(page_count, dtype=np.uint32)
        self._is_known = np.zeros(page_count, dtype=np.bool_)
        self._pages: PageArray | None = None
        self.done = 0

    def add(self, rows: Rows) -> None:
        """Takes the pages of a page table in; of rows still being filled, none."""
        known = rows.known()
        columns = rows.columns()
        full = min(known, len(columns.pages))
        self._note(columns.pages[:full], columns.generations[:full], columns.crcs[:full])
        last = rows.last
        if last is None or known < len(rows):
            return
        if last.crc is not None:
            self._partial.pop(last.page, None)
            self._note([last.page], [last.page_generation], [last.crc])
        elif self._has_partial and not self._is_known[last.page]:
            # A copy of it: the log's own row goes on growing.
            self._partial[last.page] = cut_row(last, last.tokens)
            self._note([last.page], [last.page_generation], [0])

    def _note(
        self,
        pages: Sequence[int] | PageArray,
        generations: Sequence[int] | npt.NDArray[np.uint64],
        crcs: Sequence[int] | npt.NDArray[np.uint32],
    ) -> None:
        self._generations[pages] = generations
        self._crcs[pages] = crcs
        self._is_known[pages] = True

    def begin(self) -> None:
        """Everything was taken in."""
        self._pages = np.flatnonzero(self._is_known).astype(np.uint32)

    @property
    def pages(self) -> int:
        """Pages of the pass."""
        return 0 if self._pages is None else len(self._pages)

    @property
    def is_over(self) -> bool:
        """All of them were taken."""
        return self._pages is not None and self.done == len(self._pages)

    def take(self, count: int) -> Due:
        """The next pages, at most `count`."""
        assert self._pages is not None, "begin first"
        pages = self._pages[self.done : self.done + count]
        self.done += len(pages)
        return Due(
            pages=pages,
            generations=self._generations[pages],
            crcs=self._crcs[pages],
            block_tokens=self._block_tokens,
            partial=self._partial,
        )
