"""A worker obeys the kvstore's orders: leases hold clears back, damage is not copied."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from baton.arena.device import SlotPart
from baton.arena.device_orders import DeviceOrders, DeviceWorker, PagePart
from baton.arena.device_standin import StandInPages
from baton.arena.device_wire import (
    ClearOrder,
    DeviceCall,
    DeviceNews,
    LoadOrder,
    Order,
    Outcome,
    Placement,
    ReserveOrder,
)
from baton.arena.mapping import ArenaShape, MappedArena
from baton.arena.replay import GrantedPage, HeldLog, PageRow
from baton.errors import Reason, ServiceError
from baton.kv.layout import KvDtype, KvGeometry, page_crc, page_view, slot_crcs

GEOMETRY = KvGeometry(
    layers=2, kv_heads=2, head_dim=4, head_dim_v=2, block_tokens=8, dtype=KvDtype.F32
)
PAGES = 6
SLOTS = 3
LOG = HeldLog(log_id=bytes(16), generation=4)
TIMEOUT_S = 30.0


class FakeCall(DeviceCall):
    """A stream whose other end is the test."""

    def __init__(self) -> None:
        self.inbox: asyncio.Queue[DeviceNews | ServiceError] = asyncio.Queue()
        self.reports: asyncio.Queue[tuple[int, Outcome]] = asyncio.Queue()
        self.asked: asyncio.Queue[tuple[HeldLog, bool]] = asyncio.Queue()
        self.hello: tuple[str, int, int] | None = None

    async def say_hello(
        self, worker_id: str, incarnation: int, capability: str, *, slots: int, slot_bytes: int
    ) -> None:
        """Notes it."""
        self.hello = worker_id, slots, slot_bytes

    async def ask(self, log: HeldLog, *, with_written: bool) -> None:
        """Notes it."""
        self.asked.put_nowait((log, with_written))

    async def report(self, order_id: int, outcome: Outcome) -> None:
        """Notes it."""
        self.reports.put_nowait((order_id, outcome))

    async def receive(self) -> DeviceNews:
        """What the test sent."""
        news = await self.inbox.get()
        if isinstance(news, ServiceError):
            raise news
        return news

    def cancel(self) -> None:
        """Nothing."""

    def send(self, *orders: Order, placed: tuple[Placement, ...] = ()) -> None:
        """A message of the kvstore."""
        self.inbox.put_nowait(DeviceNews(orders=orders, placed=placed))


class Bench:
    """Orders over a small arena with known bytes."""

    def __init__(self, path: Path) -> None:
        shape = ArenaShape(
            arena_id=bytes(16),
            page_count=PAGES,
            slot_bytes=GEOMETRY.slot_bytes,
            page_bytes=GEOMETRY.page_bytes,
            data_offset=0,
            geometry=GEOMETRY,
        )
        path.write_bytes(bytes(shape.file_bytes))
        self.arena = MappedArena(os.open(path, os.O_RDWR), shape)
        random = np.random.default_rng(3)
        for page in range(PAGES):
            with self.arena.page(page) as view:
                view[:] = random.integers(1, 255, GEOMETRY.page_bytes, dtype=np.uint8).tobytes()
        self.pages = StandInPages(GEOMETRY, SLOTS)
        self.call = FakeCall()
        who = DeviceWorker(worker_id="d", incarnation=1, capability="c")
        self.orders = DeviceOrders(self.pages, self.arena, who, lambda: self.call)

    def row(self, page: int, tokens: int = 8) -> PageRow:
        """What a page hashes to."""
        with self.arena.page(page) as view:
            is_full = tokens == GEOMETRY.block_tokens
            return PageRow(
                page=page,
                page_generation=9,
                tokens=tokens,
                crc32c=page_crc(GEOMETRY, view) if is_full else None,
                slot_crcs=() if is_full else slot_crcs(GEOMETRY, view, 0, tokens),
            )

    def content(self, page: int) -> bytes:
        """A page's bytes."""
        with self.arena.page(page) as view:
            return bytes(view)

    async def load(self, order_id: int, slot: int, row: PageRow) -> Outcome:
        """One order, and what became of it."""
        self.call.send(LoadOrder(order_id=order_id, slot=slot, row=row))
        got, outcome = await self.call.reports.get()
        assert got == order_id
        return outcome

    @asynccontextmanager
    async def followed(self) -> AsyncIterator[None]:
        """While the stream stands; why it ended is noted."""
        self.ended: ServiceError | None = None
        self.has_ended = asyncio.Event()

        async def follow() -> None:
            try:
                await self.orders.follow()
            except ServiceError as error:
                self.ended = error
                self.has_ended.set()

        async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as group:
            following = group.create_task(follow())
            await self.orders.is_following.wait()
            yield
            following.cancel()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Closed at the end; unmapping proves that nobody reads the arena any more."""
    one = Bench(tmp_path / "arena")
    yield one
    one.orders.close()
    one.arena.unmap()


def granted(page: int) -> GrantedPage:
    """A page in its use of now."""
    return GrantedPage(page=page, page_generation=9)


async def test_pages_are_copied_as_ordered(bench: Bench) -> None:
    """Full and partial ones, byte for byte; the table knows each in this use of it only."""
    async with bench.followed():
        assert bench.call.hello == ("d", SLOTS, GEOMETRY.page_bytes)
        assert await bench.load(1, 2, bench.row(4)) is Outcome.DONE
        assert await bench.load(2, 0, bench.row(1, tokens=3)) is Outcome.DONE
        assert bench.pages.read(2) == bench.content(4)
        assert bench.pages.read(0) == bench.content(1)
        assert bench.orders.slot_of(granted(4)) == 2
        assert bench.orders.slot_of(GrantedPage(page=4, page_generation=8)) is None
    assert bench.orders.slot_of(granted(4)) is None, "nothing is known after the stream"


async def test_a_page_that_does_not_hash_is_not_copied(bench: Bench) -> None:
    """A flipped bit in a full page, and in a committed slot of a partial one."""
    rows = [bench.row(2), bench.row(3, tokens=2)]
    for page in (2, 3):
        with bench.arena.page(page) as view:
            view[0] ^= 1
    async with bench.followed():
        for order_id, row in enumerate(rows):
            assert await bench.load(order_id, order_id, row) is Outcome.DAMAGED
            assert not any(bench.pages.read(order_id))
            assert bench.orders.slot_of(granted(row.page)) is None


async def test_a_used_slot_is_not_cleared_before_its_lease_ends(bench: Bench) -> None:
    """The page is forgotten at once, its bytes stay until the last of two leases; what was computed
    there still reaches the arena.
    """
    async with bench.followed():
        await bench.load(1, 1, bench.row(5))
        first, second = bench.orders.use([granted(5)]), bench.orders.use([granted(5), granted(0)])
        assert second.slot_of(granted(0)) is None
        bench.call.send(ClearOrder(order_id=2, slot=1, page=granted(5)))
        # An order behind it is obeyed meanwhile.
        assert await bench.load(3, 0, bench.row(0)) is Outcome.DONE
        assert bench.orders.slot_of(granted(5)) is None
        assert bench.pages.read(1) == bench.content(5)
        page_view(GEOMETRY, np.frombuffer(bench.pages.memory(1), dtype=np.uint8)).k[:, :, 2] = 7.5
        await bench.orders.write_through(first, [PagePart(page=granted(5), first=2, tokens=1)])
        with bench.arena.page(5) as view:
            written = page_view(GEOMETRY, np.frombuffer(view, dtype=np.uint8)).k[1, 1, 2, 3].item()
        assert written == 7.5
        first.end()
        first.end()
        assert bench.call.reports.empty()
        second.end()
        assert await bench.call.reports.get() == (2, Outcome.DONE)
        assert not any(bench.pages.read(1))


async def test_only_the_named_slots_are_written_through(bench: Bench) -> None:
    """Other bytes of the arena's page stay what they are; pages without a slot are left alone."""
    before = bench.content(3)
    async with bench.followed():
        bench.call.send(ReserveOrder(order_id=1, slot=0, page=granted(3)))
        assert await bench.call.reports.get() == (1, Outcome.DONE)
        lease = bench.orders.use([granted(3), granted(2)])
        parts = [PagePart(page=granted(page), first=1, tokens=2) for page in (3, 2)]
        await bench.orders.write_through(lease, parts)
        lease.end()
    with bench.arena.page(3) as view:
        now = page_view(GEOMETRY, np.frombuffer(view, dtype=np.uint8))
        was = page_view(GEOMETRY, np.frombuffer(before, dtype=np.uint8))
        assert not now.k[:, :, 1:3].any()
        assert not now.v[:, :, 1:3].any()
        for slots in (slice(0, 1), slice(3, 8)):
            assert np.array_equal(now.k[:, :, slots], was.k[:, :, slots])
            assert np.array_equal(now.v[:, :, slots], was.v[:, :, slots])
        del now


