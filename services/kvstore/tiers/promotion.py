"""Promotion: KV that a request is about to use comes from NVMe into the host first.

Owns the loads under way and how long a request waits for them. A step before the synchronous
operation of the core (Open, Take, Fork): what has come when `prepare` returns the operation finds
in the host, what has not it does without. Each owner is loaded once, whoever waits; a request that
does not wait any more leaves the load to the next one. Every page is verified before it is any
log's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from enum import StrEnum, unique
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from baton.clock import WaitingClock
from baton.errors import ServiceError
from services.kvstore.rows import PageArray
from services.kvstore.tiers.copies import Failure, Outcome, SlotCopy
from services.kvstore.tiers.honesty import WAIT_MAX_S, Patience, is_worth_loading
from services.kvstore.tiers.owners import LoadOrder, Owner, owner_key
from services.kvstore.tiers.placement import Placement

SLICE_BLOCKS_MAX: Final = 16
SLICES_OF_A_LOAD: Final = 40
"""A request's patience is earned slice by slice: each is half of what a slow disk may cost it."""

BLOCKS_AHEAD: Final = 128
"""Blocks of one load that are under way at once: enough for a disk never to wait."""
LOADS_MAX: Final = 64


@unique
class Abandoned(StrEnum):
    """Why a request did without KV that stands on NVMe."""

    SLOWER = "slower"
    LATE = "late"
    PAGES = "pages"
    FAILED = "failed"
    BUSY = "busy"


class ReadJob(Protocol):
    """Reads under way."""

    async def done(self) -> Sequence[Outcome]:
        """One outcome per copy, once no thread touches its page any more."""


class Reads(Protocol):
    """What reads slots; `disk_queue.DiskQueue` does."""

    def read(self, copies: Sequence[SlotCopy]) -> ReadJob:
        """Begins to read slots into pages."""

    def load_s(self, byte_count: int) -> float | None:
        """Seconds that reading so much takes, behind what is queued; None: not measured yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """The first `tokens` positions of a log or a published prefix."""

    owner: Owner
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the request would compute, and how fast (None: not known); how long it waits at most."""

    prompt_tokens: int
    tokens_per_s: float | None
    wait_max_s: float = WAIT_MAX_S


@dataclass(slots=True, kw_only=True)
class Counters:
    """What became of promotions. `seconds`: called with each request's wait."""

    tokens: int = 0
    abandoned: dict[Abandoned, int] = field(default_factory=dict)
    seconds: Callable[[float], None] = lambda _: None


@dataclass(slots=True, kw_only=True, eq=False)
class _Load:
    """One owner that is being loaded, up to `tokens`; `why` it ended before that."""

    owner: Owner
    tokens: int
    slice_blocks: int
    why: Abandoned | None = None


_Window: TypeAlias = "deque[tuple[LoadOrder, asyncio.Task[Sequence[Outcome]]]]"


