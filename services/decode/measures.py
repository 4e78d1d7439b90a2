"""What a decode worker exports.

Owns the metric families and their names, and the measured rates that heartbeats carry.
"""

from __future__ import annotations

from typing import Final

from baton.errors import Reason
from baton.metrics import STAGE_SECONDS_BUCKETS, TIME_PER_OUTPUT_TOKEN_BUCKETS, Label, Metrics

RATE_WEIGHT: Final = 0.1
_STEP_BUCKETS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)


class DecodeMeasures:
    """Counters of one decode worker."""

    def __init__(self, metrics: Metrics) -> None:
        self.active = metrics.gauge("baton_decode_active_sequences", "Sequences that hold a slot.")
        self.used_pages = metrics.gauge(
            "baton_decode_used_pages", "Pages in the page tables of running sequences."
        )
        self.step_tokens = metrics.histogram(
            "baton_decode_step_tokens", "Tokens of one step.", buckets=_STEP_BUCKETS
        )
        self.tpot_seconds = metrics.histogram(
            "baton_time_per_output_token_seconds",
            "From one step's ack to the next, per sequence.",
            buckets=TIME_PER_OUTPUT_TOKEN_BUCKETS,
        )
        self.transfer_seconds = metrics.histogram(
            "baton_decode_kv_transfer_seconds",
            "From the hand-off's command to its page table.",
            buckets=STAGE_SECONDS_BUCKETS,
        )
        self.output_tokens = metrics.counter("baton_decode_output_tokens", "Tokens acked.")
        self.recomputed_tokens = metrics.counter(
            "baton_decode_recomputed_tokens", "Tokens whose KV was computed again after a loss."
        )
        self.received = metrics.counter("baton_decode_received", "Sequences that joined.")
        self.cancel_reclaims = metrics.counter(
            "baton_decode_cancel_reclaims", "Sequences ended by a cancel, their slot free again."
        )
        self.ended = metrics.counter(
            "baton_decode_sequences_ended",
            "Sequences that ended, by outcome.",
            labels=(Label("outcome", ("finished", *(reason.value for reason in Reason))),),
        )
        self.tpot_s = 0.0
        self.token_rate = 0.0

    def stepped(self, tokens: int, seconds: float) -> None:
        """A step of `tokens` sequences was acked `seconds` after the one before."""
        self.step_tokens.observe(float(tokens))
        self.output_tokens.add(tokens)
        for _ in range(tokens):
            self.tpot_seconds.observe(seconds)
        self.tpot_s = _moved(self.tpot_s, seconds)
        if seconds > 0.0:
            self.token_rate = _moved(self.token_rate, tokens / seconds)


def _moved(old: float, new: float) -> float:
    return new if old == 0.0 else old + RATE_WEIGHT * (new - old)
