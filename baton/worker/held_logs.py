"""The logs this worker writes, and the renewal of their leases.

Owns the list of (log, generation) and what happens to one that was lost: its holder is told at
once, and stops. A log that is not in the list is released: naming exactly what is still being
written is how the store learns that pages are free of us.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

import structlog

from baton.arena.replay import HeldLog
from baton.errors import Reason, ServiceError
from baton.worker.threads import Progress

_log = structlog.stdlib.get_logger("baton.worker")

OnLost = Callable[[ServiceError], None]
"""Told why a log is no longer ours."""

RENEWALS_PER_LEASE: Final = 4
RENEWAL_INTERVAL_MAX_S: Final = 1.0


class LeaseRenewer(Protocol):
    """The one call of `KVStoreClient` that renewal needs."""

    async def renew_leases(
        self, incarnation: int, logs: Sequence[HeldLog], progress: int
    ) -> frozenset[bytes]:
        """Keep logs owned; the ids of those lost."""
        ...


class HeldLogs:
    """What is being written now. Used from the event loop only."""

    def __init__(self) -> None:
        self._held: dict[bytes, tuple[HeldLog, OnLost]] = {}
        self._none_left = asyncio.Event()
        self._none_left.set()

    def __len__(self) -> int:
        return len(self._held)

    def add(self, log: HeldLog, on_lost: OnLost) -> None:
        """Hold `log`; `on_lost` is called once if the store says it is no longer ours."""
        self._held[log.log_id] = (log, on_lost)
        self._none_left.clear()

    def discard(self, log: HeldLog) -> None:
        """Let go of `log`; a newer holding of the same log stays."""
        held = self._held.get(log.log_id)
        if held is not None and held[0].generation <= log.generation:
            del self._held[log.log_id]
        if not self._held:
            self._none_left.set()

    @contextmanager
    def holding(self, log: HeldLog, on_lost: OnLost) -> Iterator[None]:
        """Hold `log` for the block."""
        self.add(log, on_lost)
        try:
            yield
        finally:
            self.discard(log)

    def logs(self) -> list[HeldLog]:
        """Everything held."""
        return [log for log, _ in self._held.values()]

    def lose(self, log_ids: frozenset[bytes], renewed: list[HeldLog]) -> None:
        """Tell the holders of lost logs, once each.

        Only what was named in the renewal can be lost by it. A lost log stays held, and named,
        until its holder has stopped writing and discards it.
        """
        for log in renewed:
            held = self._held.get(log.log_id)
            if log.log_id in log_ids and held is not None and held[0] == log:
                self._tell(log, _stale(log))

    def lose_all(self, error: ServiceError) -> None:
        """Tell every holder: the store itself is gone, or has forgotten this worker."""
        for log in self.logs():
            self._tell(log, error)

    async def wait_none_left(self, timeout_s: float) -> bool:
        """True once nothing is held, hence nothing written; False if that took longer."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._none_left.wait()
        except TimeoutError:
            return False
        return True

    def _tell(self, log: HeldLog, error: ServiceError) -> None:
        on_lost = self._held[log.log_id][1]
        self._held[log.log_id] = (log, _told)
        on_lost(error)


def _told(_error: ServiceError) -> None:
    """Nothing: the holder knows already."""


def _stale(log: HeldLog) -> ServiceError:
    return ServiceError(
        Reason.STALE_GENERATION,
        f"generation {log.generation} of this log is over: the kvstore gave it to another owner",
        field="generation",
    )


async def renew_once(
    held: HeldLogs, store: LeaseRenewer, incarnation: int, progress: Progress
) -> None:
    """Renew everything held; an unreachable store is logged and tried again.

    Raises NO_WORKER when the store does not know this worker: it restarted.

    An empty renewal says something too: that pages of fenced logs are written no more.
    """
    logs = held.logs()
    try:
        lost = await store.renew_leases(incarnation, logs, progress.value)
    except ServiceError as error:
        if error.reason is Reason.NO_WORKER:
            raise
        _log.warning("lease_renewal_failed", reason=error.reason.value, logs=len(logs))
        return
    if lost:
        _log.warning("logs_lost", logs=len(lost))
    held.lose(lost, logs)
