"""Page work: zeroing and verified copying of arena pages, in order, off the event loop.

Owns the one thread that touches page bytes for the cores, and the order: what is queued first is
done first, so that a copy never reads a page zeroed after it. Never decides anything; a copy whose
source does not hash to its record is reported, not made.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Final

from baton.kv.crc import ByteArray
from baton.kv.layout import copy_slots, page_crc, page_view, slot_crcs
from services.kvstore.arena import Arena
from services.kvstore.progress import Progress
from services.kvstore.state import FillPage, PageRow, PageWork, SlotSource, ZeroPages

BATCH_MAX: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """A copy that was made: the CRCs of the fresh page."""

    work: FillPage
    crc: int | None
    slot_crcs: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Damaged:
    """A copy that was not made: its source's bytes are not those of its record."""

    work: FillPage


class PageWorker:
    """Does page work in order. `on_damaged` is called on the loop for each copy not made."""

    def __init__(
        self, arena: Arena, executor: Executor, on_damaged: Callable[[FillPage], None]
    ) -> None:
        self._arena = arena
        self._executor = executor
        self._on_damaged = on_damaged
        self._queue: deque[PageWork] = deque()
        self._progress = Progress()
        self._wake = asyncio.Event()
        self.damaged_pages = 0

    def order(self, work: Iterable[PageWork]) -> None:
        """Queues work; `run` does it."""
        for item in work:
            self._queue.append(item)
            self._progress.ordered += 1
            self._wake.set()

    @property
    def backlog(self) -> int:
        """Work ordered and not yet done."""
        return self._progress.ordered - self._progress.done

    async def settled(self) -> None:
        """Returns when all that was ordered before is done."""
        await self._progress.reach(self._progress.ordered)

    async def run(self) -> None:
        """Works off the queue until cancelled; a failure is passed to all who wait."""
        loop = asyncio.get_running_loop()
        with self._progress.ending("page work has stopped"):
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._queue:
                    count = min(len(self._queue), BATCH_MAX)
                    batch = [self._queue.popleft() for _ in range(count)]
                    self._finish(await loop.run_in_executor(self._executor, self._work, batch))
                    self._progress.advance(self._progress.done + count)

    def _finish(self, results: list[Filled | Damaged]) -> None:
        for result in results:
            if isinstance(result, Filled):
                result.work.target.crc = result.crc
                result.work.target.slot_crcs = result.slot_crcs
            else:
                self.damaged_pages += 1
                self._on_damaged(result.work)

    def _work(self, batch: list[PageWork]) -> list[Filled | Damaged]:
        results: list[Filled | Damaged] = []
        for item in batch:
            if isinstance(item, ZeroPages):
                for page in item.pages:
                    self._arena.zero(page)
            else:
                results.append(fill_page(self._arena, item))
        return results


def fill_page(arena: Arena, work: FillPage) -> Filled | Damaged:
    """Copies verified slots into the fresh page; its CRCs, or the damage."""
    geometry = arena.geometry
    target = arena.page(work.target.page)
    for source in work.sources:
        page = arena.page(source.row.page)
        if not is_intact(arena, source, page):
            return Damaged(work=work)
        copy_slots(
            page_view(geometry, page),
            source.first_slot,
            page_view(geometry, target),
            source.first_slot,
            source.tokens,
        )
    tokens = sum(source.tokens for source in work.sources)
    if tokens == geometry.block_tokens:
        return Filled(work=work, crc=page_crc(geometry, target))
    return Filled(work=work, crc=None, slot_crcs=list(slot_crcs(geometry, target, 0, tokens)))


def is_intact(arena: Arena, source: SlotSource, page: ByteArray) -> bool:
    """Whether the source's slots hash to what its row says."""
    row = source.row
    if row.crc is not None:
        return page_crc(arena.geometry, page) == row.crc
    return rows_match(arena, row, source.first_slot, source.tokens, page)


def rows_match(
    arena: Arena, row: PageRow, first_slot: int, tokens: int, page: ByteArray
) -> bool:
    """Whether slots of a partial page hash to the row's slot CRCs."""
    found = slot_crcs(arena.geometry, page, first_slot, tokens)
    return list(found) == row.slot_crcs[first_slot : first_slot + tokens]
