"""A node for the device tier: a store's pure cores, its arena's bytes, two workers with stand-ins.

Owns what workers and the arena do, step by step, and what has to hold after each step.
"""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from baton.arena.device import SlotPart
from baton.arena.device_standin import StandInPages
from baton.errors import Reason, ServiceError
from baton.kv.blocks import Scope
from baton.kv.layout import KvDtype, KvGeometry, copy_slots, page_view
from baton.kv.numeric import TORCH_F32
from services.kvstore.quota_book import QuotaBook
from services.kvstore.quotas import QuotaPlan, Tier
from services.kvstore.state import FillPage, Phase, Writer, ZeroPages
from services.kvstore.store import Store
from services.kvstore.tiers.device import DeviceTier
from services.kvstore.tiers.device_memory import DeviceMemory
from services.kvstore.tiers.device_orders import (
    Clear,
    DeviceOrder,
    DeviceOutcome,
    Load,
    Placed,
    Reserve,
)
from tests.unit.kvstore.cores import (
    BLOCK,
    DECODE,
    NOW,
    PREFILL,
    WorkerModel,
    build_store,
    fill_work,
    order,
)

GEOMETRY = KvGeometry(
    layers=1, kv_heads=1, head_dim=2, head_dim_v=2, block_tokens=BLOCK, dtype=KvDtype.F32
)
PAGE = GEOMETRY.page_bytes
PAGES = 64
SLOTS = 14
TENANTS = ("red", "blue", "grey")


def kv_of(token: int, position: int) -> float:
    """What stands in the KV of a token."""
    return float(token * 1000 + position + 1)


class Device:
    """One worker's device: its slots, the orders it has not obeyed, and what it knows."""

    def __init__(self, memory: DeviceMemory) -> None:
        self.memory = memory
        self.pages = StandInPages(GEOMETRY, SLOTS)
        self.orders: list[DeviceOrder] = []
        self.slot_of: dict[tuple[int, int], int] = {}
        self.placed: list[Placed] = []
        # Logs whose pages it must not write: it waits for them to be placed.
        self.waiting: set[bytes] = set()

    def receive(self) -> None:
        """What the store sent."""
        while self.memory.has_news:
            orders, placed = self.memory.take_orders(3)
            self.hear(orders, placed)

    def hear(self, orders: list[DeviceOrder], placed: list[Placed]) -> None:
        """One message."""
        self.orders += orders
        self.placed += placed
        self.waiting -= {one.log_id for one in placed}


