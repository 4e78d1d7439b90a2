"""What a disk gives or takes, in bytes per second, from what it just did.

Owns one moving average. Safe from any thread. The rate is that of all calls together: while at
least one is under way the time counts, once, and the bytes of those that end count.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from baton.clock import Clock

SAMPLE_BYTES: Final = 8 << 20
SAMPLE_S: Final = 0.1
WEIGHT: Final = 0.3
"""Of the newest sample."""


class DiskRate:
    """The rate of one kind of call; None before the first one ended."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._active = 0
        self._since_s = 0.0
        self._busy_s = 0.0
        self._bytes = 0
        self.bytes_per_s: float | None = None
        self.ended_s: float | None = None

    @contextmanager
    def timing(self, byte_count: int) -> Iterator[None]:
        """Around one call. One that fails counts its time and no bytes."""
        with self._lock:
            self._count(0)
            self._active += 1
        done = 0
        try:
            yield
            done = byte_count
        finally:
            with self._lock:
                self._count(done)
                self._active -= 1
                self._sample()

    def _count(self, byte_count: int) -> None:
        now_s = self._clock.monotonic_s()
        if self._active:
            self._busy_s += now_s - self._since_s
        self._since_s = self.ended_s = now_s
        self._bytes += byte_count

    def _sample(self) -> None:
        is_enough = self._bytes >= SAMPLE_BYTES or self._busy_s >= SAMPLE_S
        if self._active and not is_enough:
            return
        if not self._busy_s or not self._bytes:
            return
        rate = self._bytes / self._busy_s
        known = self.bytes_per_s
        if known is None:
            self.bytes_per_s = rate
        else:
            # Seconds per byte are averaged: a slow sample weighs what it costs.
            share = WEIGHT * min(1.0, max(self._bytes / SAMPLE_BYTES, self._busy_s / SAMPLE_S))
            self.bytes_per_s = 1.0 / ((1.0 - share) / known + share / rate)
        self._bytes, self._busy_s = 0, 0.0
