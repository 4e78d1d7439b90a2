"""What a decode worker exports.

Owns the metric families and their names, and the measured rates that heartbeats carry.
"""

from __future__ import annotations

from typing import Final

from baton.errors import Reason
from baton.metrics import Metrics
from baton.metrics_table import FINISHED, counter, gauge, histogram

RATE_WEIGHT: Final = 0.1
LOCAL: Final = "local"
"""The domain of KV that never leaves this node."""


class DecodeMeasures:
    """Counters of one decode worker."""

    def __init__(self, metrics: Metrics) -> None:
        self.active = gauge(metrics, "baton_decode_active_sequences")
        self.reserved = gauge(metrics, "baton_decode_reserved_slots")
        self.used_pages = gauge(metrics, "baton_decode_used_pages")
        self.step_tokens = histogram(metrics, "baton_decode_step_tokens")
        self.token_seconds = histogram(metrics, "baton_inter_token_latency_seconds")
        self.transfer_seconds = histogram(metrics, "baton_decode_kv_transfer_seconds")
        self.output_tokens = counter(metrics, "baton_decode_output_tokens")
        self.recomputed_tokens = counter(metrics, "baton_decode_recomputed_tokens")
        self.received = counter(metrics, "baton_decode_received")
        self.cancel_reclaims = counter(metrics, "baton_decode_cancel_reclaims")
        self._preemptions = counter(metrics, "baton_decode_preemptions")
        self._ended = counter(metrics, "baton_decode_sequences_ended")
        self._moved_seconds = histogram(metrics, "baton_transfer_seconds")
        self._moved_queue = histogram(metrics, "baton_transfer_queue_seconds")
        self._moved_bytes = counter(metrics, "baton_transfer_bytes")
        self._moved_rate = gauge(metrics, "baton_transfer_bytes_per_second")
        self._moved_retries = counter(metrics, "baton_transfer_retries")
        self._moved_damaged = counter(metrics, "baton_transfer_checksum_failures")
        self.tpot_s = 0.0
        self.token_rate = 0.0

    def stepped(self, tokens: int, seconds: float) -> None:
        """A step of `tokens` sequences was acked `seconds` after the one before."""
        self.step_tokens.observe(float(tokens))
        self.output_tokens.add(tokens)
        for _ in range(tokens):
            self.token_seconds.observe(seconds)
        self.tpot_s = _moved(self.tpot_s, seconds)
        if seconds > 0.0:
            self.token_rate = _moved(self.token_rate, tokens / seconds)

    def transferred(self, transport: str, queue_s: float, seconds: float, size_bytes: int) -> None:
        """KV of a log came here: after so long a wait, within so long, so many bytes."""
        named = {"transport": transport, "source": LOCAL, "target": LOCAL}
        self.transfer_seconds.observe(seconds)
        self._moved_queue.observe(queue_s, **named)
        self._moved_seconds.observe(seconds, **named)
        self._moved_bytes.add(size_bytes, **named)
        if seconds > 0.0:
            self._moved_rate.set(size_bytes / seconds, **named)

    def transfer_failed(self, transport: str, reason: Reason) -> None:
        """It did not come; what did not verify is counted apart from what is tried again."""
        named = {"transport": transport, "source": LOCAL, "target": LOCAL}
        is_damage = reason in (Reason.CHECKSUM_MISMATCH, Reason.LOG_CORRUPT)
        (self._moved_damaged if is_damage else self._moved_retries).add(1.0, **named)

    def ended(self, reason: Reason | None) -> None:
        """A sequence is over; None: it finished."""
        self._ended.add(outcome=FINISHED if reason is None else reason.value)
        if reason is Reason.PAGES_EXHAUSTED:
            self._preemptions.add()


def _moved(old: float, new: float) -> float:
    return new if old == 0.0 else old + RATE_WEIGHT * (new - old)
