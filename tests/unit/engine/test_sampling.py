"""Sampling as a pure function: order of steps, filters, draws, penalties, log-probabilities."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from baton.engine.finish import EndRule, TokenEnd
from baton.engine.sampling import sample, uniform
from baton.errors import Reason, ServiceError
from baton.sampling_parameters import SamplingParameters

SEEDED = SamplingParameters(seed=1)
GREEDY = SamplingParameters(temperature=0.0)

logits_arrays = hnp.arrays(
    np.float32, st.integers(2, 40), elements=st.floats(-30, 30, width=32, allow_nan=False)
)
sampled_parameters = st.builds(
    SamplingParameters,
    temperature=st.floats(0.01, 2.0),
    top_k=st.none() | st.integers(1, 50),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
    repetition_penalty=st.floats(0.5, 2.0),
    frequency_penalty=st.floats(-2.0, 2.0),
    presence_penalty=st.floats(-2.0, 2.0),
    seed=st.integers(-(2**63), 2**63 - 1),
)


def draws(logits, parameters, count: int) -> list[int]:
    """Tokens at `count` positions that all see the same logits."""
    array = np.array(logits, np.float32)
    return [sample(array, parameters, [0] * n, []).token_id for n in range(1, count + 1)]


def philox_4x64_10(counter: list[int], key: list[int]) -> int:
    """The first output word of Philox-4x64-10, from its published definition."""
    mask = (1 << 64) - 1
    for _ in range(10):
        high0, low0 = divmod(0xD2E7470EE14C6C93 * counter[0], 1 << 64)
        high1, low1 = divmod(0xCA5A826395121157 * counter[2], 1 << 64)
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B97F4A7C15) & mask, (key[1] + 0xBB67AE8584CAA73B) & mask]
    return counter[0]


@given(seed=st.integers(-(2**63), 2**63 - 1), position=st.integers(0, 2**32))
def test_uniform_is_the_documented_counter_function(seed, position):
    """A worker in another language must draw the same number: Philox by its definition."""
    word = philox_4x64_10([position + 1, 0, 0, 0], [seed % 2**64, int.from_bytes(b"baton/v1")])
    assert uniform(seed, position) == (word >> 11) / 2**53


def test_uniform_is_uniform_over_positions_and_seeds():
    """Neighbouring positions and seeds must not be alike, or texts would repeat."""
    by_position = np.array([uniform(7, n) for n in range(4000)])
    by_seed = np.array([uniform(n, 7) for n in range(4000)])
    for values in (by_position, by_seed):
        counts = np.histogram(values, 10, (0.0, 1.0))[0]
        assert np.all(np.abs(counts - 400) < 100)
        assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 0.06


@given(logits=logits_arrays, parameters=sampled_parameters, data=st.data())
def test_sampling_is_pure_and_splits_history_anywhere(logits, parameters, data):
    """Without a repetition across the border, where the prompt ends changes no draw."""
    ids = data.draw(st.lists(st.integers(0, logits.size - 1), max_size=8))
    plain = replace(parameters, frequency_penalty=0.0, presence_penalty=0.0)
    before = logits.copy()
    chosen = {sample(logits, plain, ids[:cut], ids[cut:]).token_id for cut in range(len(ids) + 1)}
    assert len(chosen) == 1
    np.testing.assert_array_equal(logits, before)


@given(logits=logits_arrays, parameters=sampled_parameters)
def test_drawn_token_survives_every_filter(logits, parameters):
    """Whatever is drawn stands among the top k, in the nucleus, and above min_p, by definition."""
    plain = replace(parameters, repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0)
    token = sample(logits, plain, [], []).token_id
    scaled = logits.astype(np.float64) / plain.temperature
    weights = np.exp(scaled - scaled.max())
    rank = int(np.sum(weights > weights[token]))
    assert rank < (plain.top_k or logits.size)
    kept = np.sort(weights)[::-1][: plain.top_k]
    before = kept[kept > weights[token]].sum()
    assert before < plain.top_p * kept.sum() * (1 + 1e-9)
    assert weights[token] >= plain.min_p * weights.max() * (1 - 1e-9)


def test_draws_follow_the_distribution():
    """The inverse CDF gives each token its share, in ratio to the softmax at the temperature."""
    logits = np.log(np.array([0.5, 0.25, 0.15, 0.1]))
    shares = np.bincount(draws(logits, SEEDED, 4000), minlength=4) / 4000
    np.testing.assert_allclose(shares, [0.5, 0.25, 0.15, 0.1], atol=0.03)
    hot = np.bincount(draws(logits, replace(SEEDED, temperature=2.0), 4000), minlength=4) / 4000
    expected = np.sqrt([0.5, 0.25, 0.15, 0.1])
    np.testing.assert_allclose(hot, expected / expected.sum(), atol=0.03)


def test_top_k_keeps_exactly_k_even_among_equals():
    """top_k 1 must mean greedy, ties to the lowest id."""
    assert set(draws([1.0, 3.0, 3.0, 3.0], replace(SEEDED, top_k=1), 50)) == {1}
    assert set(draws([1.0, 3.0, 3.0, 3.0], replace(SEEDED, top_k=2), 200)) == {1, 2}


def test_top_p_keeps_the_fewest_tokens_that_reach_it():
    """The token that crosses the threshold belongs to the nucleus, the next does not."""
    logits = np.log([0.1, 0.2, 0.3, 0.4])
    assert set(draws(logits, replace(SEEDED, top_p=0.65), 300)) == {3, 2}
    assert set(draws(logits, replace(SEEDED, top_p=0.75), 300)) == {3, 2, 1}
    assert set(draws(logits, replace(SEEDED, top_p=1e-9), 50)) == {3}


def test_top_p_looks_beyond_its_first_candidates():
    """A flat distribution needs thousands of tokens for its nucleus; none may be cut short."""
    flat = np.zeros(20_000, np.float32)
    tokens = draws(flat, replace(SEEDED, top_p=0.9), 400)
    assert max(tokens) < 18_001
    assert max(tokens) > 15_000


def test_min_p_drops_the_unlikely():
    """Relative to the most likely token."""
    logits = np.log([0.6, 0.35, 0.05])
    assert set(draws(logits, replace(SEEDED, min_p=0.1), 300)) == {0, 1}


@pytest.mark.parametrize("temperature", [1e-300, 1e-12, 0.01])
def test_tiny_temperature_acts_greedily(temperature):
    """Dividing by almost nothing must neither overflow nor warn."""
    assert set(draws([1.0, 2.0, 1.9], replace(SEEDED, temperature=temperature), 50)) == {1}


def test_greedy_takes_the_lowest_of_equals_and_needs_no_seed():
    """Two workers must agree on ties."""
    assert sample(np.array([1, 5, 5], np.float32), GREEDY, [], []).token_id == 1


def test_repetition_penalty_covers_prompt_and_output_of_either_sign():
    """Positive scores are divided, negative ones multiplied; both kinds of history count."""
    logits = np.array([4.0, 3.9, -1.0], np.float32)
    penalised = replace(GREEDY, repetition_penalty=1.5)
    assert sample(logits, penalised, [0], []).token_id == 1
    assert sample(logits, penalised, [], [0]).token_id == 1
    assert sample(logits, penalised, [0, 1], []).token_id == 0
    negative = np.array([-1.0, -1.2], np.float32)
    assert sample(negative, penalised, [0], []).token_id == 1


def test_output_penalties_count_output_only():
    """As OpenAI: frequency by count, presence once, the prompt not at all."""
    logits = np.array([3.0, 2.4], np.float32)
    frequency = replace(GREEDY, frequency_penalty=0.5)
    assert sample(logits, frequency, [0, 0, 0], []).token_id == 0
    assert sample(logits, frequency, [], [0]).token_id == 0
    assert sample(logits, frequency, [], [0, 0]).token_id == 1
    presence = replace(GREEDY, presence_penalty=0.5)
    assert sample(logits, presence, [], [0, 0, 0]).token_id == 0
    assert sample(logits, replace(presence, presence_penalty=0.7), [], [0]).token_id == 1


def test_logit_bias_moves_and_bans():
    """-100 bans, +100 forces, as OpenAI promises; an unknown id is an error."""
    logits = np.array([10.0, 9.0, 0.0], np.float32)
    assert sample(logits, replace(GREEDY, logit_bias={0: -100}), [], []).token_id == 1
    assert sample(logits, replace(GREEDY, logit_bias={2: 100}), [], []).token_id == 2
    with pytest.raises(ServiceError) as caught:
        sample(logits, replace(GREEDY, logit_bias={3: 1.0}), [], [])
    assert caught.value.field == "logit_bias"


def test_min_tokens_masks_every_ending_token_until_reached():
    """The mask lifts exactly when min_tokens outputs exist; ignored end tokens are not masked."""
    logits = np.array([9.0, 8.0, 7.0], np.float32)
    parameters = replace(GREEDY, min_tokens=2, stop_token_ids=(1,))
    assert sample(logits, parameters, [], [], end_token_ids=[0]).token_id == 2
    assert sample(logits, parameters, [5] * 9, [2], end_token_ids=[0]).token_id == 2
    assert sample(logits, parameters, [], [2, 2], end_token_ids=[0]).token_id == 0
    ignoring = replace(parameters, ignore_eos=True)
    assert sample(logits, ignoring, [], [], end_token_ids=[0]).token_id == 0
    with pytest.raises(ServiceError) as caught:
        sample(logits, parameters, [], [], end_token_ids=[0, 2])
    assert caught.value.field == "min_tokens"


@given(logits=logits_arrays, parameters=sampled_parameters, top=st.integers(0, 20))
def test_logprobs_are_those_of_the_raw_logits(logits, parameters, top):
    """Temperature, penalties and filters change the choice, not what is reported about it."""
    asked = replace(parameters, logprobs=True, top_logprobs=top)
    result = sample(logits, asked, [0], [1])
    values = logits.astype(np.float64)
    expected = values - values.max() - np.log(np.exp(values - values.max()).sum())
    assert result.logprob == pytest.approx(expected[result.token_id], abs=1e-9)
    assert len(result.top_logprobs) == min(top, logits.size)
    shown = [entry.logprob for entry in result.top_logprobs]
    np.testing.assert_allclose(shown, np.sort(expected)[::-1][: len(shown)], atol=1e-9)
    assert all(
        entry.logprob == pytest.approx(expected[entry.token_id]) for entry in result.top_logprobs
    )
    without = sample(logits, parameters, [0], [1])
    assert without.logprob is None
    assert without.token_id == result.token_id


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_broken_logits_are_an_error_not_a_token(bad):
    """A fault may cost time, never a wrong token."""
    with pytest.raises(ServiceError) as caught:
        sample(np.array([1.0, bad, 0.0], np.float32), SEEDED, [], [])
    assert caught.value.reason is Reason.INTERNAL


def test_missing_seed_is_an_error():
    """A draw that no log could repeat must not happen."""
    with pytest.raises(ServiceError) as caught:
        sample(np.zeros(3, np.float32), SamplingParameters(), [], [])
    assert caught.value.field == "seed"


def test_end_rule_names_the_first_reason_that_holds():
    """A stop token wins over a limit reached by the same token: the answer is complete."""
    rule = EndRule(end_token_ids=frozenset({2}), max_context=10)
    parameters = SamplingParameters(max_tokens=3, stop_token_ids=(7,))

    def end(token: int, output: int, total: int, given=parameters) -> TokenEnd | None:
        return rule.end_after(token, given, output_tokens=output, total_tokens=total)

    assert end(5, 1, 4) is None
    assert end(5, 3, 6) is TokenEnd.MAX_TOKENS
    assert end(5, 2, 10) is TokenEnd.CONTEXT_FULL
    assert end(2, 3, 10) is TokenEnd.END_TOKEN
    assert end(7, 3, 10) is TokenEnd.STOP_TOKEN
    ignoring = replace(parameters, ignore_eos=True)
    assert end(2, 1, 4, ignoring) is None
    assert end(7, 1, 4, ignoring) is TokenEnd.STOP_TOKEN
    assert [reason.openai_finish_reason for reason in TokenEnd] == [
        "stop",
        "stop",
        "length",
        "length",
    ]
