"""Device slots: whose they are, who has to give them up, and who must not."""

from __future__ import annotations

import pytest

from baton.engine.device_slots import DeviceSlots
from baton.errors import Reason, ServiceError

BLOCK = 16


def test_slots_grow_with_the_prompt_and_come_back() -> None:
    """Rows once given stay; a partial page counts whole."""
    slots = DeviceSlots(8, BLOCK)
    first = list(slots.reach(1, 17, ()).slots)
    assert len(first) == 2
    assert slots.reach(1, 32, ()).slots == first
    assert slots.reach(1, 33, ()).slots[:2] == first
    assert slots.free == 5
    slots.forget(1)
    slots.forget(1)
    assert slots.free == 8
    slots.check_invariants()


def test_the_prompt_used_longest_ago_gives_its_slots_up() -> None:
    """All of them: half a prompt is of no use."""
    slots = DeviceSlots(6, BLOCK)
    for owner in (1, 2, 3):
        slots.reach(owner, 2 * BLOCK, ())
    slots.of(1)
    slots.reach(4, BLOCK, ())
    assert slots.free == 1
    assert len(slots.of(1).slots) == 2
    assert len(slots.of(3).slots) == 2
    assert slots.of(2).slots == []
    slots.check_invariants()


def test_a_prompt_of_the_same_pass_or_in_flight_keeps_its_slots() -> None:
    """Then there is no room, and whoever asked keeps what it had."""
    slots = DeviceSlots(4, BLOCK)
    slots.reach(1, 2 * BLOCK, ())
    slots.reach(2, BLOCK, ()).flights = 1
    slots.reach(3, BLOCK, ())
    with pytest.raises(ServiceError) as refused:
        slots.reach(3, 2 * BLOCK, {1})
    assert refused.value.reason is Reason.PAGES_EXHAUSTED
    assert len(slots.of(3).slots) == 1
    slots.of(2).flights = 0
    slots.reach(3, 2 * BLOCK, {1})
    slots.check_invariants()
