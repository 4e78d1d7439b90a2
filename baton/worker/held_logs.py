"""The logs this worker writes, and the renewal of their leases.

Owns the list of (log, generation) and what happens to one that was lost: its holder is told at
once, and stops. A log that is not in the list is released: naming exactly what is still being
written is how the store learns that pages are free of us.

When the store itself was lost, a holder that can go on stops writing and *parks* its log: parked
logs are named when the worker attaches again, and come back under new generations.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

import structlog

from baton.arena.replay import HeldLog
from baton.errors import Reason, ServiceError
from baton.worker.threads import Progress

_log = structlog.stdlib.get_logger("baton.worker")

OnLost = Callable[[ServiceError], None]
"""Told why a log is no longer ours."""

STORE_GONE: Final = frozenset({Reason.WORKER_LOST, Reason.NO_WORKER})
"""How a call fails whose store died, is not back, or is back and does not know this worker."""

OnStoreLost = Callable[[], None]
"""Told that the store was lost: stop writing, then `back` or `discard`."""

RENEWALS_PER_LEASE: Final = 4
RENEWAL_INTERVAL_MAX_S: Final = 1.0


class LeaseRenewer(Protocol):
    """The one call of `KVStoreClient` that renewal needs."""

    async def renew_leases(
        self, incarnation: int, logs: Sequence[HeldLog], progress: int
    ) -> frozenset[bytes]:
        """Keep logs owned; the ids of those lost."""
        ...


@dataclass(slots=True)
class _Holding:
    log: HeldLog
    on_lost: OnLost | None
    on_store_lost: OnStoreLost | None
    parked: asyncio.Future[HeldLog] | None = None


class HeldLogs:
    """What is being written now. Used from the event loop only."""

    def __init__(self) -> None:
        self._held: dict[bytes, _Holding] = {}
        self._is_closed = False
        self._none_writing = asyncio.Event()
        self._none_writing.set()

    def __len__(self) -> int:
        return len(self._held)

    def add(self, log: HeldLog, on_lost: OnLost, on_store_lost: OnStoreLost | None = None) -> None:
        """Hold `log`; `on_lost` is called once if the store says it is no longer ours.

        `on_store_lost` is called when the store is lost; without it that is the end too.
        WORKER_LOST while this worker is attaching again: nothing may be written then.
        """
        if self._is_closed:
            raise store_lost()
        self._held[log.log_id] = _Holding(log, on_lost, on_store_lost)
        self._look()

    def hand_over(self, log: HeldLog, on_lost: OnLost, on_store_lost: OnStoreLost | None) -> None:
        """`log`, which is held, has another holder from now on; WORKER_LOST, and it is let go, when
        the store was lost in that moment.
        """
        if self._is_closed:
            self.discard(log)
            raise store_lost()
        self._held[log.log_id] = _Holding(log, on_lost, on_store_lost)

    def discard(self, log: HeldLog) -> None:
        """Let go of `log`; a newer holding of the same log stays."""
        holding = self._held.get(log.log_id)
        if holding is not None and holding.log.generation <= log.generation:
            del self._held[log.log_id]
        self._look()

    @contextmanager
    def holding(self, log: HeldLog, on_lost: OnLost) -> Iterator[None]:
        """Hold `log` for the block."""
        self.add(log, on_lost)
        try:
            yield
        finally:
            self.discard(log)

    async def back(self, log: HeldLog, patience_s: float) -> HeldLog:
        """`log` after the store was lost: its holder has stopped writing and waits for it.

        Raises what the store said: STALE_GENERATION when another owner has it; WORKER_LOST when the
        store was not lost after all, or is not back in `patience_s`. The log is not held then.
        """
        holding = self._held.get(log.log_id)
        if holding is None or holding.log != log:
            raise _stale(log)
        parked: asyncio.Future[HeldLog] = asyncio.get_running_loop().create_future()
        holding.parked = parked
        self._look()
        is_back = False
        try:
            async with asyncio.timeout(patience_s):
                log = await parked
            is_back = True
            return log
        except TimeoutError:
            raise ServiceError(
                Reason.WORKER_LOST,
                f"the kvstore of this node did not come back within {patience_s:g} s",
                retry_after_s=1.0,
            ) from None
        finally:
            holding.parked = None
            if not is_back:
                self._forget(holding)
            self._look()

    def logs(self) -> list[HeldLog]:
        """Everything held."""
        return [holding.log for holding in self._held.values()]

    def parked(self) -> list[HeldLog]:
        """What waits for the store to come back."""
        return [holding.log for holding in self._held.values() if _waits(holding)]

    def lose(self, log_ids: frozenset[bytes], renewed: list[HeldLog]) -> None:
        """Tell the holders of lost logs, once each.

        Only what was named in the renewal can be lost by it. A lost log stays held, and named,
        until its holder has stopped writing and discards it.
        """
        for log in renewed:
            holding = self._held.get(log.log_id)
            if log.log_id in log_ids and holding is not None and holding.log == log:
                _tell(holding, _stale(log))

    def lose_store(self) -> None:
        """Tell every holder that the store is gone, or has forgotten this worker; nothing new may
        be held until `return_kept`.
        """
        self._is_closed = True
        for holding in tuple(self._held.values()):
            if _waits(holding):
                continue
            if holding.on_store_lost is None:
                _tell(holding, store_lost())
            else:
                holding.on_store_lost()

    def return_kept(self, kept: Iterable[HeldLog]) -> None:
        """The worker is attached again: parked logs come back under the generations of `kept`; one
        that is not there is another's.
        """
        self._is_closed = False
        by_id = {log.log_id: log for log in kept}
        for holding in tuple(self._held.values()):
            parked = holding.parked
            if parked is None or parked.done():
                continue
            log = by_id.get(holding.log.log_id)
            if log is None:
                parked.set_exception(_stale(holding.log))
            else:
                holding.log = log
                parked.set_result(log)

    def refuse(self, log: HeldLog, error: ServiceError) -> None:
        """End the wait of a parked log, if it waits, with `error`."""
        holding = self._held.get(log.log_id)
        if holding is not None and _waits(holding) and holding.log == log:
            assert holding.parked is not None
            holding.parked.set_exception(error)

    def return_none(self, logs: Iterable[HeldLog]) -> None:
        """The store never forgot this worker: `logs`, parked for nothing, are given up."""
        for log in logs:
            self.refuse(log, store_lost())

    async def wait_none_writing(self, timeout_s: float) -> bool:
        """True once everything held is parked, hence nothing written; False if it took longer."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._none_writing.wait()
        except TimeoutError:
            return False
        return True

    def _forget(self, holding: _Holding) -> None:
        if self._held.get(holding.log.log_id) is holding:
            del self._held[holding.log.log_id]

    def _look(self) -> None:
        if all(holding.parked is not None for holding in self._held.values()):
            self._none_writing.set()
        else:
            self._none_writing.clear()


def _waits(holding: _Holding) -> bool:
    return holding.parked is not None and not holding.parked.done()


def _tell(holding: _Holding, error: ServiceError) -> None:
    """Once: afterwards the holder knows."""
    on_lost, holding.on_lost = holding.on_lost, None
    if on_lost is not None:
        on_lost(error)


def store_lost() -> ServiceError:
    """Why a holder that cannot wait has to end."""
    return ServiceError(
        Reason.WORKER_LOST,
        "the kvstore of this node restarted; take the log again",
        retry_after_s=1.0,
    )


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
    logs, parked = held.logs(), held.parked()
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
    held.return_none(parked)
