"""What a prefill worker exports.

Owns the metric families and their names. Never labels by tenant or request.
"""

from __future__ import annotations

from baton.errors import Reason
from baton.metrics import STAGE_SECONDS_BUCKETS, Label, Metrics


class PrefillMeasures:
    """Counters of one prefill worker."""

    def __init__(self, metrics: Metrics) -> None:
        self.pending_requests = metrics.gauge(
            "baton_prefill_pending_requests", "Prompts admitted and not yet sealed."
        )
        self.pending_tokens = metrics.gauge(
            "baton_prefill_pending_tokens", "Prompt tokens admitted and not yet computed."
        )
        self.compute_seconds = metrics.histogram(
            "baton_prefill_compute_seconds",
            "Computation of one prompt.",
            buckets=STAGE_SECONDS_BUCKETS,
        )
        self.queue_seconds = metrics.histogram(
            "baton_prefill_queue_wait_seconds",
            "From admission to the first chunk.",
            buckets=STAGE_SECONDS_BUCKETS,
        )
        self.pack_seconds = metrics.histogram(
            "baton_prefill_kv_pack_seconds",
            "Checksumming and committing of one prompt's KV.",
            buckets=STAGE_SECONDS_BUCKETS,
        )
        self.computed_tokens = metrics.counter(
            "baton_prefill_computed_tokens", "Prompt tokens computed."
        )
        self.hit_tokens = metrics.counter(
            "baton_prefill_hit_tokens", "Prompt tokens whose KV was found."
        )
        self.kv_bytes = metrics.counter("baton_prefill_kv_bytes", "Bytes of KV committed.")
        self.sealed = metrics.counter("baton_prefill_sealed", "Prompts sealed and handed off.")
        self.failures = metrics.counter(
            "baton_prefill_failures",
            "Runs that ended without a seal, by reason.",
            labels=(Label("reason", tuple(reason.value for reason in Reason)),),
        )
