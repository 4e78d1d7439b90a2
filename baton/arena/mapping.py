"""The mapped arena: page bytes by page number, for as long as the process lives.

Owns the descriptor and the mapping. The descriptor carries this worker's lock: the kernel drops it
when the last descriptor and mapping are gone, and the kvstore reads that as "can no longer write".
Hence neither is closed before the process ends, and the descriptor is not inherited by children.
Never forks, never resizes.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import Final

from baton.errors import Reason, ServiceError
from baton.kv.layout import KvGeometry

POPULATED_BYTES_MAX: Final = 4 << 30
"""Mapping an arena whole takes 0.1 s a GiB, in which nothing else runs: a worker that is to beat
twice a second touches the pages of a larger one as it needs them.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaShape:
    """What Attach says of an arena. Slot i starts at `data_offset + i * slot_bytes`."""

    arena_id: bytes
    page_count: int
    slot_bytes: int
    page_bytes: int
    data_offset: int
    geometry: KvGeometry

    @property
    def file_bytes(self) -> int:
        """Bytes the arena file must have at least."""
        return self.data_offset + self.page_count * self.slot_bytes

    def validate(self) -> None:
        """Check the numbers against each other before anything is mapped."""
        if self.page_count < 1:
            raise _unusable("page_count", f"is {self.page_count}")
        if self.page_bytes != self.geometry.page_bytes:
            raise _unusable("page_bytes", f"is {self.page_bytes}, not that of its geometry")
        if self.slot_bytes < self.page_bytes:
            raise _unusable("slot_bytes", f"{self.slot_bytes} is below page_bytes")
        if self.data_offset % mmap.ALLOCATIONGRANULARITY:
            raise _unusable("data_offset", f"{self.data_offset} is not a multiple of a memory page")


class MappedArena:
    """A writable mapping of an arena's page slots. Takes over `descriptor`, also when it raises: an
    open one would keep the worker's slot locked.
    """

    def __init__(self, descriptor: int, shape: ArenaShape) -> None:
        self.shape = shape
        self.geometry = shape.geometry
        self._descriptor = descriptor
        try:
            self._map = _mapped(descriptor, shape)
        except (ServiceError, OSError, ValueError):
            os.close(descriptor)
            raise
        self._view = memoryview(self._map)

    @property
    def slots(self) -> memoryview:
        """All page slots, one after the other, writable."""
        return self._view

    def page(self, index: int) -> memoryview:
        """The writable content of page slot `index`, without its padding."""
        assert 0 <= index < self.shape.page_count, f"page {index} of {self.shape.page_count}"
        start = index * self.shape.slot_bytes
        return self._view[start : start + self.shape.page_bytes]

    def adopt(self, other: MappedArena) -> None:
        """Become `other`, whose owner gives it up: the arena of a kvstore that came back.

        Nothing may write or refer to the old pages any more; the old descriptor and mapping go.
        """
        old_view, old_map, old_descriptor = self._view, self._map, self._descriptor
        self.shape, self.geometry = other.shape, other.geometry
        self._descriptor, self._map, self._view = other._descriptor, other._map, other._view
        old_view.release()
        old_map.close()
        os.close(old_descriptor)

    def unmap(self) -> None:
        """Give the arena up for good: tests and the end of a process only.

        Views handed out must be gone; engines that keep arrays over `slots` end with the process.
        """
        self._view.release()
        self._map.close()
        os.close(self._descriptor)


def _mapped(descriptor: int, shape: ArenaShape) -> mmap.mmap:
    os.set_inheritable(descriptor, False)
    shape.validate()
    size = os.fstat(descriptor).st_size
    if size < shape.file_bytes:
        raise _unusable("file", f"holds {size} bytes, less than the {shape.file_bytes} it says")
    mapped_bytes = shape.page_count * shape.slot_bytes
    # Mapped whole: the first touch of a page is not to wait for the kernel when it is written.
    populate = mmap.MAP_POPULATE if mapped_bytes <= POPULATED_BYTES_MAX else 0
    return mmap.mmap(descriptor, mapped_bytes, mmap.MAP_SHARED | populate, offset=shape.data_offset)


def _unusable(field: str, what: str) -> ServiceError:
    return ServiceError(
        Reason.COMPAT_MISMATCH, f"the arena cannot be mapped: {field} {what}", field=field
    )