class Promoter:
    """The promotions of one store.

    `ready(pages)`: the page work ordered for them is done; `order_work()`: hands page work on;
    `spawn(name, work)`: runs it in the background.
    """

    def __init__(
        self,
        placement: Placement,
        disk: Reads,
        clock: WaitingClock,
        slot_bytes: int,
        *,
        ready: Callable[[PageArray], Awaitable[None]],
        order_work: Callable[[], None],
        spawn: Callable[[str, Coroutine[Any, Any, None]], None],
    ) -> None:
        self._placement = placement
        self._disk = disk
        self._clock = clock
        self._slot_bytes = slot_bytes
        self._ready = ready
        self._order_work = order_work
        self._spawn = spawn
        self._loads: dict[bytes | str, _Load] = {}
        self._progress = asyncio.Event()
        self.counters = Counters()

    @property
    def open_loads(self) -> int:
        """Owners that are being loaded."""
        return len(self._loads)

    async def prepare(self, wants: Sequence[Want], asked: Asked) -> int:
        """Loads what of `wants` is worth it, and waits for it as long as it is; returns how many
        tokens of them came into the host meanwhile. Never raises for what could not be loaded.
        """
        missing = self._missing(wants)
        if missing == 0:
            return 0
        if not self._is_worth_it(wants, missing, asked.tokens_per_s):
            self._abandon(Abandoned.SLOWER)
            return 0
        started_s = self._clock.monotonic_s()
        patience = Patience(
            prompt_tokens=asked.prompt_tokens,
            tokens_per_s=asked.tokens_per_s,
            wait_max_s=asked.wait_max_s,
        )
        mine = [load for want in wants if (load := self._load(want)) is not None]
        before = self._in_host(wants)
        while self._missing(wants) > 0:
            if all(self._loads.get(owner_key(load.owner)) is not load for load in mine):
                self._abandon(next((load.why for load in mine if load.why), Abandoned.BUSY))
                break
            waited_s = self._clock.monotonic_s() - started_s
            left_s = patience.left_s(waited_s, self._in_host(wants) - before)
            if left_s <= 0:
                self._abandon(Abandoned.LATE)
                break
            await self._clock.wait(self._progress, left_s)
        loaded = max(self._in_host(wants) - before, 0)
        self.counters.tokens += loaded
        self.counters.seconds(self._clock.monotonic_s() - started_s)
        return loaded

    def _in_host(self, wants: Sequence[Want]) -> int:
        """Tokens of the wants that are in the host now."""
        return sum(self._placement.loaded_tokens(want.owner, want.tokens) for want in wants)

    def _missing(self, wants: Sequence[Want]) -> int:
        return sum(self._placement.missing_tokens(want.owner, want.tokens) for want in wants)

    def _is_worth_it(self, wants: Sequence[Want], missing: int, rate: float | None) -> bool:
        pages = sum(self._placement.pages_to_read(want.owner, want.tokens) for want in wants)
        load_s = self._disk.load_s(pages * self._slot_bytes) if pages else 0.0
        return load_s is None or is_worth_loading(load_s, missing, rate)

    def _abandon(self, why: Abandoned) -> None:
        self.counters.abandoned[why] = self.counters.abandoned.get(why, 0) + 1

    def _load(self, want: Want) -> _Load | None:
        """The load of the want's owner, begun if there is none; None when too many are under way,
        or nothing of it is missing.
        """
        if not self._placement.missing_tokens(want.owner, want.tokens):
            return None
        key = owner_key(want.owner)
        known = self._loads.get(key)
        if known is not None and known.owner is want.owner:
            known.tokens = max(known.tokens, want.tokens)
            return known
        if len(self._loads) >= LOADS_MAX or known is not None:
            return None
        pages = self._placement.pages_to_read(want.owner, want.tokens)
        slice_blocks = min(max(pages // SLICES_OF_A_LOAD, 1), SLICE_BLOCKS_MAX)
        load = _Load(owner=want.owner, tokens=want.tokens, slice_blocks=slice_blocks)
        self._loads[key] = load
        self._spawn("promotion", self._run(load))
        return load

    def _moved(self) -> None:
        """Whoever waits looks again."""
        self._progress.set()
        self._progress = asyncio.Event()

    async def _run(self, load: _Load) -> None:
        """Loads slice after slice, some of them ahead, until the owner has what is wanted. Where
        the next one is read for somebody else, waits until that has moved.
        """
        window: _Window = deque()
        try:
            async with asyncio.TaskGroup() as group:
                while self._fill(load, window, group):
                    if not window:
                        await self._progress.wait()
                        continue
                    outcomes = await window[0][1]
                    order, _ = window.popleft()
                    self._finish(load, order, outcomes)
        finally:
            # Only where this task was cancelled, at the store's end.
            for order, _ in window:
                self._finish(load, order, (Failure.CANCELLED,) * len(order.copies))
            if self._loads.get(owner_key(load.owner)) is load:
                del self._loads[owner_key(load.owner)]
            self._moved()

    def _fill(self, load: _Load, window: _Window, group: asyncio.TaskGroup) -> bool:
        """Begins slices until enough are under way; False when there is nothing more to do."""
        ahead = sum(len(order.rows) for order, _ in window)
        while not load.why and ahead < BLOCKS_AHEAD:
            last = window[-1][0] if window else None
            first = len(load.owner.rows) if last is None else last.first_block + len(last.rows)
            try:
                order = self._placement.begin_load(
                    load.owner, load.tokens, first, load.slice_blocks
                )
            except ServiceError:
                # No room in the host, or in the tenant's part of it.
                load.why = load.why if window else Abandoned.PAGES
                break
            if order is None:
                break
            self._order_work()
            window.append((order, group.create_task(self._read(order))))
            ahead += len(order.rows)
        is_wanted = not load.why and self._placement.missing_tokens(load.owner, load.tokens) > 0
        return bool(window) or is_wanted

    async def _read(self, order: LoadOrder) -> Sequence[Outcome]:
        if not order.copies:
            return ()
        try:
            await self._ready(np.array([copy.page for copy in order.copies], dtype=np.uint32))
        except ServiceError:
            # Page work has stopped.
            return (Failure.CANCELLED,) * len(order.copies)
        return await self._disk.read(order.copies).done()

    def _finish(self, load: _Load, order: LoadOrder, outcomes: Sequence[Outcome]) -> None:
        now_s = self._clock.monotonic_s()
        good = self._placement.finish_load(order, outcomes, now_s)
        self._order_work()
        if any(outcomes):
            load.why = Abandoned.FAILED
        elif good < len(order.rows):
            load.why = Abandoned.BUSY
        self._moved()
