"""Slots, queue and reservations: bounded, ordered, fair, and never stuck."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import Reason, ServiceError
from baton.scheduling.claims import Claim, ServiceClass
from services.decode.scheduler import (
    BACK_OFF_S,
    HOLD_MAX_S,
    TURN_TOKENS,
    Cause,
    SlotScheduler,
)

BATCH, INTERACTIVE = ServiceClass.BATCH, ServiceClass.INTERACTIVE


def claim(
    name: str,
    tenant: str = "t",
    service_class: ServiceClass = INTERACTIVE,
    priority: int = 0,
    weight: int = 1,
) -> Claim:
    """A claim of a tenant."""
    return Claim(
        request_id=name,
        tenant=tenant,
        service_class=service_class,
        priority=priority,
        weight=weight,
    )


def enter(slots: SlotScheduler, *claims: Claim, now_s: float = 0.0) -> None:
    """All begin to wait, in order."""
    for one in claims:
        slots.enter(one, now_s)


def running(slots: SlotScheduler, *claims: Claim, now_s: float = 0.0) -> None:
    """All run."""
    enter(slots, *claims, now_s=now_s)
    admitted = slots.admit(now_s)
    assert set(admitted) == {one.request_id for one in claims}
    for name in admitted:
        slots.settle(name)


def test_what_does_not_fit_into_the_slots_waits_in_order() -> None:
    """A full worker queues; the place of one that leaves is the oldest one's."""
    slots = SlotScheduler(2)
    enter(slots, *(claim(name) for name in "abcd"))
    assert slots.admit(0.0) == ["a", "b"]
    assert (slots.active, slots.waiting) == (2, 2)
    slots.leave("b")
    assert slots.admit(1.0) == ["c"]
    assert slots.admit(1.0) == []


def test_the_queue_has_a_bound_and_says_when_to_come_back() -> None:
    """One past the bound is refused with both numbers; a reservation counts as a place."""
    slots = SlotScheduler(1, 2)
    enter(slots, claim("a"), claim("b"))
    slots.reserve("coming", 0.0, 10.0, "t")
    with pytest.raises(ServiceError) as caught:
        slots.enter(claim("fourth"), 1.0)
    assert caught.value.reason is Reason.QUEUE_FULL
    assert caught.value.retry_after_s is not None
    assert caught.value.metadata == {"active_sequences_max": "1", "queue_max": "2"}
    with pytest.raises(ServiceError):
        slots.reserve("another", 1.0, 10.0, "t")
    slots.enter(claim("coming"), 1.0)
    assert (slots.waiting, slots.reserved) == (3, 0)


def test_a_reservation_expires_by_itself() -> None:
    """A gateway that died holds nothing for ever."""
    slots = SlotScheduler(1, 0)
    slots.reserve("gone", 0.0, 5.0)
    with pytest.raises(ServiceError):
        slots.enter(claim("next"), 4.9)
    slots.enter(claim("next"), 5.0)


def test_a_reserved_place_holds_no_slot_idle() -> None:
    """Who is there runs; who is promised a place finds one."""
    slots = SlotScheduler(1, 1)
    slots.reserve("coming", 0.0, 100.0)
    enter(slots, claim("here"))
    assert slots.admit(0.0) == ["here"]
    slots.enter(claim("coming"), 1.0)
    assert slots.is_waiting("coming")


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
    running(slots, claim("a"))
    slots.reserve("a", 0.0, 10.0)
    assert (slots.active, slots.reserved) == (1, 0)
    with pytest.raises(ServiceError) as caught:
        slots.enter(claim("a"), 0.0)
    assert caught.value.reason is Reason.ALREADY_EXISTS


def test_leaving_twice_is_harmless() -> None:
    """An end and a cancel may meet."""
    slots = SlotScheduler(1)
    running(slots, claim("a"))
    slots.leave("a")
    slots.leave("a")
    running(slots, claim("b"))


