"""The budget of local prefills beside decode, and whose turn it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.scheduling.claims import Claim, ServiceClass
from services.decode.local_prefill import (
    REST_MAX,
    REST_S_MAX,
    STALE_STEPS,
    BudgetTerms,
    GapBudget,
    TurnQueue,
)

BLOCK, CHUNK, LAYERS = 16, 256, 30
QUIET_S = 0.010


def budget(gap: float = 2.0, tokens_per_s: float = 500.0) -> GapBudget:
    """One with the bundled model's numbers."""
    return GapBudget(
        BudgetTerms(
            gap=gap,
            chunk_tokens=CHUNK,
            block_tokens=BLOCK,
            layers=LAYERS,
            tokens_per_s=tokens_per_s,
        )
    )


def quiet(made: GapBudget, sequences: int = 4, gap_s: float = QUIET_S) -> GapBudget:
    """After a few steps with nothing beside them."""
    for _ in range(5):
        made.stepped(gap_s, sequences, is_beside=False)
    return made


# --- nobody decodes -----------------------------------------------------------------------------


def test_alone_it_takes_whole_chunks_and_no_rest() -> None:
    """Nobody would notice; the first token comes as soon as it can."""
    made = budget()
    assert (made.piece_tokens(), made.rest_s(1.0), made.wants_quiet) == (CHUNK, 0.0, False)
    for _ in range(50):
        quiet(made).stepped(1.0, 4, is_beside=True)
    assert made.rest_s(1.0) > 0.0
    made.idled()
    assert (made.piece_tokens(), made.rest_s(1.0), made.wants_quiet) == (CHUNK, 0.0, False)


# --- the gap is measured and kept ----------------------------------------------------------------


def test_a_core_to_spare_costs_nothing() -> None:
    """Steps beside a prompt are as fast as without: it never rests."""
    made = quiet(budget())
    for _ in range(1000):
        made.stepped(QUIET_S * 1.3, 4, is_beside=True)
    assert made.rest_ratio == 0.0
    assert made.beside_s == pytest.approx(QUIET_S * 1.3)


@pytest.mark.parametrize("slowdown", [1.5, 2.5, 4.0, 7.0])
@pytest.mark.parametrize("gap", [1.2, 2.0, 3.0])
def test_on_a_shared_core_the_gap_stays_within_the_budget(slowdown: float, gap: float) -> None:
    """A machine where a prompt that never rests makes a step so many times as long, and one that
    rests as much less as it rests: all but a few steps keep to the budget, or the prompt is as far
    back as it goes.
    """
    made = quiet(budget(gap))
    over = 0
    for step in range(2000):
        share = 1.0 / (1.0 + made.rest_ratio)
        took_s = QUIET_S * (1.0 + (slowdown - 1.0) * share)
        made.stepped(took_s, 4, is_beside=True)
        over += step >= 200 and took_s > gap * QUIET_S * 1.0001
    least = 1.0 + (slowdown - 1.0) / (1.0 + REST_MAX)
    assert over <= 0.05 * 1800 or least > gap


def test_a_prompt_does_not_pay_for_the_noise_of_the_machine() -> None:
    """Where every tenth quiet gap is four times as long, so are some beside a prompt: rests would
    not help. Once it is quiet again the budget is what it was.
    """
    made = quiet(budget())
    for step in range(2000):
        made.stepped(QUIET_S * (4 if step % 10 == 0 else 1), 4, is_beside=False)
    for step in range(1000):
        made.stepped(QUIET_S * (4 if step % 10 == 0 else 1), 4, is_beside=True)
    assert made.rest_ratio <= 1.0
    for _ in range(1000):
        made.stepped(QUIET_S, 4, is_beside=False)
    assert made.quiet_s == pytest.approx(QUIET_S)
    assert made.gap_max_s == pytest.approx(2 * QUIET_S)


def test_rests_fade_when_the_machine_is_free_again() -> None:
    """What was once crowded does not slow prompts for ever."""
    made = quiet(budget())
    for _ in range(50):
        made.stepped(QUIET_S * 5, 4, is_beside=True)
    assert made.rest_ratio == REST_MAX
    for _ in range(500):
        made.stepped(QUIET_S, 4, is_beside=True)
    assert made.rest_ratio == 0.0


def test_a_layer_takes_no_longer_than_the_gap_may_grow() -> None:
    """A prompt only rests between layers: one of them is what a step may have to wait for."""
    slow = quiet(budget(gap=2.0, tokens_per_s=100.0))
    # A layer of n tokens takes n / 100 / 30 s; 10 ms are those of 30 tokens, one page of 16.
    assert slow.piece_tokens() == BLOCK
    fast = quiet(budget(gap=2.0, tokens_per_s=500.0))
    assert fast.piece_tokens() == 144
    for _ in range(100):
        fast.computed(144, 144 / 2000.0)
    assert fast.piece_tokens() == CHUNK


def test_one_hiccup_is_not_a_trend() -> None:
    """A quiet step of a whole second, and one beside a prompt."""
    made = quiet(budget())
    made.stepped(1.0, 4, is_beside=False)
    assert made.quiet_s is not None
    assert made.quiet_s < 2 * QUIET_S
    made.stepped(60.0, 4, is_beside=True)
    assert made.beside_s is not None
    assert made.beside_s <= 8 * made.quiet_s


def test_a_batch_of_another_size_is_seen_quiet_first() -> None:
    """Sixteen sequences take longer than one: that is not the prompt's doing."""
    made = quiet(budget(), sequences=1)
    made.stepped(QUIET_S * 3, 16, is_beside=True)
    was_wanted = made.wants_quiet
    made.stepped(QUIET_S * 3, 16, is_beside=False)
    assert (was_wanted, made.wants_quiet) == (True, False)
    before = made.rest_ratio
    made.stepped(QUIET_S * 3.5, 16, is_beside=True)
    assert made.rest_ratio <= before


def test_what_is_quiet_is_looked_at_again() -> None:
    """Contexts grow: an old baseline would blame the prompt for it."""
    made = quiet(budget())
    for _ in range(STALE_STEPS):
        assert not made.wants_quiet
        made.stepped(QUIET_S, 4, is_beside=True)
    was_wanted = made.wants_quiet
    made.stepped(QUIET_S, 4, is_beside=False)
    assert (was_wanted, made.wants_quiet) == (True, False)


STEPS = st.lists(
    st.tuples(st.floats(-1.0, 1e6), st.integers(1, 64), st.booleans(), st.integers(0, 9)),
    max_size=60,
)


@given(STEPS, st.floats(1.01, 100.0), st.integers(1, 5000), st.floats(1e-6, 1e9))
def test_whatever_is_measured_the_budget_stays_in_its_bounds(
    steps: list[tuple[float, int, bool, int]], gap: float, chunk: int, rate: float
) -> None:
    """Whole pages, at least one, never more than a chunk; rests that end and never starve."""
    terms = BudgetTerms(
        gap=gap, chunk_tokens=chunk, block_tokens=BLOCK, layers=LAYERS, tokens_per_s=rate
    )
    made = GapBudget(terms)
    for gap_s, sequences, is_beside, what in steps:
        if what == 0:
            made.idled()
        elif what == 1:
            made.computed(sequences, gap_s)
        else:
            made.stepped(gap_s, sequences, is_beside=is_beside)
        tokens = made.piece_tokens()
        assert BLOCK <= tokens <= max(BLOCK, chunk + BLOCK - 1)
        assert tokens % BLOCK == 0
        for computed_s in (0.0, 0.001, 1e9):
            assert 0.0 <= made.rest_s(computed_s) <= min(REST_S_MAX, REST_MAX * computed_s)


# --- turns ---------------------------------------------------------------------------------------


def of(tenant: str, service_class: ServiceClass = ServiceClass.INTERACTIVE) -> Claim:
    """Some prompt of a tenant; one called `heavy` weighs three."""
    weight = 3 if tenant == "heavy" else 1
    return Claim(request_id="", tenant=tenant, service_class=service_class, weight=weight)


def served(queue: TurnQueue, asks: dict[int, str], turns: int) -> list[str]:
    """Who computes when everybody asks again at once; each turn takes a second."""
    names = []
    for asker, tenant in asks.items():
        queue.ask(asker, of(tenant))
    for _ in range(turns):
        key = queue.next_turn()
        assert key is not None
        assert queue.next_turn() is None
        names.append(asks[key])
        queue.end_turn(key, 1.0)
        queue.ask(key, of(asks[key]))
    return names


def test_a_tenants_many_prompts_do_not_hold_anothers_one() -> None:
    """Every second turn is the other tenant's."""
    asks = {**dict.fromkeys(range(100), "many"), 100: "one"}
    names = served(TurnQueue(), asks, 20)
    assert names.count("one") == 10


def test_a_heavier_tenant_gets_more_of_the_thread() -> None:
    """Three turns for each one of the other's."""
    names = served(TurnQueue(), {0: "heavy", 1: "light"}, 40)
    assert names.count("heavy") == 30


def test_batch_prompts_wait_while_an_interactive_one_asks() -> None:
    """Classes are strict; what waits goes on afterwards."""
    queue = TurnQueue()
    batch, now = of("a", ServiceClass.BATCH), of("b")
    queue.ask(0, batch)
    queue.ask(1, now)
    assert queue.next_turn() == 1
    queue.end_turn(1, 1.0)
    queue.ask(2, now)
    assert queue.next_turn() == 2
    queue.end_turn(2, 1.0)
    assert queue.next_turn() == 0


def test_prompts_of_one_tenant_take_turns() -> None:
    """A short one passes a long one chunk by chunk."""
    queue, order = TurnQueue(), []
    for asker in range(3):
        queue.ask(asker, of("t"))
    for _ in range(6):
        key = queue.next_turn()
        assert key is not None
        order.append(key)
        queue.end_turn(key, 1.0)
        queue.ask(key, of("t"))
    assert order == [0, 1, 2, 0, 1, 2]


def test_nobody_saves_up_and_nobody_pays_for_coming_late() -> None:
    """A tenant that was away takes turns from now on, no more."""
    queue = TurnQueue()
    served(queue, {0: "early"}, 50)
    queue.ask(1, of("late"))
    names = []
    asks = {0: "early", 1: "late"}
    for _ in range(10):
        key = queue.next_turn()
        assert key is not None
        names.append(asks[key])
        queue.end_turn(key, 1.0)
        queue.ask(key, of(asks[key]))
    assert abs(names.count("late") - names.count("early")) <= 1


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from("abc")), max_size=60))
def test_every_ask_is_granted_or_withdrawn_once(steps: list[tuple[int, str]]) -> None:
    """No turn is lost, whatever comes and goes."""
    queue, asked = TurnQueue(), dict[int, str]()
    granted: list[int] = []
    for key, (what, tenant) in enumerate(steps):
        if what <= 2:
            queue.ask(key, of(tenant))
            asked[key] = tenant
        elif what == 3 and asked:
            gone = next(iter(asked))
            queue.withdraw(gone, of(asked.pop(gone)))
        elif queue.holder is not None:
            queue.end_turn(queue.holder, float(what))
        chosen = queue.next_turn()
        if chosen is not None:
            assert chosen in asked
            del asked[chosen]
            granted.append(chosen)
        assert len(queue) == len(asked)
        assert queue.holder is not None or not asked
    assert len(granted) == len(set(granted))
