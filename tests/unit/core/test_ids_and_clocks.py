"""Ids have one spelling; clocks move as told."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton import ids
from baton.clock import SystemClock
from baton.errors import Reason, ServiceError
from baton.testing.clock import ManualClock


@given(log_id=st.binary(min_size=16, max_size=16))
def test_log_ids_read_back_from_their_text(log_id: bytes) -> None:
    """Text is for people and URLs, bytes for records; they are the same id."""
    assert ids.parse_log_id(ids.log_id_text(log_id)) == log_id


@pytest.mark.parametrize("text", ["", "ab", "0" * 31, "0" * 33, "g" * 32, "00 " * 16, "é" * 32])
def test_other_texts_are_no_log_id(text: str) -> None:
    """An id from outside is checked before it is looked up."""
    with pytest.raises(ServiceError) as refused:
        ids.parse_log_id(text)
    assert (refused.value.reason, refused.value.field) == (Reason.INVALID_REQUEST, "log_id")


def test_fresh_ids_differ_and_fit_their_fields() -> None:
    """Random ids never meet; an incarnation fits a signed 64-bit field and is never zero."""
    assert len({ids.new_log_id() for _ in range(100)}) == 100
    assert len({ids.new_request_id() for _ in range(100)}) == 100
    assert len(ids.new_log_id()) == 16
    assert len(ids.new_request_id()) == 32
    assert len(ids.new_error_id()) == 16
    assert 0 < ids.new_incarnation() < 2**63


async def test_the_system_clock_waits_for_an_event_or_the_time() -> None:
    """The one way to wait: an event with a bound."""
    clock, event = SystemClock(), asyncio.Event()
    before_s = clock.monotonic_s()
    assert await clock.wait(event, 0.01) is False
    assert clock.monotonic_s() - before_s >= 0.009
    event.set()
    assert await clock.wait(event, 10.0) is True
    assert abs(clock.wall_s() - SystemClock().wall_s()) < 5.0


async def test_the_manual_clock_wakes_waits_when_they_are_due() -> None:
    """Tests of time take none."""
    clock, event = ManualClock(), asyncio.Event()
    results: list[bool] = []

    async def wait() -> None:
        results.append(await clock.wait(event, 5.0))

    async with asyncio.TaskGroup() as group:
        group.create_task(wait())
        await clock.until_waiting()
        clock.advance(4.9)
        assert results == []
        clock.advance(0.1)
    assert results == [False]
    assert await clock.wait(event, 0.0) is False
    event.set()
    assert await clock.wait(event, 0.0) is True
    assert clock.waiting == 0


def test_the_wall_clock_may_jump_alone() -> None:
    """Expiry follows wall time, durations do not."""
    clock = ManualClock()
    monotonic_s, wall_s = clock.monotonic_s(), clock.wall_s()
    clock.jump_wall(-3600.0)
    assert (clock.monotonic_s(), clock.wall_s()) == (monotonic_s, wall_s - 3600.0)
