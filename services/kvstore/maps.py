"""Pages that readers on this node use in place: who has which pinned, and until when.

Owns the pins and their ends: the reader says so, its lease passes, or its process is gone. Pinned
pages are evicted by nobody and written by nobody, so what is read stays what it was. Pure.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Final

from baton.errors import Reason, ServiceError
from services.kvstore.core import Core
from services.kvstore.rows import PageArray

MAPS_MAX: Final = 4096
LEASE_S: Final = 60.0
LEASE_MAX_S: Final = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Map:
    slot: int
    pages: PageArray
    expires_s: float


class Maps:
    """Every mapped log of one store. `slot`: the reading worker's, whose lock tells of its end."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._maps: dict[int, _Map] = {}

    def __len__(self) -> int:
        return len(self._maps)

    def add(self, slot: int, pages: PageArray, expires_s: float) -> int:
        """Pins held pages; the id by which the reader ends it. QUEUE_FULL over `MAPS_MAX`."""
        if len(self._maps) >= MAPS_MAX:
            raise ServiceError(
                Reason.QUEUE_FULL, f"{MAPS_MAX} logs are mapped; unmap some", retry_after_s=0.5
            )
        transfers = self._core.transfers
        self._core.pool.hold_many(pages)
        for page in pages.tolist():
            transfers[page] = transfers.get(page, 0) + 1
        # Not to be guessed: it ends pins that another reader relies on.
        map_id = secrets.randbits(64) | 1
        self._maps[map_id] = _Map(slot=slot, pages=pages, expires_s=expires_s)
        return map_id

    def end(self, map_id: int, slot: int) -> bool:
        """Lets go; False when it was over already, or is another worker's."""
        found = self._maps.get(map_id)
        if found is None or found.slot != slot:
            return False
        self._drop(map_id)
        return True

    def expire(self, now_s: float) -> None:
        """Ends what has lasted too long."""
        for map_id in [key for key, one in self._maps.items() if one.expires_s <= now_s]:
            self._drop(map_id)

    def worker_gone(self, slot: int) -> None:
        """Ends all of a reader whose process is gone."""
        for map_id in [key for key, one in self._maps.items() if one.slot == slot]:
            self._drop(map_id)

    def _drop(self, map_id: int) -> None:
        transfers, pages = self._core.transfers, self._maps.pop(map_id).pages
        for page in pages.tolist():
            transfers[page] -= 1
            if not transfers[page]:
                del transfers[page]
        self._core.pool.drop_many(pages)
        self._core.drain_freed()