class Node:
    """A store, its arena's bytes, and two workers with device memory."""

    def __init__(self, seed: int, quotas: QuotaPlan | None = None) -> None:
        self.random = random.Random(seed)
        self.store: Store = build_store(PAGES)
        self.book = None if quotas is None else QuotaBook(self.store.core, PAGE, quotas)
        self.tier = DeviceTier(self.store.core, self.book)
        self.host = np.zeros((PAGES, PAGE), dtype=np.uint8)
        self.devices: dict[str, Device] = {}
        self.models: list[WorkerModel] = []
        self.seconds = NOW.monotonic_s
        self.seen: Counter[str] = Counter()
        for writer in (PREFILL, DECODE):
            self.hello(writer)

    def hello(self, writer: Writer) -> None:
        """A worker's stream begins: its device memory is empty."""
        memory = self.tier.hello(writer, SLOTS, PAGE, PAGE)
        self.devices[writer.worker_id] = Device(memory)

    # --- steps ------------------------------------------------------------------------------

    def step(self) -> None:
        """One act, then the work of the arena, then everything that has to hold."""
        self.seconds += 1.0
        acts = [self.open] * 3 + [self.write] * 4 + [self.want] * 4 + [self.obey] * 8
        acts += [self.take, self.end, self.end, self.end, self.squeeze, self.turn, self.fail]
        try:
            self.random.choice(acts)()
        except ServiceError as error:
            self.seen[error.reason.value] += 1
        self.do_work()
        for device in self.devices.values():
            device.receive()
        self.check()

    def open(self) -> None:
        """A log of some tenant; prompts are often the same."""
        tokens = [self.random.randrange(1, 3)] * self.random.randrange(2, 5 * BLOCK)
        self.open_for(self.random.choice(TENANTS), tokens, pages=self.random.randrange(1, 3))

    def open_for(self, tenant: str, tokens: list[int], *, pages: int = 1) -> WorkerModel:
        """A log that prefill writes."""
        wanted = order(tokens, tenant=tenant, scope=Scope(tenant=tenant), output_pages=pages)
        self.store.open(wanted, PREFILL, NOW)
        self.do_work()
        model = WorkerModel(self.store, wanted.log_id, PREFILL)
        self.models.append(model)
        return model

    def write(self) -> None:
        """A chunk, a seal or a token by the log's writer; KV goes to the device first, and is
        written through before it is committed.
        """
        model = self.written_log()
        if model is None or model.log_id in self.devices[model.writer.worker_id].waiting:
            return
        log = model.log
        if log.phase is Phase.PREFILL and log.committed < log.prompt_tokens:
            end = min(log.committed + self.random.randrange(1, 2 * BLOCK), log.prompt_tokens)
            self.compute(model, log.committed, end)
            model.checkpoint(end)
        elif log.phase is Phase.PREFILL:
            model.seal()
        else:
            if log.committed % BLOCK == 0 and not log.granted:
                self.store.home.grant(log.log_id, log.generation, model.writer.worker_id, 1)
                self.do_work()
            self.compute(model, log.committed, log.committed + 1)
            model.append(2, "stop" if self.random.randrange(12) == 0 else None)

    def compute(self, model: WorkerModel, first: int, end: int) -> None:
        """KV of [first, end), where the page stands; then to the arena."""
        log, device = model.log, self.devices[model.writer.worker_id]
        spare = list(log.granted.items())
        for position in range(first, end):
            block, slot = divmod(position, BLOCK)
            if block < len(log.rows):
                page, generation = log.rows[block].page, log.rows[block].page_generation
            else:
                page, generation = spare[block - len(log.rows)]
            number = device.slot_of.get((page, generation))
            if number is None:
                view = page_view(GEOMETRY, self.host[page])
            else:
                self.seen["computed in device memory"] += 1
                view = page_view(GEOMETRY, device.pages.memory(number))
            view.k[:, :, slot] = kv_of(log.tokens[position], position)
            view.v[:, :, slot] = -kv_of(log.tokens[position], position)
            if number is not None:
                part = SlotPart(slot=number, page=self.host[page].data, first=slot, tokens=1)
                device.pages.write_through([part])

    def want(self) -> None:
        """The writer wants its log in device memory; nobody within its quota pays for it."""
        model = self.written_log()
        if model is None:
            return
        device = self.devices[model.writer.worker_id]
        # What ended logs left half written goes for nobody's sake.
        device.memory.turn(self.seconds)
        device.receive()
        log, charges = model.log, device.memory.pool.charges
        covered = set() if charges is None else {t for t in TENANTS if charges.is_covered(t)}
        with_written = self.random.randrange(4) > 0
        device.memory.want(log.log_id, log.generation, self.seconds, with_written=with_written)
        if with_written:
            device.waiting.add(log.log_id)
        self.seen["wanted"] += 1
        orders, placed = device.memory.take_orders(1000)
        device.hear(orders, placed)
        for one in orders:
            if isinstance(one, Clear) and charges is not None:
                owner = charges.owner(one.slot)
                assert owner is not None
                own = charges.account_of(owner) == charges.account_of(log.tenant)
                assert own or owner not in covered, (owner, log.tenant)

    def obey(self) -> None:
        """A worker obeys some of its orders, in any order."""
        device = self.random.choice(list(self.devices.values()))
        for _ in range(self.random.randrange(1, 16)):
            if not device.orders:
                return
            order = device.orders.pop(self.random.randrange(len(device.orders)))
            device.memory.done(order.order_id, self.carry_out(device, order), self.seconds)
            device.receive()

    def carry_out(self, device: Device, order: DeviceOrder) -> DeviceOutcome:
        """The bytes of one order; now and then a copy fails."""
        match order:
            case Load(row=row, slot=slot):
                page = self.host[row.page]
                assert self.store.core.pool.is_held(row.page, row.page_generation)
                if self.random.randrange(10) == 0:
                    device.pages.clear(slot)
                    self.seen["failed"] += 1
                    return self.random.choice([DeviceOutcome.FAILED, DeviceOutcome.DAMAGED])
                device.pages.load(slot, page.data)
                device.slot_of[row.page, row.page_generation] = slot
                self.seen["loaded"] += 1
            case Reserve(slot=slot, page=page_number, page_generation=generation):
                device.slot_of[page_number, generation] = slot
                self.seen["reserved"] += 1
            case Clear(slot=slot, page=page_number, page_generation=generation):
                device.slot_of.pop((page_number, generation), None)
                device.pages.clear(slot)
                self.seen["cleared"] += 1
        return DeviceOutcome.DONE

    def take(self) -> None:
        """Another worker, or the same one again, becomes the writer."""
        model = self.random.choice(self.models) if self.models else None
        if model is None or model.log_id not in self.store.core.logs:
            return
        writer = self.random.choice([PREFILL, DECODE])
        log = self.store.core.logs[model.log_id]
        if log.phase is Phase.DECODE:
            self.store.home.take(
                log.log_id, log.generation, writer, TORCH_F32, pages=1, now_s=self.seconds
            )
            self.do_work()
            self.models.append(WorkerModel(self.store, log.log_id, writer))

    def end(self) -> None:
        """A log ends, or a worker dies."""
        if self.random.randrange(12) == 0:
            writer = self.random.choice([PREFILL, DECODE])
            self.store.keeper.worker_gone(writer.slot, NOW.wall_s)
            self.hello(writer)
            self.seen["died"] += 1
        elif self.models:
            model = self.random.choice(self.models)
            if model.log_id in self.store.core.logs:
                is_dropped = self.random.randrange(2) == 0
                self.store.keeper.close(model.log_id, is_dropped=is_dropped, wall_s=NOW.wall_s)

    def squeeze(self) -> None:
        """The host runs out of pages: KV is evicted there, and with it the copies."""
        pool = self.store.core.pool
        self.store.keeper.make_room(min(PAGES, pool.free_count + self.random.randrange(1, 20)))

    def turn(self) -> None:
        """What the clock does."""
        self.tier.turn(self.seconds)

    def fail(self) -> None:
        """A report of an order that is not under way changes nothing."""
        device = self.random.choice(list(self.devices.values()))
        with pytest.raises(ServiceError) as caught:
            device.memory.done(1 << 60, DeviceOutcome.DONE, self.seconds)
        assert caught.value.reason is Reason.INVALID_REQUEST

    def written_log(self) -> WorkerModel | None:
        """Some log that its model writes."""
        found = [model for model in self.models if self.is_writing(model)]
        return self.random.choice(found) if found else None

    def is_writing(self, model: WorkerModel) -> bool:
        """Whether the model's worker is the log's writer now."""
        log = self.store.core.logs.get(model.log_id)
        is_current = log is not None and log.generation == model.generation
        return is_current and log is not None and log.writer == model.writer

    # --- the arena --------------------------------------------------------------------------

    def do_work(self) -> None:
        """Zeroes and copies as the page worker would; CRCs are made up as everywhere here."""
        core = self.store.core
        core.drain_freed()
        work = list(core.work)
        fill = [item for item in work if isinstance(item, FillPage)]
        for item in work:
            if isinstance(item, ZeroPages):
                self.host[list(item.pages)] = 0
            elif isinstance(item, FillPage):
                target = page_view(GEOMETRY, self.host[item.target.page])
                for source in item.sources:
                    view = page_view(GEOMETRY, self.host[source.row.page])
                    copy_slots(view, source.first_slot, target, source.first_slot, source.tokens)
        fill_work(self.store)
        assert all(item.target.crc is not None or item.target.slot_crcs for item in fill)

    # --- what holds -------------------------------------------------------------------------

    def check(self) -> None:
        """Invariants, bytes, quotas, pins."""
        core = self.store.core
        core.check_invariants()
        self.tier.check_invariants()
        committed = self.committed_slots()
        for device in self.devices.values():
            for free in device.memory.pool.free_pages():
                assert not any(device.pages.read(free)), "a free slot has bytes"
            for page, tokens in committed.items():
                number = device.memory.slot_of(page, core.pool.generation(page))
                if number is not None:
                    self.check_bytes(device, number, page, tokens)
        if self.book is not None:
            for charges in self.book.tiers():
                if charges.tier is Tier.DEVICE:
                    assert charges.used("red") <= 6
                    assert charges.used("blue") <= 4

    def committed_slots(self) -> dict[int, dict[int, float]]:
        """KV by token slot of every page that a log refers to."""
        found: dict[int, dict[int, float]] = {}
        for log in self.store.core.logs.values():
            for block, row in enumerate(log.rows):
                first = block * BLOCK
                tokens = [log.tokens[first + slot] for slot in range(row.tokens)]
                values = {slot: kv_of(token, first + slot) for slot, token in enumerate(tokens)}
                found.setdefault(row.page, {}).update(values)
        return found

    def check_bytes(self, device: Device, slot: int, page: int, kv: dict[int, float]) -> None:
        """The device, the host and the history say the same."""
        self.seen["compared"] += 1
        view = page_view(GEOMETRY, device.pages.memory(slot))
        host = page_view(GEOMETRY, self.host[page])
        for index, value in kv.items():
            assert float(view.k[0, 0, index, 0]) == value
            assert float(host.k[0, 0, index, 0]) == value
            assert float(view.v[0, 0, index, 1]) == -value
