"""The device tier: the device memory of every attached worker that has some.

Owns who has device memory, from a worker's hello until the worker or its stream is gone, and that
all of it hears of host pages that are free. Pure: time is passed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from baton.errors import Reason, ServiceError
from services.kvstore.core import Core, invalid
from services.kvstore.quota_book import QuotaBook
from services.kvstore.state import PageRow, Writer
from services.kvstore.tiers.device_memory import DeviceMemory

SLOTS_MAX: Final = 1 << 22


class DeviceTier:
    """Device memory by worker; `quotas` is told of each, where quotas are held."""

    def __init__(self, core: Core, quotas: QuotaBook | None = None) -> None:
        self._core = core
        self._quotas = quotas
        self._memories: dict[str, DeviceMemory] = {}
        self._loaded_before = self._cleared_before = 0
        core.freed_listeners.append(self._forget_pages)
        if quotas is not None:
            quotas.on_changed = self.reorder

    def hello(self, writer: Writer, slots: int, slot_bytes: int, page_bytes: int) -> DeviceMemory:
        """A worker's device memory, all of it empty. What an earlier stream of the worker left is
        forgotten: it says by this hello that it is done with that.

        Raises INVALID_REQUEST for sizes that do not do, or quotas that do not fit into it.
        """
        if not 1 <= slots <= SLOTS_MAX:
            raise invalid("hello.slots", f"must be 1 to {SLOTS_MAX}")
        if slot_bytes < page_bytes:
            raise ServiceError(
                Reason.COMPAT_MISMATCH,
                f"hello.slot_bytes: {slot_bytes} do not hold a page of {page_bytes}",
                field="hello.slot_bytes",
            )
        self.gone(writer.worker_id)
        memory = DeviceMemory(self._core, writer, slots)
        if self._quotas is not None:
            self._quotas.add_device(writer.worker_id, memory.pool)
        self._memories[writer.worker_id] = memory
        self._core.device_pools[writer.worker_id] = memory.pool
        return memory

    def gone(self, worker_id: str) -> None:
        """The worker is gone, or begins anew: nothing of it is in device memory any more."""
        memory = self._memories.pop(worker_id, None)
        if memory is not None:
            memory.end()
            del self._core.device_pools[worker_id]
            self._loaded_before += memory.loaded_pages
            self._cleared_before += memory.cleared_pages
        if self._quotas is not None:
            self._quotas.forget_device(worker_id)

    def find(self, worker_id: str) -> DeviceMemory | None:
        """The worker's device memory."""
        return self._memories.get(worker_id)

    @property
    def loaded_pages(self) -> int:
        """Pages that were copied to device memory so far."""
        return self._loaded_before + sum(one.loaded_pages for one in self._memories.values())

    @property
    def cleared_pages(self) -> int:
        """Pages that were given up there so far, while the worker stood."""
        return self._cleared_before + sum(one.cleared_pages for one in self._memories.values())

    def count(self, state: str) -> int:
        """Slots in this state, of all workers."""
        return sum(getattr(one.counts(), state) for one in self._memories.values())

    def turn(self, now_s: float) -> None:
        """Now and then: see `DeviceMemory.turn`."""
        for memory in self._memories.values():
            memory.turn(now_s)

    def reorder(self) -> None:
        """The quotas changed."""
        for memory in self._memories.values():
            memory.reorder()

    def take_damaged(self) -> list[PageRow]:
        """Host pages that did not hash to their records when a worker copied them."""
        damaged: list[PageRow] = []
        for memory in self._memories.values():
            damaged += memory.damaged
            memory.damaged = []
        return damaged

    def _forget_pages(self, pages: Sequence[int]) -> None:
        for memory in self._memories.values():
            memory.forget_pages(pages)

    def check_invariants(self) -> None:
        """See `DeviceMemory.check_invariants`."""
        for memory in self._memories.values():
            memory.check_invariants()