def test_the_higher_class_then_the_higher_priority_goes_first() -> None:
    """Arrival decides only between equals."""
    slots = SlotScheduler(1)
    waiting = (
        claim("batch", service_class=BATCH, priority=9),
        claim("plain"),
        claim("urgent", priority=1),
    )
    enter(slots, *waiting)
    order = []
    for _ in waiting:
        (name,) = slots.admit(0.0)
        order.append(name)
        slots.leave(name)
    assert order == ["urgent", "plain", "batch"]


def test_the_tenant_that_was_served_least_goes_next() -> None:
    """A hundred requests of one tenant do not stand before the one of another."""
    slots = SlotScheduler(1)
    running(slots, claim("a0", "a"))
    slots.served("a0", 50, 0.0)
    enter(slots, *(claim(f"a{index}", "a") for index in range(1, 4)), claim("b", "b"))
    slots.leave("a0")
    assert slots.admit(0.0) == ["b"]


def test_tenants_that_were_served_nothing_get_slots_in_turn() -> None:
    """All arrive at once: the first tenant's queue does not take all slots."""
    slots = SlotScheduler(4)
    enter(slots, *(claim(f"a{index}", "a") for index in range(4)))
    enter(slots, *(claim(f"b{index}", "b") for index in range(4)))
    assert Counter(name[0] for name in slots.admit(0.0)) == {"a": 2, "b": 2}


def test_a_higher_class_takes_the_slot_of_the_youngest_of_the_lowest() -> None:
    """Only where all slots are taken, and never that of its own class or a higher one."""
    slots = SlotScheduler(3)
    running(
        slots,
        claim("old", service_class=BATCH),
        claim("young", service_class=BATCH),
        claim("mine"),
    )
    enter(slots, claim("now"), claim("too"), claim("late"))
    found = slots.preemption(1.0)
    assert found is not None
    assert (found.request_id, found.cause) == ("young", Cause.CLASS)
    slots.preempt(found.request_id, found.cause, 1.0)
    assert slots.admit(1.0) == ["now"]
    found = slots.preemption(1.0)
    assert found is not None
    assert found.request_id == "old"
    slots.preempt("old", Cause.CLASS, 1.0)
    assert slots.admit(1.0) == ["too"]
    assert slots.preemption(1.0) is None
    slots.check_invariants()


def test_what_was_preempted_waits_until_its_log_is_given_up_and_goes_before_newer_ones() -> None:
    """Two writers of one log would be the end of both."""
    slots = SlotScheduler(1)
    running(slots, claim("batch", service_class=BATCH))
    enter(slots, claim("now"), claim("newer", service_class=BATCH))
    slots.preempt("batch", Cause.CLASS, 0.0)
    assert slots.admit(0.0) == ["now"]
    slots.leave("now")
    assert slots.admit(0.0) == ["newer"]
    slots.leave("newer")
    assert slots.admit(0.0) == []
    slots.settle("batch")
    enter(slots, claim("newest", service_class=BATCH))
    assert slots.admit(0.0) == ["batch"]


def test_a_tenant_with_all_slots_gives_another_one_its_share() -> None:
    """And no more than that: nobody is preempted to and fro."""
    slots = SlotScheduler(4)
    running(slots, *(claim(f"a{index}", "a") for index in range(4)))
    enter(slots, *(claim(f"b{index}", "b") for index in range(4)))
    victims = []
    while (found := slots.preemption(1.0)) is not None:
        victims.append(found.request_id)
        slots.preempt(found.request_id, found.cause, 1.0)
        for name in slots.admit(1.0):
            slots.settle(name)
        slots.settle(found.request_id)
    assert victims == ["a3", "a2"]


def test_tenants_take_turns_at_one_slot() -> None:
    """One slot, two tenants with endless requests: each gets its turn, of bounded length."""
    slots = SlotScheduler(1)
    enter(slots, claim("a", "a"), claim("b", "b"))
    (first,) = slots.admit(0.0)
    slots.settle(first)
    other = "b" if first == "a" else "a"
    assert slots.preemption(0.0) is None
    slots.served(first, int(TURN_TOKENS) + 2, 0.0)
    found = slots.preemption(0.0)
    assert found is not None
    assert (found.request_id, found.cause) == (first, Cause.TENANT)
    slots.preempt(first, Cause.TENANT, 0.0)
    slots.settle(first)
    assert slots.admit(0.0) == [other]


