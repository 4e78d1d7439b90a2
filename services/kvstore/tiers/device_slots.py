"""What is known of one device slot, and of one log that is wanted in device memory.

Owns shapes only; the rules stand in `device_memory`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, unique

from services.kvstore.state import PageRow


@unique
class Use(Enum):
    """What a slot that is not free is doing."""

    LOADING = "loading"
    RESIDENT = "resident"
    CLEARING = "clearing"


@dataclass(slots=True, kw_only=True)
class Slot:
    """A slot in use. `pins`: logs the worker writes that stand in it. `order_id`: under way.
    `is_lost`: the host page is not what it was; the slot is cleared as soon as its order is done.
    """

    page: int
    page_generation: int
    tenant: str
    use: Use
    order_id: int | None
    is_copying: bool = False
    pins: int = 0
    is_lost: bool = False


@dataclass(slots=True, kw_only=True)
class Want:
    """A log that the worker writes at `generation`. `slots` are pinned, `loading` those of them
    that are not filled yet; `missing` have no slot yet, `refused` get none.
    """

    log_id: bytes
    generation: int
    tenant: str
    slots: set[int] = field(default_factory=set)
    loading: set[int] = field(default_factory=set)
    missing: deque[PageRow] = field(default_factory=deque)
    refused: int = 0
