"""Leases: what is named, who is told of a loss, and what an outage changes (nothing)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import pytest

from baton.arena.replay import HeldLog
from baton.errors import Reason, ServiceError
from baton.worker.held_logs import HeldLogs, renew_once
from baton.worker.threads import Progress

LOG = HeldLog(log_id=b"a" * 16, generation=1)
NEWER = HeldLog(log_id=b"a" * 16, generation=2)
OTHER = HeldLog(log_id=b"b" * 16, generation=1)


class Store:
    """Answers renewals with the logs it says are lost."""

    def __init__(self, *lost: bytes, error: ServiceError | None = None) -> None:
        self.renewals: list[tuple[list[HeldLog], int]] = []
        self._lost = frozenset(lost)
        self._error = error

    async def renew_leases(
        self, incarnation: int, logs: Sequence[HeldLog], progress: int
    ) -> frozenset[bytes]:
        """One renewal."""
        assert incarnation == 9
        self.renewals.append((list(logs), progress))
        if self._error is not None:
            raise self._error
        return self._lost


async def test_everything_held_is_named_with_the_progress() -> None:
    """Leases are renewed by progress, not by a timer alone."""
    held, store, progress = HeldLogs(), Store(), Progress()
    held.add(LOG, lambda _error: None)
    held.add(OTHER, lambda _error: None)
    progress.worked()
    await renew_once(held, store, 9, progress)
    assert store.renewals == [([LOG, OTHER], progress.value)]


async def test_an_empty_renewal_is_sent_too() -> None:
    """Naming nothing is how pages of fenced logs are known to be let go of."""
    store = Store()
    await renew_once(HeldLogs(), store, 9, Progress())
    assert store.renewals[0][0] == []


async def test_the_holder_of_a_lost_log_is_told_once_and_named_until_it_lets_go() -> None:
    """It may still be writing: until it discards the log, the store must not reuse its pages."""
    told: list[str] = []
    held, store = HeldLogs(), Store(LOG.log_id)
    with held.holding(LOG, lambda error: told.append(error.reason.value)):
        for _ in range(2):
            await renew_once(held, store, 9, Progress())
        assert told == ["STALE_GENERATION"]
        assert held.logs() == [LOG]
    assert held.logs() == []


async def test_a_log_that_was_taken_again_meanwhile_is_not_lost() -> None:
    """The answer speaks of the generation that was named."""
    told: list[str] = []
    held = HeldLogs()
    held.add(LOG, lambda _error: told.append("old"))
    renewed = held.logs()
    held.add(NEWER, lambda _error: told.append("new"))
    held.lose(frozenset({LOG.log_id}), renewed)
    assert told == []
    held.discard(LOG)
    assert held.logs() == [NEWER]
    held.discard(NEWER)
    assert len(held) == 0


async def test_an_unreachable_store_loses_nothing() -> None:
    """The next renewal tries again; the store's own clock decides."""
    told: list[str] = []
    held = HeldLogs()
    held.add(LOG, lambda error: told.append(error.reason.value))
    store = Store(LOG.log_id, error=ServiceError(Reason.WORKER_LOST, "gone"))
    await renew_once(held, store, 9, Progress())
    assert told == []
    assert held.logs() == [LOG]


async def test_a_store_that_forgot_us_is_an_error_of_its_own() -> None:
    """It restarted: the worker must attach again, not only try again."""
    store = Store(error=ServiceError(Reason.NO_WORKER, "who?"))
    with pytest.raises(ServiceError) as caught:
        await renew_once(HeldLogs(), store, 9, Progress())
    assert caught.value.reason is Reason.NO_WORKER


async def test_a_lost_store_ends_who_cannot_wait_and_waits_for_them() -> None:
    """The old arena may only go when nobody writes it any more."""
    told: list[str] = []
    held = HeldLogs()
    for log in (LOG, OTHER):
        held.add(log, lambda error: told.append(error.reason.value))
    held.lose_store()
    assert told == ["WORKER_LOST", "WORKER_LOST"]
    held.discard(LOG)
    assert not await held.wait_none_writing(0.001)
    held.discard(OTHER)
    assert await held.wait_none_writing(0.001)


async def test_parked_logs_come_back_under_their_new_generations() -> None:
    """One that the store gave to another owner meanwhile does not, and is not held any more."""
    lost: list[bytes] = []
    held = HeldLogs()
    for log in (LOG, OTHER):
        held.add(log, _never, partial(lost.append, log.log_id))
    held.lose_store()
    assert lost == [LOG.log_id, OTHER.log_id]
    assert not await held.wait_none_writing(0.001), "they still write"
    async with asyncio.TaskGroup() as group:
        kept = group.create_task(held.back(LOG, 5.0))
        refused = group.create_task(_reason(held, OTHER))
        assert await held.wait_none_writing(5.0)
        assert held.parked() == [LOG, OTHER]
        held.return_kept([NEWER])
    assert kept.result() == NEWER
    assert refused.result() is Reason.STALE_GENERATION
    assert held.logs() == [NEWER]


async def test_nothing_is_begun_while_the_worker_attaches_again() -> None:
    """A run that began now would write into an arena that is about to go."""
    held = HeldLogs()
    held.lose_store()
    with pytest.raises(ServiceError) as refused:
        held.add(LOG, _never)
    assert refused.value.reason is Reason.WORKER_LOST
    assert held.logs() == []
    held.return_kept([])
    held.add(LOG, _never)
    assert held.logs() == [LOG]


async def test_a_store_that_stays_away_is_not_waited_for_for_ever() -> None:
    """The client hears of it; the log is the store's business again."""
    held = HeldLogs()
    held.add(LOG, _never, lambda: None)
    assert await _reason(held, LOG, 0.01) is Reason.WORKER_LOST
    assert held.logs() == []


async def test_a_log_parked_for_nothing_is_given_up() -> None:
    """The store answers a renewal that was begun after the parking: it never forgot this worker."""
    held, store = HeldLogs(), Store()
    held.add(LOG, _never, lambda: None)
    async with asyncio.TaskGroup() as group:
        refused = group.create_task(_reason(held, LOG))
        assert await held.wait_none_writing(5.0)
        await renew_once(held, store, 9, Progress())
    assert refused.result() is Reason.WORKER_LOST
    assert held.logs() == []


async def test_a_cancelled_waiter_lets_its_log_go() -> None:
    """Also in the very moment in which it came back."""
    held = HeldLogs()
    held.add(LOG, _never, lambda: None)
    async with asyncio.TaskGroup() as group:
        waiter = group.create_task(held.back(LOG, 5.0))
        assert await held.wait_none_writing(5.0)
        held.return_kept([NEWER])
        waiter.cancel()
    assert waiter.cancelled()
    assert held.logs() == []


def _never(error: ServiceError) -> None:
    raise AssertionError(error)


async def _reason(held: HeldLogs, log: HeldLog, patience_s: float = 5.0) -> Reason:
    with pytest.raises(ServiceError) as refused:
        await held.back(log, patience_s)
    return refused.value.reason
