"""Hand-offs of sealed logs to decode workers: how many were begun, and what became of each.

Owns the conservation: handed off = received + failed + cancelled + under way. Pure counting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

HANDED_OFF: Final = "handed_off"
RECEIVED: Final = "received"
FAILED: Final = "failed"
CANCELLED: Final = "cancelled"
STATES: Final = (HANDED_OFF, RECEIVED, FAILED, CANCELLED)


class HandOff:
    """One hand-off under way."""

    def __init__(self) -> None:
        self.is_received = False

    def received(self) -> None:
        """The decode worker took the log."""
        self.is_received = True


class HandOffs:
    """All hand-offs of this gateway."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(STATES, 0)

    def count(self, state: str) -> int:
        """How many reached one of `STATES`."""
        return self._counts[state]

    @property
    def in_flight(self) -> int:
        """Begun and not ended."""
        return 2 * self._counts[HANDED_OFF] - sum(self._counts.values())

    @contextmanager
    def begun(self) -> Iterator[HandOff]:
        """The block hands a log over and stays until the sequence has left the worker.

        A hand-off that was received is counted once its block ends, whatever came after.
        """
        self._counts[HANDED_OFF] += 1
        one, ended = HandOff(), FAILED
        try:
            yield one
        except asyncio.CancelledError:
            ended = CANCELLED
            raise
        finally:
            self._counts[RECEIVED if one.is_received else ended] += 1
