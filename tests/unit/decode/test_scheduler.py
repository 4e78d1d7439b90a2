"""Slots and reservations: bounded, expiring, and never lost."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import Reason, ServiceError
from services.decode.scheduler import HOLD_MAX_S, SlotScheduler


def test_a_reservation_keeps_its_slot() -> None:
    """What Prepare promised, Start gets, though all other slots are taken."""
    slots = SlotScheduler(2)
    slots.reserve("coming", 0.0, 10.0)
    slots.enter("other", 0.0)
    with pytest.raises(ServiceError) as caught:
        slots.enter("third", 1.0)
    assert caught.value.reason is Reason.QUEUE_FULL
    assert caught.value.retry_after_s is not None
    slots.enter("coming", 1.0)
    assert (slots.active, slots.reserved) == (2, 0)


def test_a_reservation_expires_by_itself() -> None:
    """A gateway that died holds nothing for ever."""
    slots = SlotScheduler(1)
    slots.reserve("gone", 0.0, 5.0)
    with pytest.raises(ServiceError):
        slots.enter("next", 4.9)
    slots.enter("next", 5.0)


def test_a_hold_is_bounded_and_can_be_renewed() -> None:
    """An absurd hold is cut; the same id again starts over."""
    slots = SlotScheduler(1)
    slots.reserve("a", 0.0, 1e9)
    slots.reserve("a", 10.0, 1e9)
    slots.expire(10.0 + HOLD_MAX_S - 0.1)
    assert slots.reserved == 1
    slots.expire(10.0 + HOLD_MAX_S)
    assert slots.reserved == 0


def test_an_active_sequence_needs_no_reservation() -> None:
    """Prepare for a sequence that runs already reserves nothing more."""
    slots = SlotScheduler(1)
    slots.enter("a", 0.0)
    slots.reserve("a", 0.0, 10.0)
    assert (slots.active, slots.reserved) == (1, 0)
    with pytest.raises(ServiceError) as caught:
        slots.enter("a", 0.0)
    assert caught.value.reason is Reason.ALREADY_EXISTS


def test_leaving_twice_is_harmless() -> None:
    """An end and a cancel may meet."""
    slots = SlotScheduler(1)
    slots.enter("a", 0.0)
    slots.leave("a")
    slots.leave("a")
    slots.enter("b", 0.0)


@given(
    st.lists(st.tuples(st.sampled_from("rel"), st.integers(0, 6), st.floats(0, 5)), max_size=200)
)
def test_no_sequence_of_events_breaks_the_invariants(
    events: list[tuple[str, int, float]],
) -> None:
    """Active and reserved together never exceed the slots."""
    slots, now_s = SlotScheduler(3), 0.0
    for kind, number, seconds in events:
        now_s += seconds
        name = str(number)
        with contextlib.suppress(ServiceError):
            if kind == "r":
                slots.reserve(name, now_s, 3.0)
            elif kind == "e":
                slots.enter(name, now_s)
            else:
                slots.leave(name)
        slots.check_invariants()
