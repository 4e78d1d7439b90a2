"""Demotion: what gets copies on NVMe, and the loop that makes them.

Owns the order (`due`, pure) and the background work (`Demoter`). Published prefixes are copied at
once. Logs that nobody writes are copied when less than a low watermark of the host is free, those
used longest ago first, until what is free or could be freed without loss reaches a high one.
Copying frees nothing: `Keeper.make_room` does, and takes what is copied first.

A write that fails turns demotion off for this life of the store, with a reason that is logged and
counted; what is copied already stays readable, and everything else goes on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import structlog

from services.kvstore.core import Core
from services.kvstore.prefixes import Prefix
from services.kvstore.rows import PageArray
from services.kvstore.state import LogState, Phase
from services.kvstore.tiers.copies import Failure, Outcome, SlotCopy
from services.kvstore.tiers.owners import CopyOrder, Owner
from services.kvstore.tiers.placement import Placement

DEMOTION_INTERVAL_S: Final = 0.25
BATCH_BLOCKS: Final = 64
TURN_BLOCKS_MAX: Final = 1024
"""Blocks one turn copies at most, so that a stop does not wait for long."""

WALK_LOGS_MAX: Final = 2048
"""Logs one turn looks at, at most: beyond, the rest waits for the next one."""

RESTS: Final = 4
"""Turns without a look at the logs after one in which none was due."""

OFF: Final = (Failure.IO, Failure.FULL)

_log = structlog.stdlib.get_logger("services.kvstore")


@dataclass(frozen=True, slots=True, kw_only=True)
class Watermarks:
    """Shares of the host's pages: fewer than `low` free, and copies are made until `high` are free
    or could be without loss.
    """

    low: float = 0.15
    high: float = 0.25


class WriteJob(Protocol):
    """Writes under way."""

    async def done(self) -> Sequence[Outcome]:
        """One outcome per copy, once all are on disk or failed."""


class Writes(Protocol):
    """What writes slots; `disk_queue.DiskQueue` does."""

    def write(self, copies: Sequence[SlotCopy]) -> WriteJob:
        """Begins to write pages to slots."""


def prefixes_due(core: Core) -> list[Prefix]:
    """Published prefixes that do not stand on NVMe whole."""
    return [p for p in core.prefixes.all() if p.rows and p.cold.tokens < p.position]


def logs_due(core: Core, marks: Watermarks) -> list[LogState]:
    """The logs to copy now, in order; none while enough is free."""
    pool = core.pool
    reclaimable = pool.free_count
    if reclaimable >= marks.low * pool.page_count:
        return []
    wanted = marks.high * pool.page_count
    holders = pool.holder_counts()
    due: list[LogState] = []
    for seen, log in enumerate(core.logs.in_order()):
        if reclaimable >= wanted or seen >= WALK_LOGS_MAX:
            break
        pages = log.rows.pages()
        holders[pages] -= 1
        reclaimable += int(np.count_nonzero(holders[pages] == 0))
        if not log.is_copied and log.is_sealed and log.phase is not Phase.MOVED:
            due.append(log)
    return due


class Demoter:
    """Makes the copies of one store. `ready(pages)`: the page work ordered for them is done;
    `order_work()`: hands page work on.
    """

    def __init__(
        self,
        placement: Placement,
        core: Core,
        disk: Writes,
        *,
        ready: Callable[[PageArray], Awaitable[None]],
        order_work: Callable[[], None],
        marks: Watermarks,
    ) -> None:
        self._placement = placement
        self._core = core
        self._disk = disk
        self._ready = ready
        self._order_work = order_work
        self.marks = marks
        self.off: Failure | None = None
        self.failed: dict[Failure, int] = {}
        self._damaged: set[str] = set()
        self._left = 0
        self._rests = 0
        self._free = 0

    async def turn(self) -> None:
        """One bounded piece of work; call it every `DEMOTION_INTERVAL_S`."""
        self._left = TURN_BLOCKS_MAX
        for prefix in prefixes_due(self._core):
            # One with a damaged page will not be better: it is withdrawn, or goes, by others.
            if prefix.prefix_id not in self._damaged:
                await self._copy(prefix)
        if self._left <= 0 or self.off is not None:
            return
        if self._is_resting():
            return
        due = logs_due(self._core, self.marks)
        self._rests = 0 if due else RESTS
        self._free = self._core.pool.free_count
        for log in due:
            await self._copy(log)
            if self._left <= 0 or self.off is not None:
                return

    def _is_resting(self) -> bool:
        """Nothing was due a moment ago, and not much was taken since: looking again costs."""
        pool = self._core.pool
        self._rests = max(self._rests - 1, 0)
        return self._rests > 0 and self._free - pool.free_count <= pool.page_count // 100

    async def _copy(self, owner: Owner) -> None:
        """Copies what it has, in batches, until that is done or does not go on."""
        while self._left > 0 and self.off is None:
            order = self._placement.begin_copy(owner, min(BATCH_BLOCKS, self._left))
            if order is None:
                return
            self._left -= len(order.rows)
            if await self._written(order) < len(order.rows):
                return

    async def _written(self, order: CopyOrder) -> int:
        outcomes: Sequence[Outcome] = (Failure.CANCELLED,) * len(order.copies)
        try:
            if order.copies:
                await self._ready(_pages(order))
                outcomes = await self._disk.write(order.copies).done()
        finally:
            good = self._placement.finish_copy(order, outcomes)
            self._order_work()
        if Failure.DAMAGED in outcomes and isinstance(order.owner, Prefix):
            self._damaged.add(order.owner.prefix_id)
        for outcome in outcomes:
            if outcome is not None:
                self._failed(outcome)
        return good

    def _failed(self, failure: Failure) -> None:
        self.failed[failure] = self.failed.get(failure, 0) + 1
        if failure in OFF and self.off is None:
            self.off = failure
            _log.error("nvme_writes_off", reason=failure.value)


def _pages(order: CopyOrder) -> PageArray:
    return np.array([row.page for row in order.rows], dtype=np.uint32)
