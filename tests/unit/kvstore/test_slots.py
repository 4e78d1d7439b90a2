"""Slots of the NVMe tier: held by who refers to them, free otherwise, retired when they fail."""

from __future__ import annotations

import pytest

from baton.errors import Reason, ServiceError
from services.kvstore.tiers.slots import Slots


def written(slots: Slots, count: int) -> list[int]:
    """Slots that are held once."""
    found = slots.grant(count)
    slots.written(found)
    return found


def test_slot_is_free_when_its_last_holder_goes() -> None:
    """Cold rows of forks share slots; each counts."""
    slots = Slots(4)
    first, second = written(slots, 2)
    slots.hold([first])
    slots.drop([first, second])
    slots.check_invariants({first: 1})
    assert slots.is_current(first, slots.generation(first))
    assert not slots.is_current(second, slots.generation(second))
    slots.drop([first])
    slots.check_invariants({})
    assert slots.free_count == 4


def test_slot_that_is_used_again_is_another_use() -> None:
    """A reference to the old use is a miss."""
    slots = Slots(2, generation_floor=7 << 32)
    (slot,) = written(slots, 1)
    generation = slots.generation(slot)
    assert generation > 7 << 32
    slots.drop([slot])
    again = written(slots, 2)
    assert slot in again
    assert not slots.is_current(slot, generation)


def test_writing_that_failed_gives_slots_back_or_retires_them() -> None:
    """One that failed on the disk is not granted again in this life, whoever still refers to it."""
    slots = Slots(3)
    bad, back = slots.grant(2)
    slots.retire(bad)
    slots.give_back([back])
    slots.check_invariants({})
    assert (slots.free_count, slots.retired_count) == (2, 1)
    (held,) = written(slots, 1)
    slots.retire(held)
    assert not slots.is_current(held, slots.generation(held))
    slots.retire(held)
    slots.drop([held])
    slots.check_invariants({})
    with pytest.raises(ServiceError) as refused:
        slots.grant(2)
    assert refused.value.reason is Reason.PAGES_EXHAUSTED


def test_copies_are_found_by_the_use_of_a_page_until_either_side_is_used_again() -> None:
    """What stands on NVMe already is not written twice; what stands in the host, not read."""
    slots = Slots(4)
    one, two, three = written(slots, 3)
    for page, slot in ((10, one), (11, two), (12, three)):
        slots.note_copy(page, 5, slot)
    assert (slots.copy_of(10, 5), slots.copy_of(10, 6)) == (one, None)
    assert slots.page_of(two) == (11, 5)
    slots.drop([one])
    assert slots.copy_of(10, 5) is None
    slots.forget_pages([11])
    assert slots.page_of(two) is None
    slots.retire(three)
    assert slots.copy_of(12, 5) is None
    slots.note_copy(13, 1, two)
    slots.note_copy(13, 2, two)
    assert (slots.copy_of(13, 1), slots.copy_of(13, 2)) == (None, two)
    slots.check_invariants({two: 1, three: 1})


def test_start_holds_what_is_referred_to_and_nothing_else() -> None:
    """With the slot generations that the log named, and as many holders as refer to each."""
    slots = Slots(6, generation_floor=2 << 32)
    slots.restore({1: 11, 4: 14, 5: 15}, {1: 1, 4: 3})
    slots.check_invariants({1: 1, 4: 3})
    assert slots.is_current(4, 14)
    assert slots.free_count == 4
    assert {slots.generation(slot) >> 32 for slot in slots.grant(4)} == {2}
