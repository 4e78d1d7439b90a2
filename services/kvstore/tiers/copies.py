"""What is copied between slots of the NVMe tier and pages of the arena, and why a copy failed.

Owns shapes only. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, unique

from services.kvstore.rows import PageRow


@unique
class Failure(StrEnum):
    """Why a copy was not made. LATE, CANCELLED and FULL: it had not begun."""

    IO = "io"
    DAMAGED = "damaged"
    LATE = "late"
    CANCELLED = "cancelled"
    FULL = "full"


Outcome = Failure | None
"""None: the copy was made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotCopy:
    """One slot and the arena page its content goes to or comes from; None: it is only read.

    `row` says what the bytes must hash to (`crc`, or `slot_crcs` of its first tokens).
    """

    slot: int
    page: int | None
    row: PageRow | None
