"""A clock that only moves when the test says so.

Owns `ManualClock`; never sleeps and never reads the machine's time.
"""

from __future__ import annotations

import asyncio


class ManualClock:
    """Implements `baton.clock.Clock` and `WaitingClock`; `advance` is the only way time passes."""

    def __init__(self, *, monotonic_s: float = 1_000.0, wall_s: float = 1_700_000_000.0) -> None:
        self._monotonic_s = monotonic_s
        self._wall_s = wall_s
        self._sleepers: list[tuple[float, asyncio.Event]] = []
        self._wait_begun = asyncio.Event()

    def monotonic_s(self) -> float:
        """Seconds since the start given to the constructor plus every advance."""
        return self._monotonic_s

    def wall_s(self) -> float:
        """Seconds since the Unix epoch, as advanced and set."""
        return self._wall_s

    def advance(self, seconds: float) -> None:
        """Moves both readings forward and wakes the waits that are due."""
        assert seconds >= 0.0, seconds
        self._monotonic_s += seconds
        self._wall_s += seconds
        for due_s, due in self._sleepers:
            if due_s <= self._monotonic_s:
                due.set()

    def jump_wall(self, seconds: float) -> None:
        """Moves the wall clock alone, as an operator or NTP would; may be negative."""
        self._wall_s += seconds

    @property
    def waiting(self) -> int:
        """How many waits are pending."""
        return len(self._sleepers)

    async def until_waiting(self, count: int = 1) -> None:
        """Returns once at least `count` waits are pending: then an advance will meet them."""
        while len(self._sleepers) < count:
            self._wait_begun.clear()
            await self._wait_begun.wait()

    async def wait(self, event: asyncio.Event, timeout_s: float) -> bool:
        """True as soon as `event` is set, False once the clock was advanced by `timeout_s`."""
        if event.is_set():
            return True
        if timeout_s <= 0.0:
            return False
        sleeper = (self._monotonic_s + timeout_s, asyncio.Event())
        self._sleepers.append(sleeper)
        self._wait_begun.set()
        try:
            await _first_of(event, sleeper[1])
        finally:
            self._sleepers.remove(sleeper)
        return event.is_set()


async def _first_of(one: asyncio.Event, other: asyncio.Event) -> None:
    """Returns when either event is set; leaves no task behind, also when cancelled."""
    async with asyncio.TaskGroup() as group:
        waits = [group.create_task(one.wait()), group.create_task(other.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
