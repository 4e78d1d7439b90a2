"""An event loop in which time passes only when nothing else can happen.

Owns `SimulatedLoop` and its clock: everything that asyncio does is real, but a wait of seconds
takes none, and the same seed always gives the same run. No sockets, no threads.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from typing import Final

START_S: Final = 1_000.0
WALL_OFFSET_S: Final = 1_700_000_000.0


class _WarpSelector(selectors.SelectSelector):
    """Instead of waiting it moves the loop's time."""

    def __init__(self, warp: Callable[[float], None]) -> None:
        super().__init__()
        self._warp = warp

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events:
            assert timeout is not None, "every task waits for another: nothing can happen any more"
            self._warp(max(timeout, 0.0))
        return events


class SimulatedLoop(asyncio.SelectorEventLoop):
    """See the module."""

    def __init__(self) -> None:
        self._now_s = START_S
        super().__init__(_WarpSelector(self._advance))

    def time(self) -> float:
        """Simulated seconds."""
        return self._now_s

    def _advance(self, seconds: float) -> None:
        self._now_s += seconds


class LoopClock:
    """Implements `baton.clock.Clock` and `WaitingClock` by the running loop's time."""

    def monotonic_s(self) -> float:
        """The loop's time."""
        return asyncio.get_running_loop().time()

    def wall_s(self) -> float:
        """The same time as a date."""
        return WALL_OFFSET_S + self.monotonic_s()

    async def wait(self, event: asyncio.Event, timeout_s: float) -> bool:
        """True as soon as `event` is set, False after `timeout_s`."""
        if event.is_set():
            return True
        if timeout_s <= 0.0:
            return False
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            return event.is_set()
        return True

    async def pass_(self, seconds: float) -> None:
        """Nothing but time."""
        await self.wait(asyncio.Event(), seconds)
