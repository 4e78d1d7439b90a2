"""What the kvstore counts and shows.

Owns the families' names. Reads gauges from the store when the metrics are shown; never samples.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.errors import Reason
from baton.metrics import Metrics
from baton.metrics_families import DEVICE_SLOT_STATES, PAGE_STATES
from baton.metrics_table import counter, counter_following, gauge, histogram
from services.kvstore.runtime import Runtime
from services.kvstore.tiers.device import DeviceTier


class StoreMeasures:
    """The families of one kvstore."""

    def __init__(self, metrics: Metrics) -> None:
        self._appends = counter(metrics, "baton_kvstore_appends")
        self._groups = counter(metrics, "baton_kvstore_append_messages")
        self._refused = counter(metrics, "baton_kvstore_appends_refused")
        self._flush = histogram(metrics, "baton_kvstore_log_flush_seconds")
        self._blob_bytes = counter(metrics, "baton_kvstore_blob_bytes")
        self._metrics = metrics

    def appended(self, entries: int) -> None:
        """One append message."""
        self._appends.add(entries)
        self._groups.add()

    def append_refused(self, reason: Reason) -> None:
        """One entry refused."""
        self._refused.add(reason=reason.value)

    def flushed(self, seconds: float) -> None:
        """One fdatasync."""
        self._flush.observe(seconds)

    def blob_moved(self, direction: str, payload_bytes: int) -> None:
        """`in` or `out`."""
        self._blob_bytes.add(payload_bytes, direction=direction)

    def follow_devices(self, tier: DeviceTier) -> None:
        """Shows the device memory of all workers together."""
        slots = gauge(self._metrics, "baton_kvstore_device_slots")
        for state in DEVICE_SLOT_STATES:
            slots.follow(_reader(tier.count, state), state=state)
        counters: dict[str, Callable[[], int]] = {
            "device_loaded_pages": lambda: tier.loaded_pages,
            "device_cleared_pages": lambda: tier.cleared_pages,
        }
        for name, read in counters.items():
            counter_following(self._metrics, f"baton_kvstore_{name}", {"": read})

    def follow(self, runtime: Runtime, transfers_open: Callable[[], int]) -> None:
        """Shows the store's own numbers."""
        core, writer = runtime.core, runtime.writer
        pages = gauge(self._metrics, "baton_kvstore_pages")
        for state in PAGE_STATES:
            pages.follow(
                _reader(lambda name: getattr(core.pool.counts(), name), state), state=state
            )
        gauges: dict[str, Callable[[], int]] = {
            "arena_pages": lambda: core.pool.page_count,
            "logs": lambda: len(core.logs),
            "leases": lambda: len(core.leases),
            "pins": lambda: sum(core.transfers.values()),
            "transfers_open": transfers_open,
            "prefixes": lambda: len(core.prefixes),
            "index_blocks": lambda: core.tree.blocks,
            "index_tails": lambda: core.tree.tails,
            "workers": lambda: len(runtime.workers.attached()),
            "log_segments": lambda: writer.segment_count,
            "log_writable": lambda: int(writer.fault is None),
            "log_queue_bytes": lambda: writer.queue_bytes,
            "log_unflushed_bytes": lambda: writer.unflushed_bytes,
        }
        for name, read in gauges.items():
            gauge(self._metrics, f"baton_kvstore_{name}").follow(read)
        counters: dict[str, Callable[[], int]] = {
            "log_records": lambda: writer.counters.records,
            "log_groups": lambda: writer.counters.groups,
            "log_bytes": lambda: writer.counters.bytes,
            "log_poisoned_segments": lambda: writer.poisoned_segments,
            "log_refused": lambda: writer.counters.refused,
            "log_compacted": lambda: runtime.compactor.rewritten,
            "stale_writes_refused": lambda: core.stale_refused,
            "kv_evicted_logs": lambda: core.evicted_logs,
            "kv_damaged": lambda: runtime.pages.damaged_pages,
            "lookup_tokens": lambda: core.lookup_tokens,
            "hit_tokens": lambda: core.hit_tokens,
            "key_collisions": lambda: core.tree.collisions,
        }
        for name, read in counters.items():
            counter_following(self._metrics, f"baton_kvstore_{name}", {"": read})


def _reader(read: Callable[[str], int], name: str) -> Callable[[], int]:
    return lambda: read(name)
