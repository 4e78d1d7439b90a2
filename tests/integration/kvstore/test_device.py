"""Device memory over a real kvstore, with a stand-in for the device: same bytes, exact counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from baton.arena.append import AppendEntry
from baton.arena.checksums import slot_checksum
from baton.arena.device_orders import DeviceOrders, DeviceWorker, PagePart
from baton.arena.device_standin import StandInPages
from baton.arena.device_wire import DeviceCall
from baton.arena.replay import GrantedPage
from baton.engine.sampling import SampledToken
from baton.errors import Reason, ServiceError
from baton.kv.layout import page_view
from tests.integration.kvstore.harness import (
    BLOCK,
    FakeLog,
    FakeWorker,
    Model,
    Site,
    StoreProcess,
    connected,
    kv_value,
    running_store,
    worker_capability,
)

SLOTS = 8
PROMPT = [4 + index % 50 for index in range(2 * BLOCK + 5)]
TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def patient_store(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    """A kvstore whose leases outlast a slow machine."""
    directory: Path = tmp_path_factory.mktemp("kvstore-device")
    with running_store(model, directory, "--lease-s", "60") as running:
        yield running


@pytest.fixture
async def site(patient_store: StoreProcess) -> AsyncIterator[Site]:
    """Connections of one test."""
    async with connected(patient_store) as one:
        yield one


@asynccontextmanager
async def device_of(
    site: Site, worker: FakeWorker
) -> AsyncIterator[tuple[DeviceOrders, StandInPages]]:
    """A worker's device memory while its stream stands."""
    pages = StandInPages(site.model.geometry, SLOTS)
    who = DeviceWorker(
        worker_id=worker.worker_id, incarnation=worker.incarnation, capability=worker_capability()
    )
    orders = DeviceOrders(pages, worker.attached.arena, who, lambda: DeviceCall(site.channel))

    async def follow() -> None:
        with pytest.raises(ServiceError):
            await orders.follow()

    async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as group:
        following = group.create_task(follow())
        await orders.is_following.wait()
        yield orders, pages
        following.cancel()
    orders.close()


def rows_of(log: FakeLog) -> list[GrantedPage]:
    """The log's pages."""
    return [log.table.row(index) for index in range(log.table.row_count)]


def content(worker: FakeWorker, page: GrantedPage) -> bytes:
    """The arena's bytes of a page."""
    return bytes(worker.attached.arena.page(page.page))


async def written(site: Site, worker: FakeWorker, first: int = 3) -> FakeLog:
    """A log in its decode phase, taken by the worker."""
    log = await site.open(worker, [first, *PROMPT])
    await worker.prefill(log)
    return await worker.take(log, pages=2)


async def append_on_device(
    worker: FakeWorker, log: FakeLog, orders: DeviceOrders, pages: StandInPages
) -> None:
    """One token whose KV is computed in device memory, written through and then committed."""
    position = len(log.tokens)
    log.table.require(position)
    granted, slot = log.table.slot(position - 1)
    lease = orders.use([granted])
    number = lease.slot_of(granted)
    assert number is not None, "the page is in device memory"
    view = page_view(worker.model.geometry, np.frombuffer(pages.memory(number), dtype=np.uint8))
    view.k[:, :, slot] = kv_value(log.tokens[-1], position - 1)
    view.v[:, :, slot] = -kv_value(log.tokens[-1], position - 1)
    await orders.write_through(lease, [PagePart(page=granted, first=slot, tokens=1)])
    lease.end()
    entry = AppendEntry(
        log_id=log.log_id,
        generation=log.generation,
        position=position,
        sampled=SampledToken(token_id=7),
        page=granted,
        checksum=slot_checksum(worker.attached.arena, log.table, position - 1),
    )
    (outcome,) = await worker.send([entry])
    assert outcome.error is None
    log.tokens.append(7)
    log.committed += 1


