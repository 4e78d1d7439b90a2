"""A worker drains once: a call ends the process, and the stop behind it does not wait again."""

from __future__ import annotations

import pytest

from baton.errors import Reason, ServiceError
from baton.worker.draining import DRAIN_TIMEOUT_MAX_S, Draining

OPERATOR = "an operator's capability"


class Work:
    """What a worker has: `remaining` is left whenever a wait ends."""

    def __init__(self, remaining: int) -> None:
        self.remaining = remaining
        self.waits_s: list[float] = []
        self.stops = 0

    async def drain_within(self, timeout_s: float) -> int:
        """Notes how long somebody would wait."""
        self.waits_s.append(timeout_s)
        return self.remaining

    async def require_operator(self, capability: str) -> None:
        """As a kvstore that knows one operator."""
        if capability != OPERATOR:
            raise ServiceError(Reason.PERMISSION_DENIED, "not an operator's", field="capability")

    def draining(self) -> Draining:
        """The drain of this worker."""
        return Draining(self.drain_within, self.request_stop, self.require_operator)

    def request_stop(self) -> None:
        """Notes that the process is to end."""
        self.stops += 1


@pytest.mark.parametrize("remaining", [0, 3])
async def test_a_drain_by_call_ends_the_process_whatever_is_left(remaining: int) -> None:
    """Its gateways go on elsewhere with what is handed back; the stop has nothing to wait for."""
    work = Work(remaining)
    draining = work.draining()
    assert await draining.by_call(30.0, OPERATOR) == remaining
    await draining.at_stop(10.0)
    assert work.waits_s == [30.0]
    assert work.stops == 1


async def test_a_stop_waits_for_what_runs() -> None:
    """SIGTERM alone: the process is on its way down already."""
    work = Work(0)
    await work.draining().at_stop(10.0)
    assert work.waits_s == [10.0]
    assert work.stops == 0


async def test_nobody_waits_for_ever() -> None:
    """The longest wait is bounded, whatever was asked for."""
    work = Work(0)
    await work.draining().by_call(1e9, OPERATOR)
    assert work.waits_s == [DRAIN_TIMEOUT_MAX_S]


async def test_who_is_no_operator_stops_nothing() -> None:
    """Refused before anything begins: the worker takes new work as before."""
    work = Work(0)
    with pytest.raises(ServiceError) as caught:
        await work.draining().by_call(30.0, "a tenant's")
    assert caught.value.reason is Reason.PERMISSION_DENIED
    assert (work.waits_s, work.stops) == ([], 0)
