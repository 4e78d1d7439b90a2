"""Checksums of what a writer put into its pages: the rows of a commit, the slot of an append.

Owns the choice between page CRC (full) and slot CRCs (partial). Reads the mapped arena, never
writes it. Runs in a worker's packing thread: nothing here may block the event loop.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.arena.copying import checksum, slot_checksums
from baton.arena.mapping import MappedArena
from baton.arena.page_table import PageTable
from baton.arena.replay import PageRow
from baton.kv.crc import slot_list_crc
from baton.kv.digests import ChunkPage


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotChecksum:
    """The checksum of one token slot; `page_crc32c` when the slot was its page's last."""

    slot_crc32c: int
    page_crc32c: int | None


def commit_rows(
    arena: MappedArena, table: PageTable, from_position: int, to_position: int
) -> tuple[PageRow, ...]:
    """The rows that positions [from, to) touch, with the checksums of all their committed slots."""
    assert 0 <= from_position < to_position
    size = table.block_tokens
    rows = []
    for index in range(from_position // size, -(-to_position // size)):
        granted = table.row(index)
        tokens = min(size, to_position - index * size)
        page = arena.page(granted.page)
        is_full = tokens == size
        rows.append(
            PageRow(
                page=granted.page,
                page_generation=granted.page_generation,
                tokens=tokens,
                crc32c=checksum(page) if is_full else None,
                slot_crcs=() if is_full else slot_checksums(arena.geometry, page, 0, tokens),
            )
        )
    return tuple(rows)


def slot_checksum(arena: MappedArena, table: PageTable, position: int) -> SlotChecksum:
    """The checksums an append names for the KV of `position`."""
    granted, slot = table.slot(position)
    page = arena.page(granted.page)
    is_last = slot == table.block_tokens - 1
    return SlotChecksum(
        slot_crc32c=slot_checksums(arena.geometry, page, slot, 1)[0],
        page_crc32c=checksum(page) if is_last else None,
    )


def chunk_pages(
    rows: tuple[PageRow, ...], from_position: int, block_tokens: int
) -> tuple[ChunkPage, ...]:
    """One commit's part of the chunk list that SEAL's digest covers."""
    first = from_position // block_tokens * block_tokens
    return tuple(
        ChunkPage(
            first_position=first + index * block_tokens,
            tokens=row.tokens,
            crc=slot_list_crc(row.slot_crcs) if row.crc32c is None else row.crc32c,
        )
        for index, row in enumerate(rows)
    )
