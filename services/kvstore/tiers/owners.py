"""Owners of KV, wherever it stands, and the steps of their blocks between tiers, as data.

Owns what logs and published prefixes have in common for the tiers, and the two orders. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from services.kvstore.pages import PagePool
from services.kvstore.prefixes import Prefix
from services.kvstore.rows import PageRow, cut_row
from services.kvstore.state import LogState
from services.kvstore.tiers.copies import SlotCopy
from services.kvstore.tiers.slots import Slots

Owner: TypeAlias = LogState | Prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOrder:
    """Blocks of an owner's host rows, from `first_block` on, that are about to have copies.

    `slots[i]` is for `rows[i]`; those at `fresh` are to be written, as `copies` say, the others
    have the content already.
    """

    owner: Owner
    first_block: int
    rows: tuple[PageRow, ...]
    slots: tuple[int, ...]
    fresh: tuple[int, ...]
    copies: tuple[SlotCopy, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOrder:
    """Blocks of an owner's cold rows, from `first_block` on, that are about to be in the host.

    `pages[i]` is for `rows[i]`; those at `fresh` are to be read, as `copies` say, the others are
    host pages with the content, held for this.
    """

    owner: Owner
    first_block: int
    rows: tuple[PageRow, ...]
    pages: tuple[int, ...]
    fresh: tuple[int, ...]
    copies: tuple[SlotCopy, ...]


def tenant_of(owner: Owner) -> str:
    """Whom the owner's pages are charged to."""
    return owner.owner_tenant if isinstance(owner, Prefix) else owner.tenant


def owner_key(owner: Owner) -> bytes | str:
    """A log's id or a prefix's."""
    return owner.prefix_id if isinstance(owner, Prefix) else owner.log_id


def host_tokens(owner: Owner, block_tokens: int) -> int:
    """Positions whose KV is in the host."""
    if isinstance(owner, LogState):
        return owner.committed
    return (len(owner.rows) - 1) * block_tokens + owner.rows[-1].tokens if owner.rows else 0


def is_same_place(row: PageRow, other: PageRow) -> bool:
    """Whether both are of the same use of the same page or slot."""
    return (row.page, row.page_generation) == (other.page, other.page_generation)


def is_same_content(row: PageRow, copy: PageRow, block_tokens: int) -> bool:
    """Whether a copy may be of the block that is in the host, as far as their CRCs tell: one that
    was cut inside a full page has that page's CRC.
    """
    if row.crc is not None and copy.crc is not None:
        return row.crc == copy.crc or copy.tokens < block_tokens
    common = min(len(row.slot_crcs), len(copy.slot_crcs))
    return row.slot_crcs[:common] == copy.slot_crcs[:common]


def known_rows(owner: Owner) -> int:
    """Rows from the first one on whose CRCs are known."""
    return owner.rows.known() if isinstance(owner, LogState) else len(owner.rows)


def copy_of(slots: Slots, row: PageRow) -> int | None:
    """A slot with the whole content of a full page."""
    return None if row.crc is None else slots.copy_of(row.page, row.page_generation)


def frozen(row: PageRow) -> PageRow:
    """The row as it is now, whatever is appended to it."""
    return cut_row(row, row.tokens)


def moved_row(row: PageRow, place: int, pool: PagePool) -> PageRow:
    """The same content at another place: a slot, or a page."""
    return PageRow(
        page=place,
        page_generation=pool.generation(place),
        tokens=row.tokens,
        crc=row.crc,
        slot_crcs=list(row.slot_crcs),
    )
