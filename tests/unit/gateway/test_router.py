"""Routing estimates and choices: the numbers the design promises, and the edges."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ServiceError
from services.gateway.router import (
    DecodeCandidate,
    PrefillCandidate,
    choose_decode,
    choose_prefill,
    pool_size,
    predicted_ttft_s,
)

P_A = PrefillCandidate(worker_id="p-a", queued_tokens=3000, token_rate=5000, transfer_s=0.05)
P_B = PrefillCandidate(
    worker_id="p-b", queued_tokens=5000, token_rate=5000, cached_tokens=4000, transfer_s=0.05
)


def test_predicted_ttft_gives_the_stated_numbers() -> None:
    """6,000 input tokens: 1.86 s and 1.46 s."""
    assert predicted_ttft_s(P_A, 6000) == pytest.approx(1.86)
    assert predicted_ttft_s(P_B, 6000) == pytest.approx(1.46)


def test_cheapest_within_the_budget_is_chosen_and_none_above_it() -> None:
    """p-b at 2.0 s, nobody at 0.1 s."""
    assert choose_prefill([P_A, P_B], 6000, 2.0) is P_B
    assert choose_prefill([P_A, P_B], 6000, 0.1) is None
    assert choose_prefill([], 6000, 2.0) is None


def test_equal_predictions_go_to_the_smaller_id() -> None:
    """Equal inputs give equal choices."""
    twins = [PrefillCandidate(worker_id=name, queued_tokens=0, token_rate=1) for name in "ba"]
    chosen = choose_prefill(twins, 1, 60.0)
    assert chosen is not None
    assert chosen.worker_id == "a"


def test_unhealthy_or_rateless_workers_predict_infinity() -> None:
    """They are never chosen, whatever the budget."""
    for bad in (
        PrefillCandidate(worker_id="x", queued_tokens=0, token_rate=0.0),
        PrefillCandidate(worker_id="x", queued_tokens=0, token_rate=-1.0),
        PrefillCandidate(worker_id="x", queued_tokens=0, token_rate=9.0, is_healthy=False),
        PrefillCandidate(worker_id="x", queued_tokens=0, token_rate=math.nan),
    ):
        assert predicted_ttft_s(bad, 10) == math.inf
        assert choose_prefill([bad], 10, 1e300) is None


def test_negative_input_and_budget_are_refused() -> None:
    """They are errors, not choices."""
    with pytest.raises(ServiceError):
        predicted_ttft_s(P_A, -1)
    for budget in (0.0, -1.0, math.nan):
        with pytest.raises(ServiceError):
            choose_prefill([P_A], 10, budget)


@given(
    cached=st.integers(-(10**6), 10**6),
    tokens=st.integers(0, 10**6),
    transfer=st.floats(-10, 10),
)
def test_prediction_never_falls_below_queue_and_router(
    cached: int, tokens: int, transfer: float
) -> None:
    """Cached counts are clamped to the input, negative transfers to zero."""
    one = PrefillCandidate(
        worker_id="x", queued_tokens=10, token_rate=5, cached_tokens=cached, transfer_s=transfer
    )
    assert 0.01 + 2 <= predicted_ttft_s(one, tokens) <= 0.01 + (10 + tokens) / 5 + 10


def test_decode_choice_needs_a_slot_and_pages_and_prefers_the_least_busy() -> None:
    """Locality first, then load, pace, pages, id."""

    def one(name: str, active: int, **more: object) -> DecodeCandidate:
        return DecodeCandidate(
            worker_id=name, active=active, active_max=4, **{"pages_free": 10, **more}
        )

    assert choose_decode([one("a", 4)], 1) is None
    assert choose_decode([one("a", 0)], 11) is None
    assert choose_decode([one("a", 2), one("b", 1)], 1) == one("b", 1)
    near, far = one("z", 3), one("a", 0, is_local=False)
    assert choose_decode([far, near], 1) is near
    fast, slow = one("b", 1, tpot_s=0.01), one("a", 1, tpot_s=0.02)
    assert choose_decode([slow, fast], 1) is fast


def test_pool_size_gives_the_stated_numbers() -> None:
    """2 rps, 4,000 in, 500 out: 2 prefill, 2 decode; never below 1."""
    prefill = pool_size(requests_per_s=2, mean_tokens=4000, token_rate=5000, target_utilisation=0.8)
    decode = pool_size(requests_per_s=2, mean_tokens=500, token_rate=800, target_utilisation=0.8)
    assert (prefill, decode) == (2, 2)
    assert pool_size(requests_per_s=0, mean_tokens=0, token_rate=1) == 1
    for utilisation in (0.0, 1.0):
        with pytest.raises(ServiceError):
            pool_size(requests_per_s=1, mean_tokens=1, token_rate=1, target_utilisation=utilisation)
    with pytest.raises(ServiceError):
        pool_size(requests_per_s=1, mean_tokens=1, token_rate=0)
