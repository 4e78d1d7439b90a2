"""Page work: zeroing and verified copying of arena pages, in order, off the event loop.

Owns the one thread that touches page bytes for the cores, and the order: what is queued first is
done first, so that a copy never reads a page zeroed after it. Pages with bytes of a life before
this one are zeroed behind everything else, unless somebody is to get one. Never decides anything; a
copy whose source does not hash to its record is reported, not made.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from baton.arena.copying import checksum, slot_checksums
from baton.kv.crc import ByteArray
from baton.kv.layout import copy_slots, page_view
from services.kvstore.arena import Arena
from services.kvstore.progress import Progress
from services.kvstore.state import CheckPages, FillPage, PageRow, PageWork, SlotSource, ZeroPages

PageNumbers: TypeAlias = Collection[int] | npt.NDArray[np.uint32]

BATCH_MAX: Final = 64
CLEAN_BYTES_MAX: Final = 8 << 20
"""Zeroed in one go while nobody waits: what comes meanwhile waits a few milliseconds at most."""


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
    """Does page work in order. `on_damaged` is called on the loop for each copy not made,
    `on_filled` for each that was.
    """

    def __init__(
        self,
        arena: Arena,
        executor: Executor,
        on_damaged: Callable[[FillPage], None],
        on_filled: Callable[[FillPage], None] = lambda _work: None,
    ) -> None:
        self._arena = arena
        self._executor = executor
        self._on_damaged = on_damaged
        self._on_filled = on_filled
        self._queue: deque[PageWork] = deque()
        self._progress = Progress()
        self._wake = asyncio.Event()
        # By page: the count of work after which it may be used.
        self._pending = np.zeros(arena.page_count, dtype=np.int64)
        # Free pages with bytes of a life before: zeroed when nothing else is to be done, and at the
        # latest before somebody is told that one of them is his.
        self._dirty: set[int] = set()
        self._to_clean: deque[int] = deque()
        self._is_free: Callable[[int], bool] = lambda _page: False
        self.damaged_pages = 0
        self._is_ending = False

    def end(self) -> None:
        """Lets `run` return once the queue is empty."""
        self._is_ending = True
        self._wake.set()

    def soil(self, pages: Iterable[int], is_free: Callable[[int], bool]) -> None:
        """These free pages hold unknown bytes: none is used before it was zeroed (O7)."""
        self._to_clean.extend(pages)
        self._dirty.update(self._to_clean)
        self._is_free = is_free
        self._wake.set()

    @property
    def dirty(self) -> int:
        """Pages still to be zeroed because of a restart."""
        return len(self._dirty)

    def order(self, work: Iterable[PageWork]) -> None:
        """Queues work; `run` does it."""
        for item in work:
            if self._dirty and isinstance(item, FillPage):
                self._clean((item.target.page,))
            self._queue.append(item)
            self._progress.ordered += 1
            self._pending[_numbers(_pages_of(item))] = self._progress.ordered
            self._wake.set()

    @property
    def backlog(self) -> int:
        """Work ordered and not yet done."""
        return self._progress.ordered - self._progress.done

    def is_ready(self, pages: PageNumbers) -> bool:
        """Whether no work is left that was ordered for these pages."""
        return self._target(pages) <= self._progress.done

    def _target(self, pages: PageNumbers) -> int:
        return int(self._pending[_numbers(pages)].max()) if len(pages) else 0

    async def ready(self, pages: PageNumbers) -> None:
        """Returns when the work ordered for these pages is done; at once where there is none."""
        if self._dirty:
            self._clean(pages)
        await self._progress.reach(self._target(pages))

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
                while self._queue or self._clean_some():
                    count = min(len(self._queue), BATCH_MAX)
                    batch = [self._queue.popleft() for _ in range(count)]
                    self._finish(await loop.run_in_executor(self._executor, self._work, batch))
                    self._progress.advance(self._progress.done + count)

    def _clean(self, pages: Iterable[int]) -> None:
        """Orders the zeroing of those of `pages` that are dirty."""
        found = tuple(int(page) for page in pages if page in self._dirty)
        if found:
            self._dirty.difference_update(found)
            self.order((ZeroPages(pages=found),))

    def _clean_some(self) -> bool:
        """Orders a little of the zeroing that nobody waits for; False when there is none."""
        if not self._to_clean or self._is_ending:
            return False
        count = max(1, CLEAN_BYTES_MAX // self._arena.slot_bytes)
        batch: list[int] = []
        while self._to_clean and len(batch) < count:
            page = self._to_clean.popleft()
            # One that was granted meanwhile is zeroed when its writer waits for it, not under it.
            if page in self._dirty and self._is_free(page):
                batch.append(page)
        self._clean(batch)
        return bool(batch)

    def _finish(self, results: list[Filled | Damaged]) -> None:
        for result in results:
            if isinstance(result, Filled):
                result.work.target.crc = result.crc
                result.work.target.slot_crcs = result.slot_crcs
                self._on_filled(result.work)
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


def _pages_of(item: PageWork) -> PageNumbers:
    if isinstance(item, ZeroPages):
        return item.pages
    if isinstance(item, CheckPages):
        return item.pages()
    return (item.target.page,)


def _numbers(pages: PageNumbers) -> npt.NDArray[np.int64]:
    if isinstance(pages, np.ndarray | array):
        return np.asarray(pages, dtype=np.int64)
    return np.fromiter(pages, dtype=np.int64, count=len(pages))


def _damaged_blocks(arena: Arena, work: CheckPages) -> list[Damaged]:
    """The first block whose page is not what its record says, as a copy that was not made.

    In one native call: a take waits for it, and this thread would wait for the loop at each page.
    """
    blocks = list(work.blocks())
    crcs = arena.checksums([row.page for _, row in blocks])
    for (block_index, row), crc in zip(blocks, crcs, strict=True):
        source = SlotSource(row=row, first_slot=0, tokens=row.tokens)
        is_partial = row.crc is None and is_intact(arena, source, arena.page(row.page))
        if crc != row.crc and not is_partial:
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
        return Filled(work=work, crc=checksum(target))
    return Filled(work=work, crc=None, slot_crcs=list(slot_checksums(geometry, target, 0, tokens)))


def is_intact(arena: Arena, source: SlotSource, page: ByteArray) -> bool:
    """Whether the source's slots hash to what its row says."""
    row = source.row
    if row.crc is not None:
        return checksum(page) == row.crc
    return rows_match(arena, row, source.first_slot, source.tokens, page)


def rows_match(arena: Arena, row: PageRow, first_slot: int, tokens: int, page: ByteArray) -> bool:
    """Whether slots of a partial page hash to the row's slot CRCs."""
    found = slot_checksums(arena.geometry, page, first_slot, tokens)
    return list(found) == row.slot_crcs[first_slot : first_slot + tokens]
