"""The logs this worker writes, and the renewal of their leases.

Owns the list of (log, generation) and what happens to one that was lost: its holder is told at
once, and stops. A log that is not in the list is released: naming exactly what is still being
written is how the store learns that pages are free of us.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

import structlog

from baton.arena.replay import HeldLog
from baton.errors import ServiceError
from baton.worker.threads import Progress

_log = structlog.stdlib.get_logger("baton.worker")

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
        self._held: dict[bytes, tuple[HeldLog, Callable[[], None]]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def add(self, log: HeldLog, on_lost: Callable[[], None]) -> None:
        """Hold `log`; `on_lost` is called once if the store says it is no longer ours."""
        self._held[log.log_id] = (log, on_lost)

    def discard(self, log: HeldLog) -> None:
        """Let go of `log`; a newer holding of the same log stays."""
        held = self._held.get(log.log_id)
        if held is not None and held[0].generation <= log.generation:
            del self._held[log.log_id]

    @contextmanager
    def holding(self, log: HeldLog, on_lost: Callable[[], None]) -> Iterator[None]:
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
                self._held[log.log_id] = (log, _told)
                held[1]()


def _told() -> None:
    """Nothing: the holder knows already."""


async def renew_once(
    held: HeldLogs, store: LeaseRenewer, incarnation: int, progress: Progress
) -> None:
    """Renew everything held; an unreachable store is logged and tried again.

    An empty renewal says something too: that pages of fenced logs are written no more.
    """
    logs = held.logs()
    try:
        lost = await store.renew_leases(incarnation, logs, progress.value)
    except ServiceError as error:
        _log.warning("lease_renewal_failed", reason=error.reason.value, logs=len(logs))
        return
    if lost:
        _log.warning("logs_lost", logs=len(lost))
    held.lose(lost, logs)