async def test_a_placement_is_answered_or_ends_with_the_stream(bench: Bench) -> None:
    """Asked once, however many wait for it; without a stream there is nobody to ask."""
    with pytest.raises(ServiceError) as caught:
        await bench.orders.place(LOG, with_written=True)
    assert caught.value.reason is Reason.WORKER_LOST
    async with bench.followed():
        async with asyncio.TaskGroup() as group:
            both = [group.create_task(bench.orders.place(LOG, with_written=True)) for _ in range(2)]
            answer = Placement(log=LOG, pages=3, missing=1)
            assert await bench.call.asked.get() == (LOG, True)
            bench.call.send(placed=(answer,))
        assert [one.result() for one in both] == [answer, answer]
        assert bench.call.asked.empty()
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(_refused(bench))
            assert await bench.call.asked.get() == (LOG, False)
            bench.call.inbox.put_nowait(ServiceError(Reason.WORKER_LOST, "gone"))
        assert waiting.result() is Reason.WORKER_LOST
    assert bench.ended is not None
    assert bench.ended.reason is Reason.WORKER_LOST


async def _refused(bench: Bench) -> Reason:
    with pytest.raises(ServiceError) as caught:
        await bench.orders.place(LOG, with_written=False)
    return caught.value.reason


async def test_a_device_that_fails_to_clear_ends_the_stream(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """INTERNAL; a load that fails is reported, and its slot is clear."""

    def fail(*_args: object) -> None:
        raise RuntimeError("no device")

    async with bench.followed():
        with monkeypatch.context() as patch:
            patch.setattr(bench.pages, "load", fail)
            assert await bench.load(1, 1, bench.row(1)) is Outcome.FAILED
        assert not any(bench.pages.read(1))
        monkeypatch.setattr(bench.pages, "clear", fail)
        bench.call.send(ClearOrder(order_id=2, slot=1, page=granted(1)))
        await bench.has_ended.wait()
    assert bench.ended is not None
    assert bench.ended.reason is Reason.INTERNAL


def test_the_stand_in_copies_what_it_is_told() -> None:
    """Slots begin zeroed; a write-through of all slots is the page."""
    pages = StandInPages(GEOMETRY, 2)
    assert not any(pages.read(1))
    page = bytearray(np.random.default_rng(1).bytes(GEOMETRY.page_bytes))
    pages.load(1, memoryview(page))
    copy = bytearray(GEOMETRY.page_bytes)
    pages.write_through([SlotPart(slot=1, page=memoryview(copy), first=0, tokens=8)])
    assert copy == page == pages.read(1)
    assert not any(pages.read(0))
    pages.clear(1)
    assert not any(pages.read(1))
