"""KV pages in a worker's device memory, as whoever copies them sees it.

Owns the interface and its shapes. A device slot holds a page as the arena does, byte for byte; the
kvstore says which page stands in which slot (`baton.arena.device_orders`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from baton.kv.layout import KvGeometry


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPart:
    """Token slots [first, first + tokens) of device slot `slot`, and the arena page they belong to,
    writable.
    """

    slot: int
    page: memoryview
    first: int
    tokens: int


class DevicePages(Protocol):
    """Page slots in device memory. Each call returns when the bytes are where they should be.

    Calls may come from several threads, but never two at once for one slot. Slots begin zeroed.
    Raises OSError or RuntimeError where the device fails.
    """

    @property
    def geometry(self) -> KvGeometry:
        """The shape of every page."""

    @property
    def slot_count(self) -> int:
        """Slots there are."""

    def lock_host(self, memory: memoryview) -> AbstractContextManager[None]:
        """Page-lock this process's mapping of the arena for the device, as long as it is entered.

        What cannot be locked is copied all the same; leave before the mapping goes.
        """

    def load(self, slot: int, page: memoryview) -> None:
        """Copy an arena page, `page_bytes` of it, into the slot."""

    def clear(self, slot: int) -> None:
        """Zero the slot."""

    def write_through(self, parts: Sequence[SlotPart]) -> None:
        """Copy these token slots to their arena pages; other bytes of the pages are not touched."""

    def read(self, slot: int) -> bytes:
        """The slot's content, `page_bytes` of it."""

    def close(self) -> None:
        """Give the memory back; nothing else is called after it."""
