"""Pages with bytes of a life before: nobody is given one that was not zeroed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from baton.kv.layout import KvDtype, KvGeometry
from services.kvstore import page_worker
from services.kvstore.arena import Arena, ArenaSpec
from services.kvstore.page_worker import PageWorker
from services.kvstore.state import FillPage, PageRow

GEOMETRY = KvGeometry(
    layers=2, kv_heads=2, head_dim=4, head_dim_v=4, block_tokens=8, dtype=KvDtype.F32
)
PAGES = 64


@asynccontextmanager
async def worked(directory: Path) -> AsyncIterator[tuple[Arena, PageWorker]]:
    """An arena full of old bytes, and its page worker."""
    spec = ArenaSpec(
        directory=directory,
        node_id="n0",
        arena_bytes=PAGES * GEOMETRY.slot_bytes,
        geometry=GEOMETRY,
        kv_digest=bytes(16),
        arena_id=bytes(16),
    )
    arena = Arena.open(spec)
    for page in range(PAGES):
        arena.page(page)[:] = 7
    with ThreadPoolExecutor(1) as thread:
        worker = PageWorker(arena, thread, lambda work: None)
        async with asyncio.TaskGroup() as group:
            group.create_task(worker.run())
            yield arena, worker
            worker.end()
    arena.remove()


async def test_idle_worker_zeroes_every_free_page_little_by_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for it, and it ends; pages that are not free keep their bytes."""
    monkeypatch.setattr(page_worker, "CLEAN_BYTES_MAX", 3 * GEOMETRY.slot_bytes)
    async with worked(tmp_path) as (arena, worker):
        worker.soil(range(PAGES), lambda page: page != 5)
        async with asyncio.timeout(10.0):
            while worker.dirty > 1:
                await worker.settled()
                await asyncio.to_thread(int)
        await worker.settled()
        for page in range(PAGES):
            assert np.all(arena.page(page) == (7 if page == 5 else 0)), page


async def test_a_page_is_zero_when_its_writer_is_told_of_it(tmp_path: Path) -> None:
    """`ready` is what every grant waits for."""
    async with worked(tmp_path) as (arena, worker):
        worker.soil(range(PAGES), lambda _page: False)
        assert worker.dirty == PAGES
        await worker.ready([3, 60])
        assert not arena.page(3).any()
        assert not arena.page(60).any()
        assert arena.page(4).all()
        assert worker.dirty == PAGES - 2
        arena.page(3)[:] = 9
        await worker.ready([3])
        assert (arena.page(3) == 9).all(), "zeroed once, not under its writer"


async def test_a_copy_lands_in_a_zeroed_page(tmp_path: Path) -> None:
    """The slots behind the copied ones are zero, not somebody's."""
    async with worked(tmp_path) as (arena, worker):
        worker.soil(range(PAGES), lambda _page: False)
        target = PageRow(page=9, page_generation=1, tokens=0)
        worker.order(
            [FillPage(log_id=bytes(16), generation=1, block_index=0, target=target, sources=())]
        )
        await worker.ready([9])
        assert not arena.page(9).any()