def test_for_pages_the_youngest_of_the_lowest_gives_way_and_the_oldest_never() -> None:
    """The asker is among them: so the oldest always gets on."""
    slots = SlotScheduler(3)
    running(slots, claim("old"), claim("batch", service_class=BATCH), claim("young"))
    assert slots.victim_for_pages("old", is_tenants=False) == "batch"
    slots.preempt("batch", Cause.PAGES, 0.0)
    assert slots.is_making_room()
    slots.settle("batch")
    assert not slots.is_making_room()
    assert slots.victim_for_pages("old", is_tenants=False) == "young"
    assert slots.victim_for_pages("young", is_tenants=False) == "young"


def test_a_quota_is_made_room_in_by_its_own_tenant_only() -> None:
    """Another tenant's pages would not help, and are not touched."""
    slots = SlotScheduler(3)
    running(slots, claim("a0", "a"), claim("b", "b", BATCH), claim("a1", "a"))
    assert slots.victim_for_pages("a0", is_tenants=True) == "a1"
    slots.preempt("a1", Cause.PAGES, 0.0, is_tenants=True)
    slots.settle("a1")
    assert slots.victim_for_pages("a0", is_tenants=True) == "a0"
    slots.leave("b")
    assert slots.admit(0.0) == [], "another tenant's end brings it nothing"
    slots.leave("a0")
    assert slots.admit(0.0) == ["a1"]


def test_what_waits_for_pages_comes_back_when_somebody_left_or_after_a_while() -> None:
    """Pages may also come from elsewhere: hence the while."""
    slots = SlotScheduler(3)
    running(slots, claim("a"), claim("b"), claim("c"))
    slots.preempt("c", Cause.PAGES, 0.0)
    slots.settle("c")
    assert slots.admit(0.5) == []
    assert slots.admit(BACK_OFF_S) == ["c"]
    slots.refused_pages("c", BACK_OFF_S, is_tenants=False)
    slots.settle("c")
    assert slots.pages_wanted_s("c") == 0.0
    assert slots.admit(BACK_OFF_S + 1.0) == [], "each time it waits longer"
    slots.leave("a")
    assert slots.admit(BACK_OFF_S + 1.0) == ["c"]
    slots.settle("c")
    slots.served("c", 1, 3.0)
    assert slots.pages_wanted_s("c") is None


def test_later_ones_do_not_take_the_pages_that_are_waited_for_but_higher_ones_may() -> None:
    """Else a stream of small requests would starve a large one; and not for ever."""
    slots = SlotScheduler(3)
    running(slots, claim("a"), claim("b"))
    slots.preempt("b", Cause.PAGES, 0.0)
    slots.settle("b")
    enter(slots, claim("later"), claim("urgent", priority=1), now_s=0.1)
    assert slots.admit(0.1) == ["urgent"]
    slots.leave("a")
    assert slots.admit(0.2) == ["b", "later"]


def test_a_step_with_a_budget_serves_classes_then_tenants_in_turn() -> None:
    """Over several steps of two tokens everybody of a level gets the same share."""
    slots = SlotScheduler(8)
    claims = [claim(f"a{index}", "a") for index in range(5)] + [claim("b0", "b")]
    running(slots, *claims)
    ready = [one.request_id for one in claims]
    counts: Counter[str] = Counter()
    for _ in range(20):
        chosen = slots.choose_step(ready, 2)
        assert len(chosen) == 2
        counts.update(chosen)
    assert counts["b0"] == 20, "half the budget is its tenant's"
    assert {counts[f"a{index}"] for index in range(5)} == {4}
    assert sorted(slots.choose_step(ready, None)) == sorted(ready)
    running(slots, claim("batch", service_class=BATCH))
    assert "batch" not in slots.choose_step([*ready, "batch"], 6)


