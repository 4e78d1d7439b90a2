"""What the gateway's metrics say of its Redis.

Owns the families; they are there, at 0, where no Redis is configured. Never talks to Redis.
"""

from __future__ import annotations

from typing import Final

from baton.metrics import Metrics
from baton.metrics_families import REDIS_ASK_OUTCOMES
from baton.metrics_table import counter, gauge, histogram

ANSWERED: Final = "answered"
LATE: Final = "late"
AWAY: Final = "away"
assert set(REDIS_ASK_OUTCOMES) == {ANSWERED, LATE, AWAY}


class RedisMeasures:
    """Counts of one link."""

    def __init__(self, metrics: Metrics) -> None:
        self._up = gauge(metrics, "baton_redis_up")
        self._asks = counter(metrics, "baton_redis_asks")
        self._seconds = histogram(metrics, "baton_redis_ask_seconds")
        self._losses = counter(metrics, "baton_redis_connections_lost")
        self._refusals = counter(metrics, "baton_redis_refusals")
        self._drops = counter(metrics, "baton_redis_posts_dropped")
        self._up.set(0.0)

    def asked(self, outcome: str, seconds: float) -> None:
        """A request asked: answered in time, too late for it, or not asked at all."""
        self._asks.add(outcome=outcome)
        if outcome != AWAY:
            self._seconds.observe(seconds)

    def dropped(self) -> None:
        """Something to be written was not: the queue was full or Redis away."""
        self._drops.add()

    def refused(self) -> None:
        """Redis refused a command: full, read-only, or not allowed."""
        self._refusals.add()

    def came_up(self) -> None:
        """Connected."""
        self._up.set(1.0)

    def went_down(self, *, was_up: bool) -> None:
        """Not connected; `was_up`: a connection was lost just now."""
        self._up.set(0.0)
        if was_up:
            self._losses.add()
