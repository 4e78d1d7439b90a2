"""What is left to do when a log's work ends, done behind the client's back but never forgotten.

Owns the fence-and-stop of an early end and the close of a regular one. Each call has a deadline;
the tasks belong to the service. Never raises towards the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

import structlog

from baton.clock import SystemClock, WaitingClock
from baton.errors import Reason, ServiceError
from services.gateway.clients import DecodeClient, PrefillClient, StoreClient
from services.gateway.legs import Leg

_log = structlog.stdlib.get_logger("baton.gateway.cleanup")

Spawn = Callable[[str, Coroutine[Any, Any, None]], None]

STOP_WAIT_S: Final = 4.0
CLOSE_TRIES_MAX: Final = 6
CLOSE_PAUSE_S: Final = 0.5

_SILENT: Final = frozenset({Reason.WORKER_LOST, Reason.DEADLINE_EXCEEDED, Reason.DRAINING})

_ENDED_ALREADY: Final = frozenset({Reason.LOG_NOT_FOUND, Reason.NOT_FOUND, Reason.UNSUPPORTED})


class Cleanup:
    """Ends logs in the background."""

    def __init__(
        self,
        stores: StoreClient,
        prefills: PrefillClient,
        decodes: DecodeClient,
        spawn: Spawn,
        clock: WaitingClock | None = None,
    ) -> None:
        self._stores = stores
        self._prefills = prefills
        self._decodes = decodes
        self._spawn = spawn
        self._clock = clock or SystemClock()
        self._pending = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    async def start(self) -> None:
        """Nothing: work comes when logs end."""

    async def drain(self) -> None:
        """Returns when every ended log is closed."""
        await self._is_idle.wait()

    async def stop(self) -> None:
        """Gives what is left a last moment; each call has its own deadline."""
        try:
            async with asyncio.timeout(STOP_WAIT_S):
                await self._is_idle.wait()
        except TimeoutError:
            _log.warning("clean_up_left", pending=self._pending)

    @property
    def pending(self) -> int:
        """Clean-ups under way."""
        return self._pending

    def end(self, leg: Leg, *, is_complete: bool) -> None:
        """Close a log that has its answer; fence one that has not, and stop who works on it."""
        work = self._close(leg) if is_complete else self._abandon(leg)
        self._pending += 1
        self._is_idle.clear()
        self._spawn(f"end-log-{leg.request.request_id}", self._counted(work))

    async def _counted(self, work: Awaitable[None]) -> None:
        try:
            await work
        finally:
            self._pending -= 1
            if self._pending == 0:
                self._is_idle.set()

    async def _abandon(self, leg: Leg) -> None:
        """The fence first: from then on nobody writes, whatever the worker does."""
        address = leg.home
        await _tried("fence", leg, self._stores.cancel(address, leg.log_id, leg.control))
        if leg.is_running:
            request_id, control = leg.request.request_id, leg.control
            prefill = leg.plan.prefill
            if prefill is not None and not leg.is_sealed:
                stop = self._prefills.cancel(prefill, request_id, control)
            else:
                stop = self._decodes.cancel(leg.plan.decode, request_id, control)
            await _tried("stop_worker", leg, stop)
        await self._close(leg)

    async def _close(self, leg: Leg) -> None:
        if leg.is_reserved:
            # The answer ended before it came to decode: the slot is somebody else's now.
            release = self._decodes.cancel(leg.plan.decode, leg.request.request_id, leg.control)
            await _tried("release_slot", leg, release)
        await _tried("close", leg, self._close_at_last(leg))

    async def _close_at_last(self, leg: Leg) -> None:
        """Asked again for a while: a kvstore that restarts would keep the log until its time."""
        drop = leg.request.is_dropped_at_end
        for attempt in range(1, CLOSE_TRIES_MAX + 1):
            try:
                await self._stores.close(leg.home, leg.log_id, leg.control, drop=drop)
                return
            except ServiceError as error:
                if error.reason not in _SILENT or attempt == CLOSE_TRIES_MAX:
                    raise
            await self._clock.wait(asyncio.Event(), CLOSE_PAUSE_S * attempt)


async def _tried(step: str, leg: Leg, work: Awaitable[None]) -> None:
    try:
        await work
    except ServiceError as error:
        if error.reason in _ENDED_ALREADY:
            return
        _log.warning(
            "clean_up_failed",
            step=step,
            request_id=leg.request.request_id,
            reason=error.reason.value,
        )
