"""The merger's metrics."""

from __future__ import annotations

from baton.errors import Reason
from baton.metrics import Metrics
from baton.metrics_families import OK
from baton.metrics_table import counter


class MergerMeasures:
    """Splices by outcome and bytes passed on."""

    def __init__(self, metrics: Metrics) -> None:
        self._splices = counter(metrics, "baton_splices")
        self._bytes = counter(metrics, "baton_materialised_bytes")
        self._count = 0

    @property
    def count(self) -> int:
        """Splices answered; the progress that heartbeats show."""
        return self._count

    def spliced(self, refusal: Reason | None, count: int = 1) -> None:
        """So many splices were answered alike."""
        self._count += count
        self._splices.add(count, outcome=OK if refusal is None else refusal.value)

    def passed_on(self, size_bytes: int) -> None:
        """A chunk of KV went through."""
        self._bytes.add(size_bytes)
