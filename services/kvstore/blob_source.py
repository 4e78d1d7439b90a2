"""The payload of a blob that goes out, read from its pages while it goes.

Owns the order of its bytes and their verification: a page is compared with its record when the
first of its bytes is read, and nothing of one that differs leaves. The payload's CRC follows from
the records, so the descriptor is known before a byte is read. Blocking: runs in the page thread.
Never holds pages: who reads has pinned them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from baton.arena.copying import checksum
from baton.kv.blob import BlobHeader, payload_bytes_for
from baton.kv.crc import ByteArray, combine_crc32c
from baton.kv.digests import ids_bytes
from baton.kv.layout import PageSpan, pack_slots
from services.kvstore.arena import Arena
from services.kvstore.page_worker import rows_match
from services.kvstore.state import PageRow


class DamagedBlock(Exception):
    """A page's bytes are not those of its record."""

    def __init__(self, block_index: int) -> None:
        super().__init__(f"block {block_index}")
        self.block_index = block_index


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One page span: `packed` None where it is its page whole, whose record is its CRC."""

    block_index: int
    page: int
    crc: int
    size_bytes: int
    packed: ByteArray | None


class PayloadSource:
    """The payload of `header`'s range; `rows` is the page table from block 0 on.

    Making one packs and verifies partial pages (two at most) and reads no other; DamagedBlock.
    """

    def __init__(
        self, arena: Arena, header: BlobHeader, rows: Sequence[PageRow], token_ids: Sequence[int]
    ) -> None:
        self._arena = arena
        self._parts = [self._part(rows[span.block_index], span) for span in header.spans()]
        self._ids = ids_bytes(token_ids)
        self._ends = list(accumulate(part.size_bytes for part in self._parts))
        self._verified = -1
        crc = 0
        for part in self._parts:
            crc = combine_crc32c(crc, part.crc, part.size_bytes)
        crc = combine_crc32c(crc, checksum(self._ids), len(self._ids))
        size = payload_bytes_for(arena.geometry, header.total_tokens)
        self.header = replace(header, payload_bytes=size, payload_crc=crc)
        self.page_crcs = tuple(part.crc for part in self._parts)

    def _part(self, row: PageRow, span: PageSpan) -> _Part:
        geometry = self._arena.geometry
        size = span.tokens * geometry.token_bytes
        if span.tokens == geometry.block_tokens and row.crc is not None:
            return _Part(
                block_index=span.block_index,
                page=row.page,
                crc=row.crc,
                size_bytes=size,
                packed=None,
            )
        page = self._arena.page(row.page)
        if row.crc is not None:
            is_intact = checksum(page) == row.crc
        else:
            is_intact = rows_match(self._arena, row, 0, row.tokens, page)
        if not is_intact:
            raise DamagedBlock(span.block_index)
        packed = pack_slots(geometry, page, span.first_slot, span.tokens)
        return _Part(
            block_index=span.block_index,
            page=row.page,
            crc=checksum(packed),
            size_bytes=size,
            packed=packed,
        )

    def verify(self) -> None:
        """Compares every page with its record; DamagedBlock."""
        for index in range(len(self._parts)):
            self._content(index)

    def read(self, offset: int, size: int) -> list[memoryview]:
        """The payload's bytes [offset, offset + size), as pieces of pages; DamagedBlock."""
        return list(self._pieces(offset, min(offset + size, self.header.payload_bytes)))

    def _pieces(self, offset: int, end: int) -> Iterator[memoryview]:
        kv_bytes = self._ends[-1]
        while offset < min(end, kv_bytes):
            index = bisect_right(self._ends, offset)
            part_end = self._ends[index]
            begin = part_end - self._parts[index].size_bytes
            piece = self._content(index)[offset - begin : min(end, part_end) - begin]
            yield piece.data
            offset += piece.size
        if offset < end:
            yield memoryview(self._ids)[offset - kv_bytes : end - kv_bytes]

    def _content(self, index: int) -> ByteArray:
        """A part's bytes, compared with their record unless they were just before."""
        part = self._parts[index]
        if part.packed is not None:
            return part.packed
        content = self._arena.page(part.page)
        if index != self._verified:
            if checksum(content) != part.crc:
                raise DamagedBlock(part.block_index)
            self._verified = index
        return content
