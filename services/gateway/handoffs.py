"""Hand-offs of sealed logs to decode workers: how many were begun, and what became of each.

Owns the conservation: handed off = received + failed + cancelled + under way. Pure counting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

HANDED_OFF: Final = "handed_off"
RECEIVED: Final = "received"
FAILED: Final = "failed"
CANCELLED: Final = "cancelled"
STATES: Final = (HANDED_OFF, RECEIVED, FAILED, CANCELLED)


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
        """The block hands a log over; if it ends before the worker took it, that failed, or was
        cancelled.
        """
        one = HandOff(self._end)
        self._counts[HANDED_OFF] += 1
        ended = FAILED
        try:
            yield one
        except asyncio.CancelledError:
            ended = CANCELLED
            raise
        finally:
            one.end(ended)

    def _end(self, state: str) -> None:
        self._counts[state] += 1


class HandOff:
    """One hand-off, which ends once."""

    def __init__(self, end: Callable[[str], None] | None = None) -> None:
        self._end = end

    def received(self) -> None:
        """The decode worker took the log."""
        self.end(RECEIVED)

    def end(self, state: str) -> None:
        """It ended so; a second end changes nothing."""
        end, self._end = self._end, None
        if end is not None:
            end(state)
