"""Page tables: which page holds which block of a log, in columns.

Owns `PageRow` and `Rows`. Pure. All rows but the last are full and immutable; they stand in typed
arrays, so that a fork copies a few kilobytes at any length and a store of many logs has few
objects. The last row is a live object: it is what appends write into.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, overload

import numpy as np
import numpy.typing as npt

PAGE_TYPECODE = "I"
GENERATION_TYPECODE = "Q"

PageArray: TypeAlias = npt.NDArray[np.uint32]
"""Page numbers, in the order of their blocks."""


@dataclass(slots=True, kw_only=True)
class PageRow:
    """One row of a page table: a page, its page generation, committed slots and their CRCs.

    `crc` is set once the page is full, `slot_crcs` (one per committed slot) while it is partial. A
    row that was cut inside a full page has that page's `crc` and fewer `tokens`.
    """

    page: int
    page_generation: int
    tokens: int
    crc: int | None = None
    slot_crcs: list[int] = field(default_factory=list)


def cut_row(row: PageRow, tokens: int) -> PageRow:
    """A row of the first slots of `row`; a full page's CRC stays what its bytes are checked by."""
    assert 1 <= tokens <= row.tokens
    return PageRow(
        page=row.page,
        page_generation=row.page_generation,
        tokens=tokens,
        crc=row.crc,
        slot_crcs=row.slot_crcs[:tokens],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The rows of full pages before the last row, one array each; a CRC not known yet is 0."""

    pages: PageArray
    generations: npt.NDArray[np.uint64]
    crcs: npt.NDArray[np.uint32]


class Rows(Sequence[PageRow]):
    """A page table. `last` is its last row, or None of an empty table.

    Reading is that of a list of `PageRow`; earlier rows are made anew at each look, so that only
    `last` can be changed in place.
    """

    __slots__ = ("_crcs", "_filling", "_generations", "_pages", "_row_tokens", "last")
    # Compared by content, which changes: not hashable.
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, rows: Iterable[PageRow] = ()) -> None:
        self._pages = array(PAGE_TYPECODE)
        self._generations = array(GENERATION_TYPECODE)
        self._crcs = array(PAGE_TYPECODE)
        self._row_tokens = 0
        # Rows of fresh full pages that are still being filled: their CRCs come with the copy.
        self._filling: dict[int, PageRow] = {}
        self.last: PageRow | None = None
        for row in rows:
            self.append(row)

    @classmethod
    def of_columns(
        cls,
        pages: Iterable[int],
        generations: Iterable[int],
        crcs: Iterable[int],
        block_tokens: int,
        last: PageRow | None,
    ) -> Rows:
        """A table of full pages and a last row; without one the last full page is it."""
        rows = cls()
        rows._pages.extend(pages)
        rows._generations.extend(generations)
        rows._crcs.extend(crcs)
        assert len(rows._pages) == len(rows._generations) == len(rows._crcs)
        rows._row_tokens = block_tokens
        rows.last = rows._pop_full() if last is None and rows._pages else last
        return rows

    def __len__(self) -> int:
        return len(self._pages) + (self.last is not None)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __repr__(self) -> str:
        return f"Rows({list(self)!r})"

    @overload
    def __getitem__(self, index: int) -> PageRow: ...

    @overload
    def __getitem__(self, index: slice) -> list[PageRow]: ...

    def __getitem__(self, index: int | slice) -> PageRow | list[PageRow]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        count = len(self._pages)
        at = index if index >= 0 else index + len(self)
        if at == count and self.last is not None:
            return self.last
        if not 0 <= at < count:
            raise IndexError(index)
        filling = self._filling.get(at) if self._filling else None
        return self._full(at) if filling is None else filling

    def _full(self, at: int) -> PageRow:
        return PageRow(
            page=self._pages[at],
            page_generation=self._generations[at],
            tokens=self._row_tokens,
            crc=self._crcs[at],
        )

    def __iter__(self) -> Iterator[PageRow]:
        for at in range(len(self._pages)):
            yield self[at]
        if self.last is not None:
            yield self.last

    def __setitem__(self, index: int, row: PageRow) -> None:
        at = index if index >= 0 else index + len(self)
        if at == len(self._pages) and self.last is not None:
            self.last = row
            return
        assert row.crc is not None
        assert row.tokens == self._row_tokens
        self._pages[at], self._generations[at] = row.page, row.page_generation
        self._crcs[at] = row.crc
        self._filling.pop(at, None)

    def __delitem__(self, index: slice) -> None:
        """Only `del rows[count:]`."""
        assert index.stop is None
        assert index.step is None
        self._keep(index.start)

    @property
    def row_tokens(self) -> int:
        """Token slots of every row but the last; 0 while there was no second one."""
        return self._row_tokens

    @property
    def tokens(self) -> int:
        """Positions that the table covers."""
        last = self.last
        return 0 if last is None else len(self._pages) * self._row_tokens + last.tokens

    def append(self, row: PageRow, *, is_filling: bool = False) -> None:
        """One more row; the one before it is full. `is_filling`: its CRC comes with its copy."""
        last = self.last
        if last is not None:
            is_known = last.crc is not None or len(self._pages) in self._filling
            assert is_known, "a row follows a partial one"
            assert self._row_tokens in (0, last.tokens), (self._row_tokens, last.tokens)
            self._row_tokens = last.tokens
            self._pages.append(last.page)
            self._generations.append(last.page_generation)
            self._crcs.append(last.crc or 0)
        self.last = row
        if is_filling:
            self._filling[len(self._pages)] = row

    def known(self) -> int:
        """How many rows from the first one on have their CRCs already."""
        for at in sorted(self._filling):
            if self._filling[at].crc is None:
                return at
        last = self.last
        is_open = last is not None and last.crc is None and len(last.slot_crcs) != last.tokens
        return len(self) - is_open

    def clear(self) -> None:
        """No rows."""
        self._keep(0)

    def pages(self) -> PageArray:
        """Page numbers of all rows, in order; the caller's own copy."""
        count = len(self._pages)
        if self.last is None:
            return np.empty(0, dtype=np.uint32)
        pages = np.empty(count + 1, dtype=np.uint32)
        pages[:count] = self._pages
        pages[count] = self.last.page
        return pages

    def columns(self) -> Columns:
        """All rows but the last, in columns; the caller's own copy."""
        crcs = np.array(self._crcs, dtype=np.uint32)
        for at, row in self._filling.items():
            if at < len(crcs):
                crcs[at] = row.crc or 0
        return Columns(
            pages=np.array(self._pages, dtype=np.uint32),
            generations=np.array(self._generations, dtype=np.uint64),
            crcs=crcs,
        )

    def head(self, tokens: int, block_tokens: int) -> Rows:
        """A table of the first `tokens` positions: full pages shared, a cut last row its own."""
        head = Rows()
        if tokens == 0:
            return head
        count = -(-tokens // block_tokens)
        assert count <= len(self), (count, len(self))
        head._pages = self._pages[: count - 1]
        head._generations = self._generations[: count - 1]
        head._crcs = self._crcs[: count - 1]
        head._row_tokens = block_tokens
        if self._filling:
            head._filling = {at: row for at, row in self._filling.items() if at < count}
        row = self[count - 1]
        kept = tokens - (count - 1) * block_tokens
        # A full row is never changed again but by its own copy being filled in.
        head.last = row if kept == row.tokens == block_tokens else cut_row(row, kept)
        return head

    def cut(self, tokens: int, block_tokens: int) -> PageArray:
        """Keeps the first `tokens` positions; the pages of the rows that go, in order."""
        count = -(-tokens // block_tokens)
        gone = self.pages()[count:]
        self._keep(count)
        if self.last is not None:
            kept = tokens - (count - 1) * block_tokens
            if kept < self.last.tokens:
                self.last = cut_row(self.last, kept)
        return gone

    def _keep(self, count: int) -> None:
        if count >= len(self):
            return
        self.last = self[count - 1] if count else None
        full = max(count - 1, 0)
        for column in self._columns():
            del column[full:]
        if self._filling:
            self._filling = {at: row for at, row in self._filling.items() if at < count}

    def _pop_full(self) -> PageRow:
        row = self._full(len(self._pages) - 1)
        for column in self._columns():
            del column[-1]
        return row

    def _columns(self) -> tuple[array[Any], array[Any], array[Any]]:
        return self._pages, self._generations, self._crcs
