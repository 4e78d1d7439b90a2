"""What a prefill worker exports.

Owns the metric families and their names. Never labels by tenant or request.
"""

from __future__ import annotations

from baton.metrics import Metrics
from baton.metrics_table import counter, gauge, histogram


class PrefillMeasures:
    """Counters of one prefill worker."""

    def __init__(self, metrics: Metrics) -> None:
        self.pending_requests = gauge(metrics, "baton_prefill_pending_requests")
        self.running_requests = gauge(metrics, "baton_prefill_running_requests")
        self.waiting_requests = gauge(metrics, "baton_prefill_waiting_requests")
        self.pending_tokens = gauge(metrics, "baton_prefill_pending_tokens")
        self.compute_seconds = histogram(metrics, "baton_prefill_compute_seconds")
        self.queue_seconds = histogram(metrics, "baton_prefill_queue_wait_seconds")
        self.pack_seconds = histogram(metrics, "baton_prefill_kv_pack_seconds")
        self.computed_tokens = counter(metrics, "baton_prefill_computed_tokens")
        self.hit_tokens = counter(metrics, "baton_prefill_hit_tokens")
        self.kv_bytes = counter(metrics, "baton_prefill_kv_bytes")
        self.sealed = counter(metrics, "baton_prefill_sealed")
        self.failures = counter(metrics, "baton_prefill_failures")