class Arena:
    """Pages as a store has them. A sequence grows a page at a time; one that waits holds none,
    keeps what it has said, and needs pages for all of it to go on.
    """

    def __init__(self, slots: SlotScheduler, pages: int, needs: dict[str, int]) -> None:
        self.slots = slots
        self.pages = pages
        self.needs = needs
        self.said = dict.fromkeys(needs, 1)
        self.running: set[str] = set()
        self.done: list[str] = []

    @property
    def free(self) -> int:
        """Pages nobody has."""
        return self.pages - sum(self.said[name] for name in self.running)

    def turn(self, now_s: float) -> None:
        """One step of everybody who runs."""
        while (found := self.slots.preemption(now_s)) is not None:
            self._stop(found.request_id, found.cause, now_s)
            self._admit(now_s)
        self._admit(now_s)
        for name in sorted(self.running):
            if name in self.running:
                self._grow(name, now_s)
        self.slots.check_invariants()

    def _admit(self, now_s: float) -> None:
        for name in self.slots.admit(now_s):
            if self.free < self.said[name]:
                victim = self.slots.victim_for_pages(name, is_tenants=False)
                self.slots.refused_pages(name, now_s, is_tenants=False, victim=victim)
                if victim != name:
                    self._stop(victim, Cause.PAGES, now_s)
            else:
                self.running.add(name)
            self.slots.settle(name)

    def _grow(self, name: str, now_s: float) -> None:
        if self.said[name] == self.needs[name]:
            self.slots.leave(name)
            self.running.remove(name)
            self.done.append(name)
        elif self.free:
            self.said[name] += 1
            self.slots.served(name, 16, now_s)
        else:
            victim = self.slots.victim_for_pages(name, is_tenants=False)
            self._stop(victim, Cause.PAGES, now_s)

    def _stop(self, name: str, cause: Cause, now_s: float) -> None:
        self.slots.preempt(name, cause, now_s)
        self.running.remove(name)
        self.slots.settle(name)


SEQUENCES = st.lists(
    st.tuples(st.sampled_from("abc"), st.booleans(), st.integers(-1, 1), st.integers(1, 8)),
    min_size=1,
    max_size=20,
)


@settings(deadline=None)
@given(SEQUENCES, st.integers(1, 4), st.integers(8, 12))
def test_everybody_gets_to_the_end_whatever_is_short(
    sequences: list[tuple[str, bool, int, int]], active_max: int, pages: int
) -> None:
    """Every slot full, every page taken: as long as each fits alone, all finish."""
    slots = SlotScheduler(active_max, 64)
    needs: dict[str, int] = {}
    for index, (tenant, is_batch, priority, need) in enumerate(sequences):
        one = claim(f"{index}", tenant, BATCH if is_batch else INTERACTIVE, priority)
        needs[one.request_id] = need
        slots.enter(one, 0.0)
    arena, now_s = Arena(slots, pages, needs), 0.0
    while len(arena.done) < len(needs):
        assert now_s < 60.0 * len(needs), "stuck"
        arena.turn(now_s)
        now_s += 0.25
    assert (slots.active, slots.waiting) == (0, 0)


EVENTS = st.lists(
    st.tuples(st.sampled_from("reladpsg"), st.integers(0, 6), st.floats(0, 5)), max_size=200
)


@given(EVENTS)
def test_no_sequence_of_events_breaks_the_invariants(
    events: Iterable[tuple[str, int, float]],
) -> None:
    """The bounds hold, whatever comes in whatever order."""
    slots, now_s = SlotScheduler(3, 2), 0.0
    for kind, number, seconds in events:
        now_s += seconds
        name = str(number)
        with contextlib.suppress(ServiceError, AssertionError, KeyError):
            if kind == "r":
                slots.reserve(name, now_s, 3.0)
            elif kind == "e":
                slots.enter(claim(name, tenant=str(number % 2)), now_s)
            elif kind == "l":
                slots.leave(name)
            elif kind == "a":
                slots.admit(now_s)
            elif kind == "d":
                slots.settle(name)
            elif kind == "p" and (found := slots.preemption(now_s)) is not None:
                slots.preempt(found.request_id, found.cause, now_s)
            elif kind == "s":
                slots.preempt(name, Cause.PAGES, now_s)
            elif kind == "g":
                slots.served(name, 10, now_s)
        slots.check_invariants()
