"""One worker's device memory: which host page stands in which slot, and what is ordered.

Owns a `PagePool` of the slots and everything that is known of them. Pure: time is passed in, orders
are collected for whoever sends them; only the worker touches the bytes.

Invariants: a slot is free, loading, resident or being cleared, always; it has at most one order
under way, and is free only after the worker said that it is clear. What stands in a slot that is
loading or resident is a page of the host arena in this use of it (page and page generation): the
device is a copy, and losing it loses nothing. A page that is loading is held by `core.transfers`.
Slots of logs that the worker writes are pinned; of the others the least recently used goes first,
never one of another tenant that is within its quota.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from services.kvstore.core import Core, invalid, stale
from services.kvstore.pages import PagePool, PageState
from services.kvstore.quotas import REST
from services.kvstore.state import LogState, PageRow, Writer
from services.kvstore.tiers.device_orders import (
    Clear,
    DeviceCounts,
    DeviceOrder,
    DeviceOutcome,
    Load,
    Placed,
    Reserve,
)
from services.kvstore.tiers.device_slots import Slot, Use, Want
from services.kvstore.tiers.idle_slots import IdleSlots

LOW_SHARE: Final = 0.05
HIGH_SHARE: Final = 0.10
"""Below the first share of free slots, idle ones are cleared until the second is free."""


class DeviceMemory:
    """The device memory of one run of one worker; begins empty, ends with the worker's stream."""

    def __init__(self, core: Core, writer: Writer, slot_count: int) -> None:
        self.writer = writer
        self.pool = PagePool(slot_count)
        self.damaged: list[PageRow] = []
        self.on_news: Callable[[], None] = lambda: None
        self.loaded_pages = self.cleared_pages = 0
        self._core = core
        self._slots: dict[int, Slot] = {}
        self._slot_of: dict[int, int] = {}
        self._wants: dict[bytes, Want] = {}
        # Wants that wait for slots, in order, and those that have not been answered.
        self._waiting: OrderedDict[bytes, None] = OrderedDict()
        self._unanswered: dict[bytes, None] = {}
        self._clearing = 0
        # Resident slots that nobody pins.
        self._idle = IdleSlots()
        self._order_slots: dict[int, int] = {}
        self._orders: deque[DeviceOrder] = deque()
        self._answers: deque[Placed] = deque()
        self._last_order_id = 0
        # What is being copied, as it was when it was ordered.
        self._rows: dict[int, PageRow] = {}

    # --- what the worker says ---------------------------------------------------------------

    def want(self, log_id: bytes, generation: int, now_s: float, *, with_written: bool) -> None:
        """All pages of a log that the worker writes are wanted here; STALE_GENERATION if it is not
        the writer. Asking again asks for what is not here.

        `with_written`: also the pages that are still written, which the worker fills here first; it
        has nothing of the log uncommitted then, and writes none of it before the answer.
        """
        log = self._core.current(log_id, generation)
        if log.writer != self.writer:
            raise stale(log_id, generation, log.generation)
        self._release_ended(now_s)
        want = self._wants.get(log_id)
        if want is None:
            want = self._wants[log_id] = Want(
                log_id=log_id, generation=generation, tenant=log.tenant
            )
        want.refused = 0
        want.missing = deque(self._pin(want, self._pages(log, with_written=with_written)))
        self._waiting[log_id] = self._unanswered[log_id] = None
        self._serve(now_s)

    def done(self, order_id: int, outcome: DeviceOutcome, now_s: float) -> None:
        """An order was obeyed, or could not be; INVALID_REQUEST for one that is not under way."""
        number = self._order_slots.pop(order_id, None)
        if number is None:
            raise invalid("done.order_id", "names no order that is under way")
        slot = self._slots[number]
        slot.order_id = None
        if slot.use is Use.CLEARING:
            if outcome is not DeviceOutcome.DONE:
                raise invalid("done.outcome", "a slot is always cleared; close the stream instead")
            self._free(number)
        else:
            self._settle(number, slot, outcome, now_s)
        self._serve(now_s)

    def _settle(self, number: int, slot: Slot, outcome: DeviceOutcome, now_s: float) -> None:
        """A slot was filled, or could not be. Its host page is let go last: that may free it."""
        row = self._rows.pop(number, None)
        for log_id in self._unanswered:
            want = self._wants[log_id]
            if number in want.loading:
                want.loading.discard(number)
                want.refused += outcome is not DeviceOutcome.DONE
        if outcome is DeviceOutcome.DONE:
            slot.use = Use.RESIDENT
            self.pool.commit(number)
            self.loaded_pages += slot.is_copying
            if slot.is_lost:
                self._clear(number)
            elif slot.pins == 0:
                self._rest(number, now_s)
        else:
            self._forget_pins(number)
            self._forget(number)
            self.pool.give_back(number)
            self.pool.take_freed_array()
            if outcome is DeviceOutcome.DAMAGED and row is not None:
                self.damaged.append(row)
        if slot.is_copying:
            slot.is_copying = False
            self._core.end_transfer([slot.page])
            self._core.drain_freed()

    # --- what the store says ----------------------------------------------------------------

    def forget_pages(self, pages: Iterable[int]) -> None:
        """These host pages are free: what stands here for them is cleared."""
        for page in pages:
            number = self._slot_of.pop(page, None)
            if number is not None:
                self._lose(number)

    def turn(self, now_s: float) -> None:
        """Now and then: lets go of logs that the worker does not write any more, and keeps some
        slots free.
        """
        self._release_ended(now_s)
        count = self.pool.page_count
        coming = self.pool.free_count + self._clearing
        if coming < LOW_SHARE * count:
            charges = self.pool.charges
            accounts = [REST] if charges is None else [*charges.over(), REST]
            for number in self._idle.first(accounts, int(HIGH_SHARE * count) - coming):
                self._clear(number)
        self._serve(now_s)

    def end(self) -> None:
        """The worker, or its stream, is gone: nothing stands here any more, and no page is read."""
        held = [slot.page for slot in self._slots.values() if slot.is_copying]
        for slot in self._slots.values():
            slot.is_copying = False
        self._core.end_transfer(held)
        self._core.drain_freed()

    def take_orders(self, count: int) -> tuple[list[DeviceOrder], list[Placed]]:
        """The next orders to send, and the answers that may follow them."""
        orders = [self._orders.popleft() for _ in range(min(count, len(self._orders)))]
        answers: list[Placed] = []
        if not self._orders:
            answers, self._answers = list(self._answers), deque()
        return orders, answers

    def _send(self, order: DeviceOrder) -> None:
        self._orders.append(order)
        self.on_news()

    @property
    def has_news(self) -> bool:
        """Whether `take_orders` has something."""
        return bool(self._orders or self._answers)

    # --- wants ------------------------------------------------------------------------------

    def _pages(self, log: LogState, *, with_written: bool) -> Iterator[PageRow]:
        """Rows of the log's pages; those without KV have no tokens."""
        block_tokens = self._core.block_tokens
        for row in log.rows:
            if row.tokens == block_tokens or with_written:
                yield row
        if with_written:
            for page, page_generation in log.granted.items():
                yield PageRow(page=page, page_generation=page_generation, tokens=0)

    def _pin(self, want: Want, rows: Iterable[PageRow]) -> Iterator[PageRow]:
        """Pins what is here, and gives the rows that are not."""
        for row in rows:
            number = self._slot_of.get(row.page)
            if number is None:
                yield row
            elif self._slots[number].page_generation != row.page_generation:
                del self._slot_of[row.page]
                self._lose(number)
                yield row
            else:
                self._pin_slot(want, number)

    def _pin_slot(self, want: Want, number: int) -> None:
        if number in want.slots:
            return
        want.slots.add(number)
        slot = self._slots[number]
        if slot.use is Use.LOADING:
            want.loading.add(number)
        slot.pins += 1
        self._idle.discard(number)

    def _serve(self, now_s: float) -> None:
        """Gives slots to the wants in their order, as far as there are any, and answers them."""
        while self._waiting:
            log_id = next(iter(self._waiting))
            self._fill(self._wants[log_id])
            if self._wants[log_id].missing and self._clearing:
                break
            del self._waiting[log_id]
        for log_id in list(self._unanswered):
            if log_id not in self._waiting and not self._wants[log_id].loading:
                self._answer(self._wants[log_id])

    def _fill(self, want: Want) -> None:
        """Slots for what is missing; others are ordered cleared for the rest, once what was ordered
        before is clear.
        """
        rows = [row for row in want.missing if self._is_loadable(row)]
        want.refused += len(want.missing) - len(rows)
        want.missing = deque(rows)
        if not self._clearing:
            for number in self._victims(want.tenant, len(rows)):
                self._clear(number)
        while want.missing and self._grantable(want.tenant, 1):
            self._place(want, want.missing.popleft())

    def _grantable(self, tenant: str, pages: int) -> int:
        """How many of `pages` slots the tenant can have now."""
        charges = self.pool.charges
        room = pages if charges is None else min(pages, charges.room(tenant))
        return min(room, self.pool.free_count)

    def _is_loadable(self, row: PageRow) -> bool:
        """Whether the host page is still in this use, and what it must hash to is known: nobody
        else's bytes are ever copied.
        """
        pool = self._core.pool
        if row.tokens == 0:
            is_granted = pool.state(row.page) is PageState.GRANTED
            return is_granted and pool.generation(row.page) == row.page_generation
        is_known = row.crc is not None or len(row.slot_crcs) == row.tokens
        return is_known and pool.is_held(row.page, row.page_generation)

    def _place(self, want: Want, row: PageRow) -> None:
        (number,) = self.pool.grant(1, want.tenant)
        is_copying = row.tokens > 0
        order_id = self._next_order(number)
        self._slots[number] = Slot(
            page=row.page,
            page_generation=row.page_generation,
            tenant=want.tenant,
            use=Use.LOADING,
            order_id=order_id,
            is_copying=is_copying,
        )
        self._slot_of[row.page] = number
        self._pin_slot(want, number)
        if is_copying:
            self._core.hold_for_transfer([row.page])
            # The writer's own row goes on growing.
            self._rows[number] = row = PageRow(
                page=row.page,
                page_generation=row.page_generation,
                tokens=row.tokens,
                crc=row.crc,
                slot_crcs=list(row.slot_crcs),
            )
            self._send(Load(order_id=order_id, slot=number, row=row))
        else:
            self._send(
                Reserve(
                    order_id=order_id,
                    slot=number,
                    page=row.page,
                    page_generation=row.page_generation,
                )
            )

    def _answer(self, want: Want) -> None:
        del self._unanswered[want.log_id]
        self._answers.append(
            Placed(
                log_id=want.log_id,
                generation=want.generation,
                pages=len(want.slots),
                missing=len(want.missing) + want.refused,
            )
        )
        self.on_news()

    def _release_ended(self, now_s: float) -> None:
        """Logs that this worker does not write any more pin nothing."""
        for want in list(self._wants.values()):
            log = self._core.logs.get(want.log_id)
            is_written = (
                log is not None and log.writer == self.writer and log.generation == want.generation
            )
            if is_written:
                continue
            del self._wants[want.log_id]
            self._waiting.pop(want.log_id, None)
            if want.log_id in self._unanswered:
                self._answer(want)
            for number in want.slots:
                self._unpin(number, now_s)

    def _unpin(self, number: int, now_s: float) -> None:
        """A log that stands in the slot is not written by this worker any more. What it left half
        written nobody goes on with in this page: that goes at once.
        """
        slot = self._slots[number]
        slot.pins -= 1
        if slot.pins:
            return
        is_left = self._core.pool.fence_of(slot.page) is not None
        if slot.use is Use.RESIDENT and is_left:
            self._clear(number)
        elif slot.use is Use.RESIDENT:
            self._rest(number, now_s)
        elif slot.use is Use.LOADING and is_left:
            self._slot_of.pop(slot.page, None)
            slot.is_lost = True

    # --- room -------------------------------------------------------------------------------

    def _victims(self, tenant: str, pages: int) -> list[int]:
        """Idle slots to clear so that the tenant can have `pages` more, the first idle first: its
        own as far as its quota demands it, then also those of accounts over theirs.
        """
        free, charges = self.pool.free_count, self.pool.charges
        if charges is None:
            return self._idle.first([REST], pages - free)
        own, excess = charges.account_of(tenant), charges.excess(tenant, pages)
        is_own = charges.own_excess(tenant, pages) >= charges.account_excess(tenant, pages)
        is_meant = (lambda number: self._slots[number].tenant == tenant) if is_own else None
        found = self._idle.first([own], excess, is_meant)
        granted = pages - (excess - len(found))
        short = granted - free - len(found)
        others = self._idle.first([*charges.over(), own], short + len(found))
        return found + [number for number in others if number not in found][: max(short, 0)]

    def _account(self, tenant: str) -> str:
        charges = self.pool.charges
        return REST if charges is None else charges.account_of(tenant)

    def reorder(self) -> None:
        """The quotas changed: idle slots stand in the orders of other accounts."""
        self._idle.reorder(lambda number: self._account(self._slots[number].tenant))

    def _rest(self, number: int, now_s: float) -> None:
        """Nobody pins the slot: it may be cleared for others."""
        self._idle.add(number, self._account(self._slots[number].tenant), now_s)

    # --- slots ------------------------------------------------------------------------------

    def _next_order(self, number: int) -> int:
        self._last_order_id += 1
        self._order_slots[self._last_order_id] = number
        return self._last_order_id

    def _lose(self, number: int) -> None:
        """The host page is not what it was: the slot is cleared, after its order if one is under
        way.
        """
        slot = self._slots[number]
        self._forget_pins(number)
        if slot.use is Use.LOADING:
            slot.is_lost = True
        elif slot.use is Use.RESIDENT:
            self._clear(number)

    def _forget_pins(self, number: int) -> None:
        slot = self._slots[number]
        if slot.pins:
            for want in self._wants.values():
                if number in want.slots:
                    want.slots.discard(number)
                    want.loading.discard(number)
                    slot.pins -= 1
            assert slot.pins == 0, number

    def _clear(self, number: int) -> None:
        """Orders a resident slot cleared."""
        slot = self._slots[number]
        assert slot.use is Use.RESIDENT, slot
        assert slot.pins == 0, slot
        self._idle.discard(number)
        if self._slot_of.get(slot.page) == number:
            del self._slot_of[slot.page]
        slot.use = Use.CLEARING
        self._clearing += 1
        slot.order_id = self._next_order(number)
        self.cleared_pages += 1
        self._send(
            Clear(
                order_id=slot.order_id,
                slot=number,
                page=slot.page,
                page_generation=slot.page_generation,
            )
        )

    def _free(self, number: int) -> None:
        self._clearing -= 1
        self._forget(number)
        self.pool.drop(number)
        self.pool.take_freed_array()

    def _forget(self, number: int) -> None:
        slot = self._slots.pop(number)
        if self._slot_of.get(slot.page) == number:
            del self._slot_of[slot.page]

    # --- what is told -----------------------------------------------------------------------

    def counts(self) -> DeviceCounts:
        """Slots by state."""
        uses = [slot.use for slot in self._slots.values()]
        return DeviceCounts(
            free=self.pool.free_count,
            loading=uses.count(Use.LOADING),
            resident=uses.count(Use.RESIDENT),
            clearing=uses.count(Use.CLEARING),
        )

    def slot_of(self, page: int, page_generation: int) -> int | None:
        """The slot a host page stands in, ready to be read; None if there is none."""
        number = self._slot_of.get(page)
        if number is None:
            return None
        slot = self._slots[number]
        is_ready = slot.use is Use.RESIDENT and slot.page_generation == page_generation
        return number if is_ready else None

    def check_invariants(self) -> None:
        """Asserts conservation, that every copy has its original, and that all tables agree."""
        self.pool.check_invariants()
        assert self.counts().total == self.pool.page_count
        free = set(self.pool.free_pages())
        assert free.isdisjoint(self._slots), "a free slot that something stands in"
        pins: dict[int, int] = {}
        for want in self._wants.values():
            for number in want.slots:
                pins[number] = pins.get(number, 0) + 1
        for number, slot in self._slots.items():
            self._check_slot(number, slot)
            assert slot.pins == pins.get(number, 0), slot
            is_idle = slot.use is Use.RESIDENT and slot.pins == 0
            assert is_idle == (number in self._idle), (number, slot)
        assert set(self._idle) <= self._slots.keys()
        for page, number in self._slot_of.items():
            assert self._slots[number].page == page
        assert self._clearing == self.counts().clearing
        assert self._unanswered.keys() <= self._wants.keys()
        assert self._waiting.keys() <= self._unanswered.keys()
        assert self._rows.keys() == {n for n, slot in self._slots.items() if slot.is_copying}

    def _check_slot(self, number: int, slot: Slot) -> None:
        charges, host = self.pool.charges, self._core.pool
        assert charges is None or charges.owner(number) == slot.tenant, (number, slot)
        has_order = slot.use is not Use.RESIDENT
        assert (slot.order_id is not None) == has_order, slot
        assert slot.order_id is None or self._order_slots[slot.order_id] == number
        if slot.is_copying:
            assert self._core.transfers[slot.page] > 0, slot
        if slot.use is Use.CLEARING or slot.is_lost:
            assert slot.pins == 0, slot
            return
        assert self._slot_of[slot.page] == number, slot
        # The host has it, in this use of the page: the device is a copy.
        assert host.generation(slot.page) == slot.page_generation, slot
        assert host.state(slot.page) is not PageState.FREE, slot
