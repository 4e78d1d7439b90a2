"""The registry with a bell: who waits for a worker wakes when one is heard.

Owns the shared registry of this process and its expiry. Decisions stand in `registry` and `router`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from baton.clock import WaitingClock
from services.gateway.registry import Registry, WorkerRecord, WorkerRole, WorkerStatus

_Found = TypeVar("_Found")


class WorkerHub:
    """What the gateway's parts ask about workers."""

    def __init__(self, registry: Registry, clock: WaitingClock) -> None:
        self._registry = registry
        self._clock = clock
        self._changed = asyncio.Event()
        self._listeners: list[Callable[[WorkerRecord], None]] = []

    @property
    def dead_after_s(self) -> float:
        """Silence after which a worker counts as dead."""
        return self._registry.dead_after_s

    def observe(self, record: WorkerRecord) -> bool:
        """Take a heartbeat; False when it was ignored."""
        is_taken = self._registry.observe(record, self._clock.monotonic_s())
        self._changed.set()
        self._changed = asyncio.Event()
        if is_taken:
            for listener in self._listeners:
                listener(record)
        return is_taken

    def on_heard(self, listener: Callable[[WorkerRecord], None]) -> None:
        """Call `listener` with each record taken; it must return at once."""
        self._listeners.append(listener)

    def doubt(self, worker: WorkerRecord) -> None:
        """A connection to this run of a worker broke or was refused."""
        self._registry.doubt(worker.worker_id, worker.incarnation, self._clock.monotonic_s())

    def is_doubting(self) -> bool:
        """Whether some worker is only in doubt."""
        return self._registry.is_doubting(self._clock.monotonic_s())

    def hint(self, record: WorkerRecord) -> bool:
        """Note a worker that another gateway heard; False when it is known already."""
        return self._registry.hint(record, self._clock.monotonic_s())

    def is_hint(self, worker_id: str) -> bool:
        """Whether all that is known of a worker is a hint."""
        return self._registry.is_hint(worker_id)

    def expire(self) -> tuple[WorkerRecord, ...]:
        """Drop the workers that were silent for a lease."""
        return self._registry.expire(self._clock.monotonic_s())

    def get(self, worker_id: str) -> WorkerRecord | None:
        """The last record of a worker."""
        return self._registry.get(worker_id)

    def routable(self, role: WorkerRole) -> tuple[WorkerRecord, ...]:
        """Workers of a role that get new work."""
        return self._registry.routable(role, self._clock.monotonic_s())

    def statuses(self) -> tuple[WorkerStatus, ...]:
        """Every known worker."""
        return self._registry.statuses(self._clock.monotonic_s())

    def is_alive(self, worker_id: str, incarnation: int) -> bool:
        """Whether exactly this run of the worker was heard lately."""
        return self._registry.is_alive(worker_id, incarnation, self._clock.monotonic_s())

    def heard_s(self, worker_id: str, incarnation: int) -> float | None:
        """When exactly this run of the worker was heard last; None if it is not known."""
        return self._registry.heard_s(worker_id, incarnation)

    async def until(self, find: Callable[[], _Found | None], timeout_s: float) -> _Found | None:
        """What `find` returns, tried now and at each heartbeat; None when the time is up."""
        end_s = self._clock.monotonic_s() + timeout_s
        while True:
            changed = self._changed
            found = find()
            left_s = end_s - self._clock.monotonic_s()
            if found is not None or left_s <= 0.0:
                return found
            await self._clock.wait(changed, left_s)
