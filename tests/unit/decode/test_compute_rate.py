"""How fast a decode worker computes prompts, as it says in its heartbeats."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.metrics import Metrics
from services.decode.measures import ComputeRate, DecodeMeasures


def test_a_worker_knows_its_rate_before_its_first_prompt() -> None:
    """What it measured at its start; the first request must not wait as if nobody knew."""
    measures = DecodeMeasures(Metrics("decode"), 500.0)
    assert measures.compute_rate == pytest.approx(500.0)


def test_recomputed_and_prefilled_prompts_both_teach_it() -> None:
    """Either is the same computation."""
    measures = DecodeMeasures(Metrics("decode"), 500.0)
    measures.recomputed(4096, 16.0)
    between = measures.compute_rate
    assert 256.0 < between < 300.0
    measures.prefilled(4096, 4.0)
    assert between < measures.compute_rate < 1024.0


def test_a_short_prompt_weighs_as_little_as_it_is() -> None:
    """One token takes as long as a small chunk: by itself it would say a tenth of the rate."""
    rate = ComputeRate(600.0)
    rate.add(1000, 2.0)
    rate.add(1, 0.05)
    assert rate.tokens_per_s > 450.0


@given(st.lists(st.tuples(st.integers(-1, 5000), st.floats(-1.0, 100.0)), max_size=30))
def test_a_rate_once_known_stays_known_and_within_what_was_measured(
    runs: list[tuple[int, float]],
) -> None:
    """Never zero, never outside of what any prompt showed."""
    rate, seen = ComputeRate(300.0), [300.0]
    for tokens, seconds in runs:
        rate.add(tokens, seconds)
        if tokens > 0 and seconds > 0.0:
            seen.append(tokens / seconds)
        assert min(seen) * 0.999 <= rate.tokens_per_s <= max(seen) * 1.001
