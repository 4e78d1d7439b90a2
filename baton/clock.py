"""Time, as a thing that is passed in.

Owns the `Clock` protocols and the real clock. Durations come from one process's monotonic clock;
wall time only ends TTLs and capabilities, it never gives ownership. Tests use
`baton.testing.clock.ManualClock`.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Two readings, both in seconds."""

    def monotonic_s(self) -> float:
        """Seconds from an arbitrary start in this process; never goes back."""
        ...

    def wall_s(self) -> float:
        """Seconds since the Unix epoch; may jump."""
        ...


class WaitingClock(Clock, Protocol):
    """A clock that can also wait for an event, at most some time."""

    async def wait(self, event: asyncio.Event, timeout_s: float) -> bool:
        """True as soon as `event` is set, False once `timeout_s` seconds of this clock have
        passed.
        """
        ...


class SystemClock:
    """The machine's clocks."""

    __slots__ = ()

    def monotonic_s(self) -> float:
        """Seconds of the system's monotonic clock."""
        return time.monotonic()

    def wall_s(self) -> float:
        """Seconds since the Unix epoch."""
        return time.time()

    async def wait(self, event: asyncio.Event, timeout_s: float) -> bool:
        """True as soon as `event` is set, False after `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            return False
        return True
