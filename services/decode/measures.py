"""What a decode worker exports.

Owns the metric families and their names, and the measured rates that heartbeats carry.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from baton.errors import Reason
from baton.metrics import Metrics
from baton.metrics_families import FINISHED
from baton.metrics_table import counter, gauge, histogram
from baton.scheduling.claims import ServiceClass
from services.decode.scheduler import Cause, SlotScheduler

RATE_WEIGHT: Final = 0.1
START_TOKENS: Final = 64.0
"""What the rate of a worker's start weighs beside the prompts that follow."""
HALF_LIFE_TOKENS: Final = 2048.0
LOCAL: Final = "local"
"""The domain of KV that never leaves this node."""


class ComputeRate:
    """Tokens a second over the last few thousand tokens: a short prompt counts as little as it is.

    Pure. Starts from a rate that was measured otherwise, 0 where there is none.
    """

    def __init__(self, tokens_per_s: float = 0.0) -> None:
        self._tokens = START_TOKENS if tokens_per_s > 0.0 else 0.0
        self._seconds = START_TOKENS / tokens_per_s if tokens_per_s > 0.0 else 0.0

    @property
    def tokens_per_s(self) -> float:
        """0 before there is anything to go by."""
        return self._tokens / self._seconds if self._seconds > 0.0 else 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """So many tokens took so long; nothing is learned of none."""
        if tokens <= 0 or seconds <= 0.0:
            return
        kept = 0.5 ** (tokens / HALF_LIFE_TOKENS)
        self._tokens = self._tokens * kept + tokens
        self._seconds = self._seconds * kept + seconds


class DecodeMeasures:
    """Counters of one decode worker."""

    def __init__(self, metrics: Metrics, prefill_rate: float = 0.0) -> None:
        """`prefill_rate`: as measured at the start; 0: not known."""
        self.kernel = gauge(metrics, "baton_decode_kernel_info")
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
        self._waiting = gauge(metrics, "baton_decode_waiting_sequences")
        self._queue_seconds = histogram(metrics, "baton_decode_queue_wait_seconds")
        self._ended = counter(metrics, "baton_decode_sequences_ended")
        self._moved_seconds = histogram(metrics, "baton_transfer_seconds")
        self._moved_queue = histogram(metrics, "baton_transfer_queue_seconds")
        self._moved_bytes = counter(metrics, "baton_transfer_bytes")
        self._moved_rate = gauge(metrics, "baton_transfer_bytes_per_second")
        self._moved_retries = counter(metrics, "baton_transfer_retries")
        self._moved_damaged = counter(metrics, "baton_transfer_checksum_failures")
        self.tpot_s = 0.0
        self.token_rate = 0.0
        self._prompt_rate = ComputeRate(prefill_rate)

    def follow_waiting(self, slots: SlotScheduler) -> None:
        """Who waits, by class."""
        for one in ServiceClass:
            self._waiting.follow(partial(_waiting, slots, one), **{"class": one.name.lower()})

    def admitted(self, service_class: ServiceClass, waited_s: float) -> None:
        """A sequence got its first slot."""
        self._queue_seconds.observe(waited_s, **{"class": service_class.name.lower()})

    def preempted(self, cause: Cause) -> None:
        """A sequence gave up its slot; it goes on later."""
        self._preemptions.add(cause=cause.value)

    def stepped(self, tokens: int, seconds: float) -> None:
        """A step of `tokens` sequences was acked `seconds` after the one before."""
        self.step_tokens.observe(float(tokens))
        self.output_tokens.add(tokens)
        for _ in range(tokens):
            self.token_seconds.observe(seconds)
        self.tpot_s = _moved(self.tpot_s, seconds)
        if seconds > 0.0:
            self.token_rate = _moved(self.token_rate, tokens / seconds)

    def recomputed(self, tokens: int, seconds: float) -> None:
        """KV of so many tokens that the store did not have was computed."""
        self.recomputed_tokens.add(tokens)
        self.prefilled(tokens, seconds)

    def prefilled(self, tokens: int, seconds: float) -> None:
        """So many tokens of a prompt were computed here in so many seconds of computation."""
        self._prompt_rate.add(tokens, seconds)

    @property
    def compute_rate(self) -> float:
        """Prompt tokens this worker computes a second; 0 only where nobody measured."""
        return self._prompt_rate.tokens_per_s

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


def _waiting(slots: SlotScheduler, service_class: ServiceClass) -> float:
    return float(slots.waiting_of(service_class))


def _moved(old: float, new: float) -> float:
    return new if old == 0.0 else old + RATE_WEIGHT * (new - old)
