"""Page work: zeroing and verified copying of arena pages, in order, off the event loop.

Owns the one thread that touches page bytes for the cores, and the order: what is queued first is
done first, so that a copy never reads a page zeroed after it. Never decides anything; a copy whose
source does not hash to its record is reported, not made.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Final

from baton.kv.crc import ByteArray
from baton.kv.layout import copy_slots, page_crc, page_view, slot_crcs
from services.kvstore.arena import Arena
from services.kvstore.progress import Progress
from services.kvstore.state import CheckPages, FillPage, PageRow, PageWork, SlotSource, ZeroPages

BATCH_MAX: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """A copy that was made: the CRCs of the fresh page."""

    work: FillPage
    crc: int | None
    slot_crcs: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Damaged:
    """A page whose bytes are not those of its record: a copy's source, or one to be adopted."""

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
        # Page -> the count of work after which it may be used.
        self._pending: dict[int, int] = {}
        self.damaged_pages = 0
        self._is_ending = False

    def end(self) -> None:
        """Lets `run` return once the queue is empty."""
        self._is_ending = True
        self._wake.set()

    def order(self, work: Iterable[PageWork]) -> None:
        """Queues work; `run` does it."""
        for item in work:
            self._queue.append(item)
            self._progress.ordered += 1
            for page in _pages_of(item):
                self._pending[page] = self._progress.ordered
            self._wake.set()

    @property
    def backlog(self) -> int:
        """Work ordered and not yet done."""
        return self._progress.ordered - self._progress.done

    async def ready(self, pages: Collection[int]) -> None:
        """Returns when the work ordered for these pages is done; at once where there is none."""
        target = max((self._pending.get(page, 0) for page in pages), default=0)
        if target:
            await self._progress.reach(target)

    async def settled(self) -> None:
        """Returns when all that was ordered before is done."""
        await self._progress.reach(self._progress.ordered)

    async def run(self) -> None:
        """Works off the queue until `end`; a failure is passed to all who wait."""
        loop = asyncio.get_running_loop()
        with self._progress.ending("page work has stopped"):
            while self._queue or not self._is_ending:
                await self._wake.wait()
                self._wake.clear()
                while self._queue:
                    count = min(len(self._queue), BATCH_MAX)
                    batch = [self._queue.popleft() for _ in range(count)]
                    self._finish(await loop.run_in_executor(self._executor, self._work, batch))
                    self._forget(batch, self._progress.done + count)
                    self._progress.advance(self._progress.done + count)

    def _forget(self, batch: list[PageWork], done: int) -> None:
        for item in batch:
            for page in _pages_of(item):
                if self._pending.get(page, done + 1) <= done:
                    del self._pending[page]

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
            elif isinstance(item, CheckPages):
                results += _damaged_blocks(self._arena, item)
            else:
                results.append(fill_page(self._arena, item))
        return results


def _pages_of(item: PageWork) -> tuple[int, ...]:
    if isinstance(item, ZeroPages):
        return item.pages
    if isinstance(item, CheckPages):
        return tuple(row.page for _, row in item.blocks)
    return (item.target.page,)


def _damaged_blocks(arena: Arena, work: CheckPages) -> list[Damaged]:
    """The first block whose page is not what its record says, as a copy that was not made."""
    for block_index, row in work.blocks:
        source = SlotSource(row=row, first_slot=0, tokens=row.tokens)
        if not is_intact(arena, source, arena.page(row.page)):
            fill = FillPage(
                log_id=work.log_id,
                generation=work.generation,
                block_index=block_index,
                target=row,
                sources=(source,),
            )
            return [Damaged(work=fill)]
    return []


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


def rows_match(arena: Arena, row: PageRow, first_slot: int, tokens: int, page: ByteArray) -> bool:
    """Whether slots of a partial page hash to the row's slot CRCs."""
    found = slot_crcs(arena.geometry, page, first_slot, tokens)
    return list(found) == row.slot_crcs[first_slot : first_slot + tokens]
