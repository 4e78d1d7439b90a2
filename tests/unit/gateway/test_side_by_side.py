"""Calls side by side: the first failure is raised as it is, and leaves no cancel request behind."""

from __future__ import annotations

import asyncio

import pytest

from baton.errors import Reason, ServiceError
from services.gateway.side_by_side import together, watched

LOST = ServiceError(Reason.WORKER_LOST, "gone")


async def _fails() -> None:
    raise LOST


async def _never() -> None:
    await asyncio.Event().wait()


async def _seven() -> int:
    return 7


async def test_all_of_them_end_well() -> None:
    """The first one's result is what counts."""
    assert await together(_seven(), _seven()) == 7


@pytest.mark.parametrize("runs", [together, watched])
async def test_failure_of_another_ends_the_main_call(runs: object) -> None:
    """Nothing is left running."""
    assert callable(runs)
    with pytest.raises(ServiceError) as failed:
        await runs(_never(), _fails())
    assert failed.value is LOST


async def test_watcher_ends_with_what_it_watches() -> None:
    """It would wait for ever."""
    assert await watched(_seven(), _never()) == 7


@pytest.mark.parametrize("runs", [together, watched])
async def test_deadline_after_a_failure_is_still_a_timeout(runs: object) -> None:
    """A leaked cancel request would turn it into a cancellation, and the request would hang."""
    assert callable(runs)

    async def fails_and_waits() -> None:
        async with asyncio.timeout(0.01):
            with pytest.raises(ServiceError):
                await runs(_never(), _fails())
            await _never()

    with pytest.raises(TimeoutError):
        await fails_and_waits()
