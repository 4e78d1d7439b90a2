"""The device tier: what stands in a worker's device memory stands in the host arena, byte for byte.

Random lives of two workers with real bytes: promotion, demotion, appends that are written through,
dead workers, orders obeyed late and in any order. Accounting is exact after every step.
"""

from __future__ import annotations

import random

import pytest

from baton.errors import Reason, ServiceError
from baton.kv.layout import page_view
from services.kvstore.pages import PageState
from services.kvstore.quotas import QuotaPlan, Tier
from services.kvstore.state import LogState
from services.kvstore.tiers.device_orders import (
    DeviceOutcome,
    Placed,
)
from tests.unit.kvstore.cores import (
    BLOCK,
    DECODE,
    NOW,
    PREFILL,
)
from tests.unit.kvstore.device_node import (
    GEOMETRY,
    PAGE,
    SLOTS,
    Device,
    Node,
    kv_of,
)

SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.more) for seed in range(2, 5))]


@pytest.mark.parametrize("seed", SEEDS)
def test_device_memory_is_a_copy_of_the_host_whatever_happens(seed: int) -> None:
    """Every committed slot of a page in device memory has the bytes of its token, there and in the
    arena; free slots are zero; conservation, pins and holders are exact after every step.
    """
    node = Node(seed)
    for _ in range(400):
        node.step()
    for what in ("loaded", "reserved", "cleared", "computed in device memory"):
        assert node.seen[what] > 0, (what, node.seen)
    assert node.seen["compared"] > 100


@pytest.mark.parametrize("seed", SEEDS)
def test_device_memory_is_held_to_quotas(seed: int) -> None:
    """Named tenants have so many slots of each worker and no more; a want takes none of a tenant
    that is within its quota.
    """
    quotas = QuotaPlan(
        tenants={"red": {Tier.DEVICE: 6 * PAGE}, "blue": {Tier.DEVICE: 4 * PAGE}},
    )
    node = Node(100 + seed, quotas)
    for _ in range(300):
        node.step()
    assert node.seen["loaded"] > 0
    assert node.seen["cleared"] > 0


def kept_by(node: Node, tenant: str, blocks: int) -> LogState:
    """A log that prefill writes, all of it wanted and loaded."""
    model = node.open_for(tenant, [len(node.models) + 1] * (blocks * BLOCK))
    node.compute(model, 0, blocks * BLOCK)
    model.checkpoint(blocks * BLOCK)
    return model.log


def obey_all(node: Node, device: Device) -> list[Placed]:
    """Every order, until there are none; what was answered."""
    device.receive()
    while device.orders:
        order = device.orders.pop(0)
        outcome = node.carry_out(device, order)
        device.memory.done(order.order_id, outcome, node.seconds)
        device.receive()
    node.check()
    placed, device.placed = device.placed, []
    return placed


class Steady(random.Random):
    """Nothing fails by chance."""

    # Fewer parameters than the original: any call is answered alike.
    def randrange(self, *_args: object) -> int:  # type: ignore[override]
        """Never 0."""
        return 1


def steady_node() -> tuple[Node, Device]:
    """A node where no copy fails, and prefill's device."""
    node = Node(0)
    node.random = Steady()
    return node, node.devices[PREFILL.worker_id]


def want(node: Node, device: Device, log: LogState) -> None:
    """The full pages of a log."""
    device.memory.want(log.log_id, log.generation, node.seconds, with_written=False)


def test_the_least_recently_used_goes_first_and_written_logs_stay() -> None:
    """Room for a third log comes from the one whose writer ended first; a fourth that finds all
    pinned is told how much is missing, and goes on from the host.
    """
    node, device = steady_node()
    logs = [kept_by(node, "grey", 5) for _ in range(2)]
    for log in logs:
        want(node, device, log)
    assert [(one.pages, one.missing) for one in obey_all(node, device)] == [(5, 0), (5, 0)]
    for log in logs:
        node.seconds += 1
        node.store.keeper.raise_generation(log)
        device.memory.turn(node.seconds)
    third = kept_by(node, "grey", 7)
    want(node, device, third)
    assert [(one.pages, one.missing) for one in obey_all(node, device)] == [(7, 0)]

    def resident(log: LogState) -> int:
        rows = [device.memory.slot_of(row.page, row.page_generation) for row in log.rows]
        return sum(number is not None for number in rows)

    assert [resident(log) for log in (*logs, third)] == [2, 5, 7]
    fourth = kept_by(node, "grey", 9)
    want(node, device, fourth)
    assert [(one.pages, one.missing) for one in obey_all(node, device)] == [(7, 2)]
    assert [resident(log) for log in (*logs, third, fourth)] == [0, 0, 7, 7]


