"""A worker's device memory, as the kvstore orders it: what stands where, and who is using it.

Owns the worker's side of one stream of orders: obeying them in a few threads of its own, the table
from pages to slots, and leases on slots. Decides nothing about placement, never computes.

Invariants: a slot that a lease covers is not cleared before the lease ends; a page is copied only
if its bytes hash to what the kvstore says; device memory is empty when a stream begins and after it
ended, and nothing of it is lost then: what is committed stands in the host arena.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

import structlog

from baton.arena.device import DevicePages, SlotPart
from baton.arena.device_wire import (
    ClearOrder,
    DeviceCall,
    LoadOrder,
    Order,
    Outcome,
    Placement,
    ReserveOrder,
)
from baton.arena.mapping import MappedArena
from baton.arena.replay import GrantedPage, HeldLog, PageRow
from baton.errors import Reason, ServiceError
from baton.kv.layout import page_crc, slot_crcs

THREADS: Final = 4
PLACE_TIMEOUT_S: Final = 30.0

Result = TypeVar("Result")

_log = structlog.stdlib.get_logger("baton.arena")


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePart:
    """Token slots [first, first + tokens) of an arena page, computed in device memory."""

    page: GrantedPage
    first: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWorker:
    """Who follows orders: an attached worker, this run of it, its capability."""

    worker_id: str
    incarnation: int
    capability: str


class DeviceLease:
    """Slots that stay what they are until the lease ends, by the page that stands in each."""

    def __init__(self, slots: Mapping[GrantedPage, int], end: Callable[[], None]) -> None:
        self._slots = dict(slots)
        self._end: Callable[[], None] | None = end

    def slot_of(self, page: GrantedPage) -> int | None:
        """The slot a page stands in; None: it is in the host arena only."""
        return self._slots.get(page)

    def end(self) -> None:
        """The slots are not used any more. Ending again is harmless."""
        end, self._end = self._end, None
        if end is not None:
            end()


class DeviceOrders:
    """See the module. Used from the event loop; `follow` runs as long as a stream does."""

    def __init__(
        self,
        pages: DevicePages,
        arena: MappedArena,
        worker: DeviceWorker,
        open_call: Callable[[], DeviceCall],
    ) -> None:
        assert pages.geometry == arena.geometry, "slots hold pages of this arena"
        self._pages = pages
        self._arena = arena
        self._worker = worker
        self._open_call = open_call
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="device")
        self._call: DeviceCall | None = None
        self.is_following = asyncio.Event()
        """Set while a stream stands: logs can be placed."""
        self._writing = asyncio.Lock()
        self._slot_of: dict[int, tuple[int, int]] = {}
        self._users: dict[int, int] = {}
        self._unused: dict[int, asyncio.Event] = {}
        self._placements: dict[bytes, asyncio.Future[Placement]] = {}

    # --- the stream -------------------------------------------------------------------------

    async def follow(self) -> None:
        """Obeys one stream of orders until it ends; raises why it ended, INTERNAL where the device
        failed.
        """
        call = self._open_call()
        try:
            await self._clear_all()
            await call.say_hello(
                self._worker.worker_id,
                self._worker.incarnation,
                self._worker.capability,
                slots=self._pages.slot_count,
                slot_bytes=self._pages.geometry.page_bytes,
            )
            self._call = call
            self.is_following.set()
            async with asyncio.TaskGroup() as group:
                while True:
                    news = await call.receive()
                    for order in news.orders:
                        group.create_task(self._obey(call, order))
                    for placed in news.placed:
                        self._settle(placed)
        except* ServiceError as failures:
            raise _first(failures) from None
        finally:
            self._call = None
            self.is_following.clear()
            call.cancel()
            self._forget_all()

    async def _obey(self, call: DeviceCall, order: Order) -> None:
        """One order, then the report of it. The kvstore never has two under way for one slot."""
        outcome = Outcome.DONE
        if isinstance(order, LoadOrder):
            row, slot = order.row, order.slot
            outcome = await self._run(lambda: self._load(slot, row))
            if outcome == Outcome.DONE:
                self._slot_of[row.page] = row.page_generation, slot
        elif isinstance(order, ReserveOrder):
            self._slot_of[order.page.page] = order.page.page_generation, order.slot
        else:
            self._forget(order)
            await self._until_unused(order.slot)
            await self._clear([order.slot])
        async with self._writing:
            await call.report(order.order_id, outcome)

    def _forget(self, order: ClearOrder) -> None:
        known = self._slot_of.get(order.page.page)
        if known is not None and known[1] == order.slot:
            del self._slot_of[order.page.page]

    def _load(self, slot: int, row: PageRow) -> Outcome:
        """In a thread. The page is held by the kvstore, so its bytes are still when they are read;
        a damaged one is not copied.
        """
        page = self._arena.page(row.page)
        try:
            if row.slot_crcs:
                found: object = slot_crcs(self._arena.geometry, page, 0, row.tokens)
                is_right = found == row.slot_crcs
            else:
                is_right = page_crc(self._arena.geometry, page) == row.crc32c
            if not is_right:
                return Outcome.DAMAGED
            self._pages.load(slot, page)
        except (OSError, RuntimeError) as error:
            _log.error("device_load_failed", error=type(error).__name__)
            self._pages.clear(slot)
            return Outcome.FAILED
        finally:
            page.release()
        return Outcome.DONE

    async def _run(self, job: Callable[[], Result]) -> Result:
        """What the job returns. One that was begun is waited for, also when its waiter is
        cancelled: the arena may be unmapped after that.
        """
        future = asyncio.get_running_loop().run_in_executor(self._threads, job)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await _settled(future)
            raise

    async def _clear(self, slots: Sequence[int]) -> None:
        """Zeroes slots; INTERNAL where the device fails: nothing is known of it then."""

        def clear() -> None:
            for slot in slots:
                self._pages.clear(slot)

        try:
            await self._run(clear)
        except (OSError, RuntimeError) as error:
            raise ServiceError(
                Reason.INTERNAL, f"the device failed ({type(error).__name__}); look at its driver"
            ) from error

    async def _clear_all(self) -> None:
        """Before a stream begins: nothing of an earlier one is left."""
        for slot in range(self._pages.slot_count):
            await self._until_unused(slot)
        await self._clear(range(self._pages.slot_count))

    def _forget_all(self) -> None:
        self._slot_of.clear()
        for future in self._placements.values():
            if not future.done():
                future.set_exception(
                    ServiceError(Reason.WORKER_LOST, "the kvstore's stream of orders ended")
                )
                # It may have nobody who waits.
                future.exception()
        self._placements.clear()

    def close(self) -> None:
        """Nothing is ordered any more; the memory goes back."""
        self._threads.shutdown(wait=True)
        self._pages.close()

    # --- placement --------------------------------------------------------------------------

    async def place(
        self, log: HeldLog, *, with_written: bool, timeout_s: float = PLACE_TIMEOUT_S
    ) -> Placement:
        """Asks for a log's pages in device memory and waits until that is answered.

        `with_written`: also the pages that are still written, which this worker then writes in
        device memory first; nothing of the log is uncommitted now, and nothing of it is written
        before this returns. WORKER_LOST without a stream, TRANSFER_TIMEOUT after `timeout_s`.
        """
        if self._call is None:
            raise ServiceError(Reason.WORKER_LOST, "no kvstore orders this device memory now")
        future = self._placements.get(log.log_id)
        if future is None:
            future = asyncio.get_running_loop().create_future()
            self._placements[log.log_id] = future
            async with self._writing:
                await self._call.ask(log, with_written=with_written)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(future)
        except TimeoutError as error:
            self._placements.pop(log.log_id, None)
            raise ServiceError(
                Reason.TRANSFER_TIMEOUT, f"a log was not placed within {timeout_s:g} s"
            ) from error

    def _settle(self, placed: Placement) -> None:
        future = self._placements.pop(placed.log.log_id, None)
        if future is not None and not future.done():
            future.set_result(placed)

    def slot_of(self, page: GrantedPage) -> int | None:
        """The slot a page stands in, in this use of it."""
        page_generation, slot = self._slot_of.get(page.page, (None, None))
        return slot if page_generation == page.page_generation else None

    def use(self, pages: Iterable[GrantedPage]) -> DeviceLease:
        """The slots of these pages, which are not cleared before the lease ends."""
        slots = {page: slot for page in pages if (slot := self.slot_of(page)) is not None}
        for slot in slots.values():
            self._users[slot] = self._users.get(slot, 0) + 1
        return DeviceLease(slots, lambda: self._end_use(slots.values()))

    def _end_use(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._users[slot] -= 1
            if self._users[slot] == 0:
                del self._users[slot]
                waiting = self._unused.pop(slot, None)
                if waiting is not None:
                    waiting.set()

    async def _until_unused(self, slot: int) -> None:
        while slot in self._users:
            await self._unused.setdefault(slot, asyncio.Event()).wait()

    # --- write-through ----------------------------------------------------------------------

    async def write_through(self, lease: DeviceLease, parts: Sequence[PagePart]) -> None:
        """Copies what was computed in device memory to the arena's pages, before it is committed.

        Parts whose page has no slot in the lease were written to the arena itself.
        """
        found = [
            SlotPart(
                slot=slot,
                page=self._arena.page(part.page.page),
                first=part.first,
                tokens=part.tokens,
            )
            for part in parts
            if (slot := lease.slot_of(part.page)) is not None
        ]
        try:
            await self._run(lambda: self._pages.write_through(found))
        finally:
            for part in found:
                part.page.release()


def _first(failures: BaseExceptionGroup[ServiceError]) -> ServiceError:
    """The first refusal of a group, however deep it is."""
    failure: BaseException = failures
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    assert isinstance(failure, ServiceError)
    return failure


async def _settled(future: asyncio.Future[Result]) -> None:
    """Waits until the job is over, through further cancellations."""
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue
