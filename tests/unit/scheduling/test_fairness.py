"""What fair is: by weight, without saving up, bounded."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.scheduling.fairness import (
    REMEMBERED_MAX,
    ServiceLedger,
    TenantTurns,
    is_below_share,
)


def test_service_of_long_ago_counts_no_more() -> None:
    """And tenants without number do not fill the memory."""
    ledger = ServiceLedger(half_life_s=10.0, tenants_max=8)
    ledger.charge("a", 100.0, 0.0)
    assert ledger.served("a", 10.0) == pytest.approx(50.0)
    ledger.charge("a", 1.0, 10.0)
    assert ledger.served("a", 10.0) == pytest.approx(51.0)
    for index in range(50):
        ledger.charge(f"t{index}", 1.0, 10.0)
    assert len(ledger) <= 8
    assert ledger.served("a", 10.0) == pytest.approx(51.0)


def test_service_counts_by_weight() -> None:
    """Who weighs four was served a quarter of what it got."""
    ledger = ServiceLedger()
    ledger.charge("a", 100.0, 0.0, 4)
    ledger.charge("b", 30.0, 0.0)
    assert ledger.served("a", 0.0) < ledger.served("b", 0.0)


def turns_of(
    turns: TenantTurns, wanting: list[str], count: int, costs: dict[str, float]
) -> list[str]:
    """Who gets so many turns, when all of `wanting` want each of them."""
    names = []
    for _ in range(count):
        name = turns.next_of(wanting)
        assert name is not None
        turns.charge(name, costs.get(name, 1.0))
        names.append(name)
    return names


def test_turns_that_cost_more_are_fewer() -> None:
    """What is shared is what they cost, not their number."""
    turns = TenantTurns()
    turns.come("long")
    turns.come("short")
    names = Counter(turns_of(turns, ["long", "short"], 40, {"long": 3.0}))
    assert names == {"short": 30, "long": 10}


def test_who_comes_late_is_next_and_gets_no_more_than_its_share_from_then_on() -> None:
    """Nobody saves up, nobody pays for having come late."""
    turns = TenantTurns()
    turns.come("early")
    turns_of(turns, ["early"], 100, {})
    turns.come("late")
    assert turns_of(turns, ["early", "late"], 6, {}) == ["late", "early"] * 3


def test_who_left_and_comes_again_has_not_forgotten_what_it_had() -> None:
    """Leaving for a moment is no way to get more."""
    turns = TenantTurns()
    turns.come("steady")
    turns.come("jumpy")
    names: list[str] = []
    for _ in range(20):
        names += turns_of(turns, ["steady", "jumpy"], 1, {})
        if names[-1] == "jumpy":
            turns.come("jumpy")
    assert names.count("jumpy") == 10


def test_nobody_wants_a_turn() -> None:
    """Then nobody is next."""
    assert TenantTurns().next_of(()) is None


def test_who_leaves_after_each_turn_still_has_its_weight() -> None:
    """As prompts do between two chunks: nothing of what is owed to a heavy tenant is forgotten."""
    turns, names = TenantTurns(), list[str]()
    for _ in range(40):
        for name in ("heavy", "light"):
            turns.come(name)
        chosen = turns.next_of(("heavy", "light"))
        assert chosen is not None
        turns.charge(chosen, 1.0, 3 if chosen == "heavy" else 1)
        names.append(chosen)
    assert Counter(names) == {"heavy": 30, "light": 10}


def test_tenants_without_number_do_not_fill_the_memory() -> None:
    """Those that had no more than a newcomer are forgotten first."""
    turns = TenantTurns()
    turns.come("here")
    turns.charge("here", 1e6)
    for index in range(3 * REMEMBERED_MAX):
        turns.come(f"t{index}")
        turns.charge(f"t{index}", 1.0)
    assert len(turns) <= REMEMBERED_MAX + 1
    turns.come("new")
    assert turns.next_of(["here", "new"]) == "new"


@given(
    st.dictionaries(st.sampled_from("abcde"), st.integers(1, 9), min_size=2),
    st.lists(st.integers(1, 50), min_size=50, max_size=300),
)
def test_nobody_is_ahead_by_more_than_a_turn(weights: dict[str, int], costs: list[int]) -> None:
    """Of those who always want, by weight, whatever single turns cost."""
    turns, had = TenantTurns(), dict.fromkeys(weights, 0.0)
    for name in weights:
        turns.come(name)
    for cost in costs:
        chosen = turns.next_of(weights)
        assert chosen is not None
        turns.charge(chosen, cost, weights[chosen])
        had[chosen] += cost / weights[chosen]
    assert max(had.values()) - min(had.values()) <= 50.0


def test_a_share_of_places_is_what_nobody_else_wants() -> None:
    """Alone all of them; of three tenants a third."""
    assert is_below_share(9, 10, 1)
    assert not is_below_share(10, 10, 1)
    assert [is_below_share(own, 10, 3) for own in (0, 3, 4)] == [True, True, False]
