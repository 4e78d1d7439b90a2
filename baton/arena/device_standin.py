"""Device pages in ordinary memory: what tests and machines without a device use.

Owns the memory. Real bytes and the same rules as a device, at the price of host memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from baton.arena.device import SlotPart
from baton.kv.layout import KvGeometry, copy_slots, page_view


class StandInPages:
    """`DevicePages` over one array; see there."""

    def __init__(self, geometry: KvGeometry, slot_count: int) -> None:
        self._geometry = geometry
        self._memory = bytearray(slot_count * geometry.page_bytes)
        self._slots = np.frombuffer(self._memory, dtype=np.uint8).reshape(slot_count, -1)
        self.locked_bytes = 0
        """What a device would have page-locked now."""

    @property
    def geometry(self) -> KvGeometry:
        """The shape of every page."""
        return self._geometry

    @property
    def slot_count(self) -> int:
        """Slots there are."""
        return len(self._slots)

    @contextmanager
    def lock_host(self, memory: memoryview) -> Iterator[None]:
        """See `DevicePages.lock_host`."""
        size = memory.nbytes
        self.locked_bytes += size
        try:
            yield
        finally:
            self.locked_bytes -= size

    def load(self, slot: int, page: memoryview) -> None:
        """See `DevicePages.load`."""
        self._slots[slot] = np.frombuffer(page, dtype=np.uint8, count=self._geometry.page_bytes)

    def clear(self, slot: int) -> None:
        """See `DevicePages.clear`."""
        self._slots[slot] = 0

    def write_through(self, parts: Sequence[SlotPart]) -> None:
        """See `DevicePages.write_through`."""
        for part in parts:
            source = page_view(self._geometry, self._slots[part.slot])
            target = page_view(self._geometry, np.frombuffer(part.page, dtype=np.uint8))
            copy_slots(source, part.first, target, part.first, part.tokens)

    def read(self, slot: int) -> bytes:
        """See `DevicePages.read`."""
        return bytes(self.memory(slot))

    def memory(self, slot: int) -> memoryview:
        """The slot's bytes, writable: where a computation puts KV."""
        size = self._geometry.page_bytes
        return memoryview(self._memory)[slot * size : (slot + 1) * size]

    def close(self) -> None:
        """See `DevicePages.close`."""
        self._slots = np.zeros((0, self._geometry.page_bytes), dtype=np.uint8)
