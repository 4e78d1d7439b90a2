"""The decode worker's device memory: the arena is page-locked while it is read, and not beyond."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.arena.device_standin import StandInPages
from baton.kv.layout import KvDtype, KvGeometry
from services.decode import device

GEOMETRY = KvGeometry(
    layers=1, kv_heads=1, head_dim=8, head_dim_v=8, block_tokens=16, dtype=KvDtype.F32
)
ARENA_BYTES = 3 * GEOMETRY.page_bytes


class Following:
    """Orders that never end by themselves; `is_following` is set as soon as somebody follows."""

    def __init__(self, *_: object) -> None:
        self.is_following = asyncio.Event()
        self._never = asyncio.Event()

    async def follow(self) -> None:
        """Until it is cancelled."""
        self.is_following.set()
        await self._never.wait()

    def close(self) -> None:
        """Nothing is held."""


async def test_the_arena_is_locked_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who unmaps the arena stops the reading first; a lock that outlives it would be of memory that
    is gone.
    """
    orders: list[Following] = []

    def made(*parts: object) -> Following:
        orders.append(Following(*parts))
        return orders[-1]

    monkeypatch.setattr(device, "DeviceOrders", made)
    pages, stopping = StandInPages(GEOMETRY, 2), asyncio.Event()
    parts = SimpleNamespace(
        worker_id="decode-0",
        identity=SimpleNamespace(incarnation=1, capability=""),
        arena=SimpleNamespace(slots=memoryview(bytearray(ARENA_BYTES))),
        held=SimpleNamespace(logs=lambda: []),
    )
    keeper = device.DeviceKeeper(cast(Any, parts), pages, cast(Any, None))
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        tasks.create_task(keeper.run(stopping))
        await orders[0].is_following.wait()
        assert pages.locked_bytes == ARENA_BYTES
        stopping.set()
        await keeper.stop_reading()
        assert pages.locked_bytes == 0
