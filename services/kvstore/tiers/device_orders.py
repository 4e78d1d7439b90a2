"""What the kvstore tells a worker about its device memory, and what it hears back.

Owns shapes only.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, unique
from typing import TypeAlias

from services.kvstore.state import PageRow


@unique
class DeviceOutcome(Enum):
    """What became of an order; after all but DONE the slot is clear."""

    DONE = "done"
    DAMAGED = "damaged"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Copy a page of the host arena into a slot, compared with the checksums of `row`."""

    order_id: int
    slot: int
    row: PageRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """A slot is for a page that is granted to the worker and has no KV yet."""

    order_id: int
    slot: int
    page: int
    page_generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Clear:
    """Zero a slot; it is not that page's any more."""

    order_id: int
    slot: int
    page: int
    page_generation: int


DeviceOrder: TypeAlias = Load | Reserve | Clear


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The answer to a want: all orders for it are done. `missing`: pages there is no room for."""

    log_id: bytes
    generation: int
    pages: int
    missing: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCounts:
    """Slots of one worker by state; their sum is its device memory."""

    free: int
    loading: int
    resident: int
    clearing: int

    @property
    def total(self) -> int:
        """All slots."""
        return self.free + self.loading + self.resident + self.clearing