async def test_a_log_is_computed_in_device_memory_and_read_from_the_arena(site: Site) -> None:
    """Placed with the pages it still writes; 20 tokens over a page's end; then another worker reads
    every position from the arena, and each slot is what its page is.
    """
    worker = await site.attach("d0")
    other = await site.attach("d1")
    async with device_of(site, worker) as (orders, pages):
        log = await written(site, worker)
        placed = await orders.place(log.held, with_written=True)
        assert (placed.pages, placed.missing) == (5, 0)
        for _ in range(20):
            await append_on_device(worker, log, orders, pages)
        lease = orders.use(rows_of(log))
        for page in rows_of(log):
            number = lease.slot_of(page)
            assert number is not None
            assert pages.read(number) == content(worker, page)
        lease.end()
        taken = await other.take(log)
        view = await other.view(taken)
        positions = range(view.head.committed_position)
        assert len(positions) == len(PROMPT) + 21
        assert [other.read(view, at) for at in positions] == [
            kv_value(view.token_ids[at], at) for at in positions
        ]
        await site.close(taken, drop=True)
        # The log is gone, so its pages are, and so is what stood in device memory: zeroed. Each
        # turn is a round trip; the test's deadline ends it.
        while any(any(pages.read(slot)) for slot in range(SLOTS)):
            await site.counts()


async def test_what_has_no_room_stays_in_the_arena(site: Site) -> None:
    """A second log that is wanted while the first one is written finds three slots left."""
    worker = await site.attach("d2")
    async with device_of(site, worker) as (orders, _):
        first, second = await written(site, worker, 1), await written(site, worker, 2)
        one = await orders.place(first.held, with_written=True)
        two = await orders.place(second.held, with_written=True)
        assert (one.pages, one.missing, two.pages, two.missing) == (5, 0, 3, 2)
        lease = orders.use(rows_of(second))
        slots = {lease.slot_of(page) for page in rows_of(second)} - {None}
        assert {orders.slot_of(page) for page in rows_of(first)}.isdisjoint(slots)
        lease.end()
        for log in (first, second):
            await site.close(log, drop=True)


async def test_a_damaged_page_is_not_copied_and_not_used_again(site: Site) -> None:
    """A flipped byte in the arena: the page is missing in device memory, the kvstore compares it
    itself, and the log gives up its KV from there on.
    """
    worker = await site.attach("d3")
    async with device_of(site, worker) as (orders, pages):
        log = await written(site, worker)
        page = worker.attached.arena.page(log.table.row(1).page)
        page[100] ^= 0xFF
        page.release()
        placed = await orders.place(log.held, with_written=False)
        assert (placed.pages, placed.missing) == (1, 1)
        view = await worker.view(log)
        assert view.head.committed_position == BLOCK
        assert sum(any(pages.read(slot)) for slot in range(SLOTS)) <= 1
        await site.close(log, drop=True)


async def test_only_this_run_of_an_attached_worker_has_device_memory(site: Site) -> None:
    """Refused naming the field; a second stream of the worker ends the first one."""
    worker = await site.attach("d4")
    pages = StandInPages(site.model.geometry, SLOTS)
    for worker_id, incarnation, reason in (
        ("nobody", 1, Reason.NO_WORKER),
        ("d4", worker.incarnation + 1, Reason.INVALID_REQUEST),
    ):
        who = DeviceWorker(
            worker_id=worker_id, incarnation=incarnation, capability=worker_capability()
        )
        orders = DeviceOrders(pages, worker.attached.arena, who, lambda: DeviceCall(site.channel))
        with pytest.raises(ServiceError) as caught:
            await orders.follow()
        assert caught.value.reason is reason
    async with device_of(site, worker) as (first, _), device_of(site, worker) as (second, _):
        log = await written(site, worker)
        assert (await second.place(log.held, with_written=False)).pages == 2
        with pytest.raises(ServiceError) as caught:
            await first.place(log.held, with_written=False)
        assert caught.value.reason is Reason.WORKER_LOST
        await site.close(log, drop=True)


@pytest.mark.more
def test_device_memory_is_filled_again_after_kill_9_of_the_store(
    model: Model, tmp_path: Path
) -> None:
    """The stream ends and device memory counts as empty; the worker attaches again and its log is
    placed from the arena.
    """
    with running_store(model, tmp_path, "--lease-s", "60") as store:

        async def live() -> None:
            async with connected(store) as site:
                worker = await site.attach("d5")
                async with device_of(site, worker) as (orders, pages):
                    log = await written(site, worker)
                    assert (await orders.place(log.held, with_written=False)).pages == 2
                    await site.restart()
                    with pytest.raises(ServiceError):
                        await orders.place(log.held, with_written=False)
                    again = await site.attach("d5", [log.held], None, worker.incarnation)
                    held = again.attached.held[0]
                async with device_of(site, again) as (orders, pages):
                    placed = await orders.place(held, with_written=False)
                    assert (placed.pages, placed.missing) == (2, 0)
                    row = log.table.row(0)
                    number = orders.slot_of(row)
                    assert number is not None
                    assert pages.read(number) == content(again, row)

        asyncio.run(live())