def test_a_page_that_is_being_copied_is_not_reused() -> None:
    """Its log goes while the copy is under way: the page stays until the worker says it is done,
    then the slot is cleared.
    """
    node, device = steady_node()
    log = kept_by(node, "grey", 1)
    want(node, device, log)
    device.receive()
    page = log.rows[0].page
    node.store.keeper.close(log.log_id, is_dropped=True, wall_s=NOW.wall_s)
    node.store.keeper.worker_gone(PREFILL.slot, NOW.wall_s)
    assert node.store.core.pool.state(page) is PageState.HELD
    (order,) = device.orders
    device.orders.clear()
    device.memory.done(order.order_id, node.carry_out(device, order), node.seconds)
    assert node.store.core.pool.state(page) is PageState.FREE
    assert device.memory.counts().clearing == 1
    obey_all(node, device)
    assert device.memory.counts().free == SLOTS


def test_a_worker_that_is_gone_leaves_nothing_and_loses_nothing() -> None:
    """Its copies are forgotten, also those under way; the log's KV stands in the host."""
    node, device = steady_node()
    log = kept_by(node, "grey", 3)
    want(node, device, log)
    node.store.keeper.worker_gone(PREFILL.slot, NOW.wall_s)
    node.tier.gone(PREFILL.worker_id)
    node.store.core.check_invariants()
    assert not node.store.core.transfers
    assert node.tier.find(PREFILL.worker_id) is None
    assert log.committed == 3 * BLOCK
    values = page_view(GEOMETRY, node.host[log.rows[2].page]).k[0, 0, :, 0].tolist()
    assert values == [kv_of(log.tokens[0], 2 * BLOCK + slot) for slot in range(BLOCK)]


def test_only_the_writer_wants_a_log() -> None:
    """STALE_GENERATION for another worker, and for a generation that is over."""
    node, device = steady_node()
    log = kept_by(node, "grey", 1)
    other = node.devices[DECODE.worker_id]
    for memory, generation in ((other.memory, log.generation), (device.memory, 7)):
        with pytest.raises(ServiceError) as caught:
            memory.want(log.log_id, generation, node.seconds, with_written=False)
        assert caught.value.reason is Reason.STALE_GENERATION


def test_damage_found_while_copying_is_told() -> None:
    """The row of the damaged page; its slot is free again, the want is answered without it."""
    node, device = steady_node()
    log = kept_by(node, "grey", 2)
    want(node, device, log)
    device.receive()
    first, second = device.orders
    device.memory.done(first.order_id, DeviceOutcome.DAMAGED, node.seconds)
    device.orders = [second]
    assert [(one.pages, one.missing) for one in obey_all(node, device)] == [(1, 1)]
    assert [row.page for row in node.tier.take_damaged()] == [log.rows[0].page]
    assert node.tier.take_damaged() == []
    assert device.memory.counts().free == SLOTS - 1


def test_some_slots_are_kept_free() -> None:
    """Below the low watermark idle slots are cleared until the high one is reached."""
    node, device = steady_node()
    log = kept_by(node, "grey", SLOTS)
    want(node, device, log)
    obey_all(node, device)
    assert device.memory.counts().free == 0
    node.store.keeper.raise_generation(log)
    device.memory.turn(node.seconds)
    obey_all(node, device)
    assert device.memory.counts().free == 1


def test_sizes_that_do_not_do_are_refused() -> None:
    """No slots, slots smaller than pages, quotas over the device."""
    node = Node(0, QuotaPlan(tenants={"red": {Tier.DEVICE: 9 * PAGE}}))
    for slots, slot_bytes, field in (
        (0, PAGE, "hello.slots"),
        (5, PAGE - 1, "hello.slot_bytes"),
        (5, PAGE, "hello.slots"),
    ):
        with pytest.raises(ServiceError) as caught:
            node.tier.hello(PREFILL, slots, slot_bytes, PAGE)
        assert caught.value.field == field
