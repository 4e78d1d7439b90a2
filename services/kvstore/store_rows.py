"""Cutting page table rows.

Owns what is left of a row when a history is cut inside it. Pure.
"""

from __future__ import annotations

from services.kvstore.state import PageRow


def cut_row(row: PageRow, tokens: int) -> None:
    """Keeps the first slots of a row; a full page's CRC stays what its bytes are checked by."""
    assert 1 <= tokens <= row.tokens
    row.tokens = tokens
    if row.crc is None:
        del row.slot_crcs[tokens:]
