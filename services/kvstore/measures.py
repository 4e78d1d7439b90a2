"""What the kvstore counts and shows.

Owns the families' names. Reads gauges from the store when the metrics are shown; never samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from baton.errors import Reason
from baton.metrics import Label, Metrics
from services.kvstore.runtime import Runtime

FLUSH_BUCKETS: Final = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
STATES: Final = ("free", "granted", "live", "shared", "quarantined")


class StoreMeasures:
    """The families of one kvstore."""

    def __init__(self, metrics: Metrics) -> None:
        reasons = Label("reason", tuple(reason.value for reason in Reason))
        self._appends = metrics.counter("baton_kvstore_appends", "Append entries received.")
        self._groups = metrics.counter(
            "baton_kvstore_append_messages", "Append messages, one group commit each."
        )
        self._refused = metrics.counter(
            "baton_kvstore_appends_refused", "Append entries refused.", labels=(reasons,)
        )
        self._flush = metrics.histogram(
            "baton_kvstore_log_flush_seconds", "One fdatasync of the log.", buckets=FLUSH_BUCKETS
        )
        self._blob_bytes = metrics.counter(
            "baton_kvstore_blob_bytes",
            "Blob payload bytes moved.",
            labels=(Label("direction", ("in", "out")),),
        )
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

    def follow(self, runtime: Runtime) -> None:
        """Shows the store's own numbers."""
        core = runtime.core
        pages = self._metrics.gauge(
            "baton_kvstore_pages", "Arena pages by state.", labels=(Label("state", STATES),)
        )
        for state in STATES:
            pages.follow(
                _reader(lambda name: getattr(core.pool.counts(), name), state), state=state
            )
        gauges: tuple[tuple[str, str, Callable[[], int]], ...] = (
            ("logs", "Logs, open and kept.", lambda: len(core.logs)),
            ("leases", "Logs with a writer.", lambda: len(core.leases)),
            ("prefixes", "Published prefixes.", lambda: len(core.prefixes)),
            ("index_blocks", "Blocks in the prefix index.", lambda: len(core.index)),
            ("workers", "Attached workers.", lambda: len(runtime.workers.attached())),
            ("log_segments", "Segments on disk.", lambda: runtime.writer.segment_count),
            ("log_records_total", "Log records.", lambda: runtime.writer.counters.records),
            ("log_groups_total", "Group commits.", lambda: runtime.writer.counters.groups),
            ("stale_writes_refused_total", "Stale writes refused.", lambda: core.stale_refused),
            ("kv_evicted_logs_total", "Kept logs whose KV was evicted.", lambda: core.evicted_logs),
            ("kv_damaged_total", "Blocks found damaged.", lambda: runtime.pages.damaged_pages),
        )
        for name, text, read in gauges:
            self._metrics.gauge(f"baton_kvstore_{name}", text).follow(read)


def _reader(read: Callable[[str], int], name: str) -> Callable[[], int]:
    return lambda: read(name)
