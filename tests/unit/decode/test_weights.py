"""Slots and the queue's places between tenants of several weights."""

from __future__ import annotations

from collections import Counter

import pytest

from baton.errors import Reason, ServiceError
from baton.scheduling.claims import Claim
from services.decode.scheduler import Cause, SlotScheduler


def claim(name: str, tenant: str, weight: int = 1) -> Claim:
    """A claim of a tenant."""
    return Claim(request_id=name, tenant=tenant, weight=weight)


def enter(slots: SlotScheduler, *claims: Claim) -> None:
    """All begin to wait, in order."""
    for one in claims:
        slots.enter(one, 0.0)


def running(slots: SlotScheduler, *claims: Claim) -> None:
    """All run."""
    enter(slots, *claims)
    for name in slots.admit(0.0):
        slots.settle(name)
    assert slots.active == len(claims)


def test_slots_and_turns_go_by_weight() -> None:
    """Of six slots a tenant of weight 2 has four beside one of weight 1, whoever came first."""
    for first, second in ((1, 2), (2, 1)):
        slots = SlotScheduler(6)
        weights = {"a": first, "b": second}
        running(slots, *(claim(f"a{index}", "a", weight=first) for index in range(6)))
        enter(slots, *(claim(f"b{index}", "b", weight=second) for index in range(6)))
        while (found := slots.preemption(0.0)) is not None:
            assert found.cause is Cause.TENANT
            slots.preempt(found.request_id, found.cause, 0.0)
            for name in slots.admit(0.0):
                slots.settle(name)
            slots.settle(found.request_id)
        waiting = Counter(f"{name}{index}"[0] for name in "ab" for index in range(6)
                          if slots.is_waiting(f"{name}{index}"))  # fmt: skip
        assert {name: 6 - waiting[name] for name in "ab"} == {
            name: 2 * weight for name, weight in weights.items()
        }


def test_one_slot_is_a_heavier_tenants_for_longer() -> None:
    """Endless requests of two tenants: over many turns tokens are as 3 to 1."""
    slots = SlotScheduler(1)
    enter(slots, claim("heavy", "h", weight=3), claim("light", "l"))
    got: Counter[str] = Counter()
    for _ in range(4000):
        while (found := slots.preemption(0.0)) is not None:
            slots.preempt(found.request_id, found.cause, 0.0)
            slots.settle(found.request_id)
            for name in slots.admit(0.0):
                slots.settle(name)
        for name in slots.admit(0.0):
            slots.settle(name)
        runs = next(name for name in ("heavy", "light") if not slots.is_waiting(name))
        slots.served(runs, 8, 0.0)
        got[runs] += 8
    assert got["heavy"] / got["light"] == pytest.approx(3.0, rel=0.1)


def test_a_step_with_a_budget_goes_by_weight() -> None:
    """Of four tokens a step a tenant of weight 3 has three."""
    slots = SlotScheduler(16)
    claims = [claim(f"h{index}", "h", weight=3) for index in range(6)]
    claims += [claim(f"l{index}", "l") for index in range(6)]
    running(slots, *claims)
    counts: Counter[str] = Counter()
    for _ in range(30):
        chosen = slots.choose_step([one.request_id for one in claims], 4)
        counts.update(name[0] for name in chosen)
    assert counts["h"] == 3 * counts["l"]


def test_a_full_queue_still_takes_what_a_tenant_with_less_than_its_share_brings() -> None:
    """Others filled slots and queue: it comes in up to its part; those others do not, and nobody
    past the bound.
    """
    slots = SlotScheduler(2, 4)
    running(slots, claim("a0", "a"), claim("a1", "a"))
    enter(slots, *(claim(f"a{index}", "a") for index in range(2, 6)))
    with pytest.raises(ServiceError) as caught:
        enter(slots, claim("a6", "a"))
    assert caught.value.reason is Reason.QUEUE_FULL
    slots.reserve("b0", 0.0, 10.0, "b")
    enter(slots, claim("b1", "b"), claim("b0", "b"), claim("b2", "b"))
    with pytest.raises(ServiceError):
        slots.reserve("b3", 0.0, 10.0, "b")
    enter(slots, claim("c0", "c"))
    for late in ("c", "d"):
        with pytest.raises(ServiceError):
            enter(slots, claim(f"{late}1", late))
    slots.check_invariants()
    assert slots.preemption(0.0) is not None, "and it has not to wait for the others' end"
