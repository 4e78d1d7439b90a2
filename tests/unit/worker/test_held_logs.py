"""Leases: what is named, who is told of a loss, and what an outage changes (nothing)."""

from __future__ import annotations

from collections.abc import Sequence

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


async def test_losing_everything_tells_each_holder_why_and_waits_for_them() -> None:
    """The old arena may only go when nobody writes it any more."""
    told: list[str] = []
    held = HeldLogs()
    for log in (LOG, OTHER):
        held.add(log, lambda error: told.append(error.reason.value))
    held.lose_all(ServiceError(Reason.WORKER_LOST, "restarted"))
    assert told == ["WORKER_LOST", "WORKER_LOST"]
    held.discard(LOG)
    assert not await held.wait_none_left(0.001)
    held.discard(OTHER)
    assert await held.wait_none_left(0.001)
