"""The tiers of a running store: its promoter and its demoter, over its pages, disk and clock.

Owns their construction and what they show of themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from baton.clock import WaitingClock
from baton.metrics import Metrics
from baton.metrics_families import PAGE_STATES
from baton.metrics_table import counter_following, gauge, histogram
from services.kvstore.runtime import Runtime
from services.kvstore.tiers.demotion import OFF, Demoter, Watermarks
from services.kvstore.tiers.nvme_tier import NvmeTier
from services.kvstore.tiers.promotion import Abandoned, Promoter

Spawn = Callable[[str, Coroutine[Any, Any, None]], None]


def run_tiers(
    runtime: Runtime, nvme: NvmeTier, clock: WaitingClock, marks: Watermarks, spawn: Spawn
) -> Demoter:
    """Gives the runtime its promoter and demoter; the demoter's turns are the caller's."""
    placement = runtime.store.placement
    runtime.promoter = Promoter(
        placement,
        nvme.queue,
        clock,
        nvme.file.slot_bytes,
        ready=runtime.pages.ready,
        order_work=runtime.order_work,
        spawn=spawn,
    )
    runtime.demoter = Demoter(
        placement,
        runtime.core,
        nvme.queue,
        ready=runtime.pages.ready,
        order_work=runtime.order_work,
        marks=marks,
    )
    return runtime.demoter


def follow_tiers(runtime: Runtime, nvme: NvmeTier, metrics: Metrics) -> None:
    """Shows the NVMe tier's numbers."""
    promoter, demoter = runtime.promoter, runtime.demoter
    assert promoter is not None
    assert demoter is not None
    placement, slots = runtime.store.placement, nvme.slots
    states = gauge(metrics, "baton_kvstore_nvme_slots")
    for state in PAGE_STATES:
        states.follow(_reader(lambda name: getattr(slots.counts(), name), state), state=state)
    gauge(metrics, "baton_kvstore_nvme_slots_retired").follow(lambda: slots.retired_count)
    gauge(metrics, "baton_kvstore_nvme_read_bytes_per_second").follow(
        lambda: nvme.queue.read_bytes_per_s or 0.0
    )
    off = gauge(metrics, "baton_kvstore_nvme_writes_off")
    for reason in OFF:
        off.follow(_reader(lambda name: int(demoter.off == name), reason), reason=reason.value)
    size = nvme.file.slot_bytes
    counter_following(
        metrics,
        "baton_kvstore_tier_moved_bytes",
        {
            "promoted": lambda: placement.loaded_pages * size,
            "demoted": lambda: placement.copied_pages * size,
        },
    )
    counter_following(
        metrics,
        "baton_kvstore_tier_shared_pages",
        {
            "promoted": lambda: placement.rejoined_pages,
            "demoted": lambda: placement.shared_pages,
        },
    )
    counter_following(
        metrics,
        "baton_kvstore_promotions_abandoned",
        {
            reason.value: _reader(
                lambda name: promoter.counters.abandoned.get(Abandoned(name), 0), reason.value
            )
            for reason in Abandoned
        },
    )
    counter_following(
        metrics,
        "baton_kvstore_tier_hit_tokens",
        {
            "host": lambda: runtime.core.hit_tokens - runtime.core.loaded_hit_tokens,
            "nvme": lambda: runtime.core.loaded_hit_tokens,
        },
    )
    for name, read in {
        "nvme_damaged_slots": lambda: placement.damaged_slots,
        "nvme_dropped_slots": lambda: placement.room.dropped_slots,
    }.items():
        counter_following(metrics, f"baton_kvstore_{name}", {"": read})
    promoter.counters.seconds = histogram(metrics, "baton_kvstore_promotion_seconds").observe


def _reader(read: Callable[[str], int], name: str) -> Callable[[], int]:
    return lambda: read(name)
