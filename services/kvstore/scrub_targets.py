"""The tiers that scrub looks at: which tables refer to them, how a page is checked and given up.

Owns what differs between the arena and the NVMe file. Nothing is held while a page is checked: what
was freed under the check shows by its page generation, which is never used twice, and is left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Protocol

from baton.arena.copying import checksum
from services.kvstore.arena import Arena
from services.kvstore.distrust import Distrust
from services.kvstore.keeper import leave_host
from services.kvstore.prefixes import Prefix
from services.kvstore.quotas import Tier
from services.kvstore.runtime import Runtime
from services.kvstore.scrub import SCRUB_FENCE, Due
from services.kvstore.state import LogState, Rows
from services.kvstore.tiers.copies import Failure, SlotCopy
from services.kvstore.tiers.nvme_tier import NvmeTier


class ScrubTarget(Protocol):
    """One tier."""

    tier: Tier
    page_count: int
    has_partial: bool
    """Whether pages that are not full are immutable too."""

    def rows_of(self, owner: LogState | Prefix) -> Rows:
        """What the owner has there."""

    def is_standing(self, due: Due, at: int) -> bool:
        """Whether the page is still in the use that is to be checked."""

    async def check(self, due: Due) -> list[int]:
        """Which of the pages, by their index, are not what they must be."""

    def give_up(self, pages: Sequence[int], wall_s: float) -> int:
        """These pages are out of use for good, and nobody goes on from them; returns how many logs
        and prefixes had them.
        """


class ArenaTarget:
    """The host's arena; its pages are hashed by a thread of scrub's own."""

    tier = Tier.HOST
    has_partial = False

    def __init__(self, runtime: Runtime, executor: Executor) -> None:
        self._runtime = runtime
        self._core = runtime.core
        self._executor = executor
        self._distrust = Distrust(runtime.store)
        self.page_count = runtime.core.pool.page_count
        self.quarantined = 0

    def rows_of(self, owner: LogState | Prefix) -> Rows:
        """Its page table."""
        return owner.rows if isinstance(owner, LogState) else Rows(owner.rows)

    def is_standing(self, due: Due, at: int) -> bool:
        """Held, in that use, and no fenced writer's."""
        pool, page = self._core.pool, int(due.pages[at])
        return pool.is_held(page, int(due.generations[at])) and pool.fence_of(page) is None

    async def check(self, due: Due) -> list[int]:
        """By their CRCs."""
        loop, arena = asyncio.get_running_loop(), self._runtime.arena
        return await loop.run_in_executor(self._executor, damaged_pages, arena, due)

    def give_up(self, pages: Sequence[int], wall_s: float) -> int:
        """Quarantined; who has them keeps what stands before. A published prefix that is on NVMe in
        whole is loaded from there, another one is withdrawn.
        """
        for page in pages:
            self._core.pool.fence(page, SCRUB_FENCE)
            self._core.pool.disown(page)
        self.quarantined += len(pages)
        damaged = set(pages)
        moved = 0
        for prefix in self._core.prefixes.all():
            has_copies = prefix.cold.tokens >= prefix.position
            if has_copies and any(row.page in damaged for row in prefix.rows):
                leave_host(self._core, prefix)
                moved += 1
        given_up = self._distrust.pages(pages, wall_s)
        return given_up.logs + given_up.prefixes + moved


class SlotTarget:
    """The NVMe file; its slots are read by the disk's threads when they have nothing else to do."""

    tier = Tier.NVME
    has_partial = True

    def __init__(self, runtime: Runtime, nvme: NvmeTier) -> None:
        self._placement = runtime.store.placement
        self._nvme = nvme
        self.page_count = nvme.file.slot_count

    def rows_of(self, owner: LogState | Prefix) -> Rows:
        """Its table of copies."""
        return owner.cold

    def is_standing(self, due: Due, at: int) -> bool:
        """Held, in that use, and not failed before."""
        return self._nvme.slots.is_current(int(due.pages[at]), int(due.generations[at]))

    async def check(self, due: Due) -> list[int]:
        """By their CRCs; a slot that cannot be read is damaged too."""
        copies = [
            SlotCopy(slot=int(due.pages[at]), page=None, row=due.row(at)) for at in range(len(due))
        ]
        outcomes = await self._nvme.queue.check(copies).done()
        bad = {Failure.DAMAGED, Failure.IO}
        return [at for at, outcome in enumerate(outcomes) if outcome in bad]

    def give_up(self, pages: Sequence[int], wall_s: float) -> int:
        """Not used again; who has them keeps the copies before, and what is in the arena."""
        return sum(len(self._placement.slot_damaged(slot)) for slot in pages)


def damaged_pages(arena: Arena, due: Due) -> list[int]:
    """Which of the pages, by their index, do not hash to what they must.

    Blocking; other threads run meanwhile.
    """
    return [
        at
        for at, (page, crc) in enumerate(zip(due.pages, due.crcs, strict=True))
        if checksum(arena.page(int(page))) != int(crc)
    ]
