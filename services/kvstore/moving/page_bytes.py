"""The bytes of moving pages: read out of one arena in chunks, written into another, verified.

Owns the layout of a transfer's content: the rows' pages one after the other, a full page (or one
whose row was cut) whole, a partial one as its committed slots, packed. Blocking: runs in the page
thread. Never decides what becomes of a page whose bytes are not those of its record: it says so.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from baton.errors import Reason, ServiceError
from baton.kv.crc import ByteArray, crc32c
from baton.kv.layout import KvGeometry, pack_slots, page_crc, slot_crcs, unpack_slots
from services.kvstore.arena import Arena
from services.kvstore.state import PageRow

CHUNK_BYTES: Final = (1 << 20) - 4096


def content_bytes(geometry: KvGeometry, row: PageRow) -> int:
    """Bytes of one row's content in a transfer."""
    return row.tokens * geometry.token_bytes if row.crc is None else geometry.page_bytes


def content_ends(geometry: KvGeometry, rows: Sequence[PageRow]) -> list[int]:
    """Where each row's content ends in the transfer's bytes."""
    return list(itertools.accumulate(content_bytes(geometry, row) for row in rows))


def read_chunk(
    arena: Arena, rows: Sequence[PageRow], ends: Sequence[int], offset: int
) -> tuple[bytes, int]:
    """Up to `CHUNK_BYTES` of content from `offset` on, and their CRC-32C. The pages are pinned."""
    pieces: list[memoryview] = []
    left = CHUNK_BYTES
    index = bisect_right(ends, offset)
    while left and index < len(rows):
        begin = ends[index - 1] if index else 0
        content = row_content(arena, rows[index]).data
        piece = content[offset - begin : offset - begin + left]
        pieces.append(piece)
        offset += piece.nbytes
        left -= piece.nbytes
        index += offset == ends[index]
    data = b"".join(pieces)
    return data, crc32c(data)


def row_content(arena: Arena, row: PageRow) -> ByteArray:
    """One row's content: the page itself where it is full, else a packed copy."""
    page = arena.page(row.page)
    return page if row.crc is not None else pack_slots(arena.geometry, page, 0, row.tokens)


@dataclass(slots=True, kw_only=True)
class Received:
    """What has become whole so far: block indexes whose bytes verified, and those that did not."""

    verified: list[int] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)
    received_bytes: int = 0
    verify_s: float = 0.0


class PageReceiver:
    """Takes the content of consecutive rows and writes it into this arena's pages.

    `rows` name our pages and what their bytes must hash to; `first_block` is the first one's index.
    Content comes as chunks in order (`write`), or is put where `target` says by somebody else, who
    reports each row (`placed`) and in the end what was sent (`sent`).
    """

    def __init__(self, arena: Arena, first_block: int, rows: Sequence[PageRow]) -> None:
        self._arena = arena
        self._first_block = first_block
        self._rows = rows
        self._ends = content_ends(arena.geometry, rows)
        self._offset = 0
        self._packed: dict[int, ByteArray] = {}
        self._wrong: dict[int, int] = {}
        self.result = Received()

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole content."""
        return self._ends[-1] if self._ends else 0

    @property
    def pages_done(self) -> int:
        """Rows whose content is complete, verified or not."""
        return bisect_right(self._ends, self._offset)

    def write(self, offset: int, data: bytes, crc: int) -> None:
        """The next chunk; CHECKSUM_MISMATCH, and nothing written, for one the wire damaged."""
        began_s = time.perf_counter()
        if offset != self._offset or self._offset + len(data) > self.total_bytes:
            raise ServiceError(
                Reason.CHECKSUM_MISMATCH,
                f"a chunk for offset {offset} came where {self._offset} was due",
                field="chunk.offset_bytes",
            )
        if not data or crc32c(data) != crc:
            raise ServiceError(
                Reason.CHECKSUM_MISMATCH,
                "a chunk of pages was damaged on the way",
                field="chunk.crc32c",
            )
        self.result.verify_s += time.perf_counter() - began_s
        source = np.frombuffer(data, dtype=np.uint8)
        while source.size:
            source = source[self._put(source) :]
        self.result.received_bytes += len(data)

    def target(self, index: int) -> ByteArray:
        """Where the content of row `index` goes: its page, or beside it while it is packed."""
        row = self._rows[index]
        if row.crc is not None:
            return self._arena.page(row.page)
        if index not in self._packed:
            size = content_bytes(self._arena.geometry, row)
            self._packed[index] = np.empty(size, dtype=np.uint8)
        return self._packed[index]

    def placed(self, index: int) -> None:
        """All of row `index` stands at its `target`."""
        target = self.target(index)
        self.result.received_bytes += target.size
        if not self._finish(index):
            self._wrong[index] = crc32c(target)

    def sent(self, crcs: Sequence[int]) -> None:
        """CRC-32C of each row's content as it left. CHECKSUM_MISMATCH, and those rows count as not
        there, when what arrived is something else: the wire damaged it.
        """
        altered = [
            index
            for index, found in self._wrong.items()
            if index >= len(crcs) or crcs[index] != found
        ]
        for index in altered:
            self.result.damaged.remove(self._first_block + index)
        if altered:
            raise ServiceError(
                Reason.CHECKSUM_MISMATCH,
                "pages were damaged on the way",
                field="end.page_crc32c",
            )

    def _put(self, source: ByteArray) -> int:
        """Writes what of `source` belongs to the current row; how much that was."""
        index = bisect_right(self._ends, self._offset)
        begin = self._ends[index - 1] if index else 0
        at = self._offset - begin
        count = min(source.size, self._ends[index] - self._offset)
        self.target(index)[at : at + count] = source[:count]
        self._offset += count
        if self._offset == self._ends[index]:
            self._finish(index)
        return count

    def _finish(self, index: int) -> bool:
        """Whether the row's bytes hash to what it says."""
        row, geometry = self._rows[index], self._arena.geometry
        page = self._arena.page(row.page)
        began_s = time.perf_counter()
        if row.crc is not None:
            is_intact = page_crc(geometry, page) == row.crc
        else:
            unpack_slots(geometry, self.target(index), page, 0, row.tokens)
            is_intact = list(slot_crcs(geometry, page, 0, row.tokens)) == row.slot_crcs
        self.result.verify_s += time.perf_counter() - began_s
        blocks = self.result.verified if is_intact else self.result.damaged
        blocks.append(self._first_block + index)
        return is_intact
