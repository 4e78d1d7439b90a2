"""A log's page table as its records tell it: which page holds which positions, and its CRCs.

Owns the fold of KV references. Pure. A row is None where the records do not say enough to find and
check its page: a copy whose record is missing, a page of another arena, a gap. Such a row may come
back (its page is stated again, or fills up); at the end the table is cut before the first None.

Invariant: nothing here ever makes a token: KV that is doubted is dropped, and computed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.kvstore.log.fields import Extent, PageEntry
from services.kvstore.state import PageRow


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRun:
    """KV slots that consecutive APPENDs of one log name, as arrays of one length.

    `is_ours`: the page is of the arena that is asked for. `page_crc` counts where `fills`.
    """

    page: npt.NDArray[np.uint32]
    page_generation: npt.NDArray[np.uint64]
    slot: npt.NDArray[np.uint16]
    slot_crc: npt.NDArray[np.uint32]
    page_crc: npt.NDArray[np.uint32]
    fills: npt.NDArray[np.bool_]
    is_ours: npt.NDArray[np.bool_]


class KvRows:
    """Rows of one log. `committed` is what the store said; `rows` what can be found of it.

    `arena_id` None: KV is not asked for, and no row is kept.
    """

    __slots__ = ("arena_id", "block_tokens", "committed", "rows")

    def __init__(self, block_tokens: int, arena_id: bytes | None) -> None:
        self.block_tokens = block_tokens
        self.arena_id = arena_id
        self.committed = 0
        self.rows: list[PageRow | None] = []

    def found(self) -> list[PageRow]:
        """The rows before the first that cannot be found."""
        rows: list[PageRow] = []
        for row in self.rows:
            if row is None:
                break
            rows.append(row)
            if row.tokens < self.block_tokens:
                break
        return rows

    # --- from records -----------------------------------------------------------------------

    def state(self, entries: Sequence[PageEntry]) -> None:
        """The whole table, as a SNAPSHOT has it."""
        self.committed = sum(entry.tokens for entry in entries)
        self.rows = [self._row_of(entry) for entry in entries] if self.arena_id else []

    def checkpoint(self, first: int, end: int, entries: Sequence[PageEntry]) -> bool:
        """Positions [first, end) stand in the entries; True when that is more than before."""
        block = first // self.block_tokens
        if end <= self.committed:
            self._restate(block, entries)
            return False
        if first < self.committed:
            self.cut(first)
        self.committed = end
        if self.arena_id:
            self._pad(block)
            self.rows[block:] = [self._row_of(entry) for entry in entries]
            self._pad(-(-end // self.block_tokens))
        return True

    def _restate(self, block: int, entries: Sequence[PageEntry]) -> None:
        for index, entry in enumerate(entries, start=block):
            expected = min(self.block_tokens, self.committed - index * self.block_tokens)
            if index < len(self.rows) and entry.tokens == expected:
                self.rows[index] = self._row_of(entry)

    def place(self, first: int, end: int, entries: Sequence[PageEntry]) -> None:
        """Positions [first, end) stand in the entries, and the table ends there."""
        self.cut(first)
        if end > first:
            self.committed = end
            if self.arena_id:
                block = first // self.block_tokens
                self._pad(block)
                self.rows[block:] = [self._row_of(entry) for entry in entries]
                self._pad(-(-end // self.block_tokens))

    def replace_tail(self, tail: PageEntry | None) -> None:
        """The committed slots of a partial last page stand in a fresh page now."""
        tokens = self.committed % self.block_tokens
        index = self.committed // self.block_tokens
        if tokens == 0 or index >= len(self.rows):
            return
        is_stated = tail is not None and tail.tokens == tokens
        self.rows[index] = self._row_of(tail) if tail is not None and is_stated else None

    def release(self, extents: Iterable[Extent]) -> bool:
        """The table ends before the first row whose page is named; True when one was."""
        uses = {
            (page, extent.page_generation)
            for extent in extents
            if extent.arena_id == self.arena_id
            for page in range(extent.first_page, extent.first_page + extent.page_count)
        }
        for index, row in enumerate(self.rows):
            if row is not None and (row.page, row.page_generation) in uses:
                self.cut(index * self.block_tokens)
                return True
        return False

    def cut(self, committed: int) -> None:
        """Keeps the first `committed` positions; a full page's CRC stays what its bytes have."""
        if committed >= self.committed:
            return
        self.committed = committed
        count = -(-committed // self.block_tokens)
        del self.rows[count:]
        if self.rows and len(self.rows) == count:
            self.rows[-1] = cut_copy(self.rows[-1], committed - (count - 1) * self.block_tokens)

    def head(self, committed: int) -> KvRows:
        """A table of its own with the first `committed` positions; full rows are shared."""
        other = KvRows(self.block_tokens, self.arena_id)
        other.committed = self.committed
        other.rows = self.rows[: -(-committed // self.block_tokens)]
        if committed < self.committed:
            other.cut(committed)
        elif other.rows:
            other.rows[-1] = cut_copy(other.rows[-1], self.block_tokens)
        return other

    # --- from APPENDs -----------------------------------------------------------------------

    def append(self, first: int, run: SlotRun) -> None:
        """Positions first.. stand in the slots of the run."""
        count, size = len(run.page), self.block_tokens
        if first < self.committed:
            self.cut(first)
        end = first + count
        if self.arena_id:
            self._pad(-(-first // size))
            self._extend(first, run)
            self._pad(-(-end // size))
        self.committed = end

    def _extend(self, first: int, run: SlotRun) -> None:
        size = self.block_tokens
        slots = (first + np.arange(len(run.page), dtype=np.int64)) % size
        is_good = run.is_ours & (run.slot == slots)
        is_new = slots == 0
        is_new[0] = True
        is_same = np.ones(len(slots), dtype=bool)
        is_same[1:] = (run.page[1:] == run.page[:-1]) & (
            run.page_generation[1:] == run.page_generation[:-1]
        )
        is_good &= is_same | is_new
        starts = np.flatnonzero(is_new)
        ends = np.append(starts[1:], len(slots))
        good = np.logical_and.reduceat(is_good, starts).tolist()
        pages = run.page[starts].tolist()
        generations = run.page_generation[starts].tolist()
        fills = run.fills[ends - 1].tolist()
        crcs = run.page_crc[ends - 1].tolist()
        block = first // size
        for index, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            row: PageRow | None = None
            if good[index]:
                row = PageRow(page=pages[index], page_generation=generations[index], tokens=0)
                before = int(slots[start])
                known = self.rows[block + index] if block + index < len(self.rows) else None
                if fills[index] and before + end - start == size:
                    row = _filled(row, known, before, size, crcs[index])
                else:
                    row = _grown(row, known, before, run.slot_crc[start:end].tolist())
            self.rows[block + index :] = [row]

    def _pad(self, count: int) -> None:
        """Rows up to `count` exist, unknown where nothing told of them."""
        self.rows += [None] * (count - len(self.rows))

    def _row_of(self, entry: PageEntry) -> PageRow | None:
        ref = entry.ref
        is_whole = entry.tokens < self.block_tokens or entry.is_full
        if ref.arena_id != self.arena_id or not is_whole or entry.tokens > self.block_tokens:
            return None
        return PageRow(
            page=ref.page,
            page_generation=ref.page_generation,
            tokens=entry.tokens,
            crc=ref.crc if entry.is_full else None,
            slot_crcs=list(entry.slot_crcs),
        )


def _filled(
    row: PageRow, known: PageRow | None, before: int, size: int, page_crc: int
) -> PageRow | None:
    """The last slot came with the page's CRC, which checks all of it."""
    if before and known is not None and not _is_same_page(row, known):
        return None
    row.tokens, row.crc = size, page_crc
    return row


def _grown(
    row: PageRow, known: PageRow | None, before: int, slot_crcs: list[int]
) -> PageRow | None:
    """More slots of a page that is not full."""
    if before:
        is_known = (
            known is not None and _is_same_page(row, known) and len(known.slot_crcs) == before
        )
        if known is None or not is_known:
            return None
        slot_crcs = known.slot_crcs + slot_crcs
    row.tokens, row.slot_crcs = len(slot_crcs), slot_crcs
    return row


def _is_same_page(row: PageRow, other: PageRow) -> bool:
    return (row.page, row.page_generation) == (other.page, other.page_generation)


def cut_copy(row: PageRow | None, tokens: int) -> PageRow | None:
    """A row of its own with at most `tokens` slots; a full one that stays full is shared."""
    if row is None or (row.crc is not None and row.tokens <= tokens):
        return row
    kept = min(row.tokens, tokens)
    return PageRow(
        page=row.page,
        page_generation=row.page_generation,
        tokens=kept,
        crc=row.crc,
        slot_crcs=row.slot_crcs[:kept],
    )
