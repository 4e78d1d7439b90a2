"""Page tables as page entries of records.

Owns the encoding of rows of any length in one go. Pure.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from baton.kv.crc import slot_list_crc
from services.kvstore.log.fields import (
    ENTRY_BYTES,
    PackedEntries,
    PageEntry,
    PageRef,
    encode_entries,
)
from services.kvstore.state import PageRow, Rows

# A page entry of a full page (docs/formats.md, 7.1).
_ENTRY: Final = np.dtype(
    [
        ("arena_id", "V16"),
        ("page_generation", "<u8"),
        ("page", "<u4"),
        ("crc", "<u4"),
        ("tokens", "<u2"),
        ("slot_crcs", "<u2"),
        ("zero", "<u4"),
    ]
)
assert _ENTRY.itemsize == ENTRY_BYTES


def packed_entries(arena_id: bytes, rows: Rows, first: int = 0) -> PackedEntries:
    """The rows from `first` up to the first whose copy has not been made yet."""
    known = rows.known()
    columns = rows.columns()
    end = min(known, len(columns.pages))
    full = np.zeros(max(end - first, 0), dtype=_ENTRY)
    last = rows.last if known == len(rows) and first < len(rows) else None
    if len(full):
        full["arena_id"] = np.void(arena_id)
        full["page_generation"] = columns.generations[first:end]
        full["page"] = columns.pages[first:end]
        full["crc"] = columns.crcs[first:end]
        full["tokens"] = rows[0].tokens
    tail = b"" if last is None else encode_entries((entry_of(arena_id, last),))
    return PackedEntries(len(full) + (last is not None), full.tobytes() + tail)


def entry_of(arena_id: bytes, row: PageRow) -> PageEntry:
    """One row."""
    is_partial = row.crc is None
    slot_crcs = tuple(row.slot_crcs) if is_partial else ()
    crc = slot_list_crc(slot_crcs) if row.crc is None else row.crc
    return PageEntry(
        ref=PageRef(
            arena_id=arena_id,
            page=row.page,
            page_generation=row.page_generation,
            crc=crc,
        ),
        tokens=row.tokens,
        slot_crcs=slot_crcs,
    )
