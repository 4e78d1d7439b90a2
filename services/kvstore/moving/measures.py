"""What moves between kvstores cost, as metrics.

Owns the families' names. Queue, transfer and verification are apart, so that a slow link, a full
store and a slow checksum look different.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from baton.errors import Reason
from baton.metrics import Metrics
from baton.metrics_families import OK
from baton.metrics_table import counter, gauge, histogram
from services.kvstore.moving.arrival import Arrivals
from services.kvstore.moving.departure import Departures
from services.kvstore.moving.transport import Choice, Waits

SOURCE: Final = "remote"
TARGET: Final = "local"


@dataclass(slots=True, kw_only=True)
class MoveTimes:
    """One move at the new home; seconds and bytes. `hidden_bytes` were here before it began."""

    transport: str = ""
    transport_reason: str = ""
    queue_s: float = 0.0
    transfer_s: float = 0.0
    verify_s: float = 0.0
    registration_s: float = 0.0
    sync_s: float = 0.0
    total_s: float = 0.0
    transfer_bytes: int = 0
    hidden_bytes: int = 0
    fetched_bytes: int = 0

    @property
    def hidden_share(self) -> float:
        """The part of the bytes that prefill's time hid; 1 when there was nothing to copy."""
        return self.hidden_bytes / self.transfer_bytes if self.transfer_bytes else 1.0


class MoveMeasures:
    """The families of moves in one kvstore."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._moves = counter(metrics, "baton_kvstore_moves")
        self._seconds = histogram(metrics, "baton_kvstore_move_seconds")
        self._verify = histogram(metrics, "baton_kvstore_move_verify_seconds")
        self._share = histogram(metrics, "baton_kvstore_move_hidden_transfer_share")
        self._transfer = histogram(metrics, "baton_transfer_seconds")
        self._queue = histogram(metrics, "baton_transfer_queue_seconds")
        self._bytes = counter(metrics, "baton_transfer_bytes")
        self._bandwidth = gauge(metrics, "baton_transfer_bytes_per_second")
        self._retries = counter(metrics, "baton_transfer_retries")
        self._damaged = counter(metrics, "baton_transfer_checksum_failures")
        self._registration = histogram(metrics, "baton_kvstore_transfer_registration_seconds")
        self._sync = histogram(metrics, "baton_kvstore_transfer_sync_seconds")
        self._broken = counter(metrics, "baton_kvstore_transfers_broken")
        self._choices = counter(metrics, "baton_kvstore_transport_choices")

    def follow(self, departures: Departures, arrivals: Arrivals) -> None:
        """Shows what is under way."""
        gauge(self._metrics, "baton_kvstore_moves_unconfirmed").follow(lambda: departures.waiting)
        gauge(self._metrics, "baton_kvstore_replicas").follow(lambda: len(arrivals.all()))

    def moved(self, times: MoveTimes) -> None:
        """A log has its home here now."""
        self._moves.add(outcome=OK)
        self._seconds.observe(times.total_s)
        self._verify.observe(times.verify_s)
        self._share.observe(times.hidden_share)
        self._transfer.observe(
            times.transfer_s, transport=times.transport, source=SOURCE, target=TARGET
        )
        self._queue.observe(times.queue_s, transport=times.transport, source=SOURCE, target=TARGET)

    def failed(self, reason: Reason) -> None:
        """A move ended without a new home."""
        self._moves.add(outcome=reason.value)

    def chosen(self, choice: Choice) -> None:
        """How the pages of one log come, and why so."""
        self._choices.add(transport=choice.name, why=choice.why.value)

    def waited(self, transport: str, waits: Waits) -> None:
        """What one run of pages took beside copying."""
        self._registration.observe(waits.registration_s, transport=transport)
        self._sync.observe(waits.sync_s, transport=transport)

    def fetched(self, transport: str, size_bytes: int, seconds: float) -> None:
        """One run of pages arrived, early or not."""
        self._bytes.add(size_bytes, transport=transport, source=SOURCE, target=TARGET)
        if seconds > 0.0:
            self._bandwidth.set(
                size_bytes / seconds, transport=transport, source=SOURCE, target=TARGET
            )

    def broken(self, transport: str, reason: Reason) -> None:
        """A transfer broke."""
        self._broken.add(transport=transport, reason=reason.value)

    def retried(self, transport: str) -> None:
        """A broken transfer is tried again."""
        self._retries.add(transport=transport, source=SOURCE, target=TARGET)

    def damaged(self, transport: str) -> None:
        """Pages arrived that are not what their record says."""
        self._damaged.add(transport=transport, source=SOURCE, target=TARGET)
