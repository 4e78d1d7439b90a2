"""Sampling: from logits and a history of token ids to the next token. Pure numpy, no state.

Owns the order of the steps: logit bias, `min_tokens` mask, repetition, frequency and presence
penalties, temperature, top-k, top-p, min-p, then one draw. Log-probabilities are those of the raw
logits, before any of it, as OpenAI and vLLM report them.

Invariant: the result is a function of (logits, parameters, token ids, position) alone. The one
random number of a position is a counter function of (seed, position), so any worker that replays
the log continues the sequence with the same draws. Never imports torch, never reads a clock.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from baton.engine.finish import ending_token_ids, is_end_masked
from baton.errors import Reason, ServiceError
from baton.sampling_parameters import SamplingParameters

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]

_SEED_MASK: Final = (1 << 64) - 1
# Separates our draws from any other use of the same seed with the same generator.
_KEY_DOMAIN: Final = 0x6261746F6E2F7631  # "baton/v1"
# Nucleus candidates are looked for among this many best tokens before the whole vocabulary.
_NUCLEUS_FIRST_TRY: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token id and the natural logarithm of its probability under the raw logits."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """The chosen token; `logprob` and `top_logprobs` are filled only when the request asked."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()


def sample(
    logits: NDArray[np.float32],
    parameters: SamplingParameters,
    prompt_ids: Sequence[int],
    generated_ids: Sequence[int],
    *,
    end_token_ids: Collection[int] = (),
) -> SampledToken:
    """Choose the token at position `len(prompt_ids) + len(generated_ids)`.

    `logits` is f32 [vocabulary], never changed. `end_token_ids` are the model's, for `min_tokens`.
    Raises ServiceError INTERNAL for logits that are not finite, INVALID_REQUEST for a bias on a
    token that does not exist or a missing seed.
    """
    assert logits.ndim == 1
    if not np.isfinite(logits.max()):
        raise ServiceError(Reason.INTERNAL, "the logits are not finite; no token can be chosen")
    scores = _adjusted(logits, parameters, prompt_ids, generated_ids, end_token_ids)
    if parameters.is_greedy:
        token_id = int(scores.argmax())
    else:
        position = len(prompt_ids) + len(generated_ids)
        token_id = _draw(scores, parameters, position)
    if not parameters.logprobs:
        return SampledToken(token_id=token_id)
    logprob, top = _raw_logprobs(logits, token_id, parameters.top_logprobs)
    return SampledToken(token_id=token_id, logprob=logprob, top_logprobs=top)


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of one position: the top 53 bits of Philox-4x64-10.

    Key (seed mod 2**64, "baton/v1" as u64), counter (position + 1, 0, 0, 0), first output word.
    The constructor's counter is the value before numpy's own increment.
    """
    key = np.array([seed & _SEED_MASK, _KEY_DOMAIN], dtype=np.uint64)
    counter = np.array([position, 0, 0, 0], dtype=np.uint64)
    word = int(np.random.Philox(key=key, counter=counter).random_raw())
    return (word >> 11) * 2.0**-53


def _adjusted(
    logits: NDArray[np.float32],
    parameters: SamplingParameters,
    prompt_ids: Sequence[int],
    generated_ids: Sequence[int],
    end_token_ids: Collection[int],
) -> Floats:
    scores = logits.astype(np.float64)
    if parameters.logit_bias:
        parameters.validate_for_vocabulary(scores.size)
        ids = np.fromiter(parameters.logit_bias.keys(), np.int64)
        scores[ids] += np.fromiter(parameters.logit_bias.values(), np.float64)
    if is_end_masked(parameters, len(generated_ids)):
        ending = ending_token_ids(parameters, end_token_ids)
        scores[np.array(ending, np.int64)] = -np.inf
        if not np.isfinite(scores.max()):
            raise ServiceError(
                Reason.INVALID_REQUEST,
                "min_tokens with these stop_token_ids leaves no token to choose",
                field="min_tokens",
            )
    _penalise_repetition(scores, parameters, prompt_ids, generated_ids)
    _penalise_output(scores, parameters, generated_ids)
    return scores


def _penalise_repetition(
    scores: Floats,
    parameters: SamplingParameters,
    prompt_ids: Sequence[int],
    generated_ids: Sequence[int],
) -> None:
    if parameters.repetition_penalty == 1.0:
        return
    seen = np.array(sorted({*prompt_ids, *generated_ids}), np.int64)
    values = scores[seen]
    penalty = parameters.repetition_penalty
    scores[seen] = np.where(values > 0, values / penalty, values * penalty)


def _penalise_output(
    scores: Floats, parameters: SamplingParameters, generated_ids: Sequence[int]
) -> None:
    if parameters.frequency_penalty == 0.0 and parameters.presence_penalty == 0.0:
        return
    ids, counts = np.unique(np.array(generated_ids, np.int64), return_counts=True)
    scores[ids] -= parameters.frequency_penalty * counts + parameters.presence_penalty


def _draw(scores: Floats, parameters: SamplingParameters, position: int) -> int:
    if parameters.seed is None:
        raise ServiceError(
            Reason.INVALID_REQUEST, "seed must be set before sampling starts", field="seed"
        )
    kept, weights = _candidates(scores, parameters)
    cumulative = np.cumsum(weights)
    target = uniform(parameters.seed, position) * cumulative[-1]
    index = int(np.searchsorted(cumulative, target, side="right"))
    # Rounding may carry the target onto the total; the last token with any weight then stands.
    index = min(index, int(np.flatnonzero(weights)[-1]))
    return int(kept[index])


def _candidates(scores: Floats, parameters: SamplingParameters) -> tuple[Ids, Floats]:
    """Token ids in ascending order and their unnormalised weights, after every filter."""
    kept: Ids = np.arange(scores.size, dtype=np.int64)
    # The maximum goes first, so that no temperature, however small, can overflow.
    scaled = (scores - scores.max()) / parameters.temperature
    if parameters.top_k is not None and parameters.top_k < scaled.size:
        kept = _largest(scaled, parameters.top_k)
        kept.sort()
    weights: Floats = np.exp(scaled[kept])
    if parameters.top_p < 1.0:
        chosen = _nucleus(weights, parameters.top_p)
        chosen.sort()
        kept, weights = kept[chosen], weights[chosen]
    if parameters.min_p > 0.0:
        is_likely = weights >= parameters.min_p * weights.max()
        kept, weights = kept[is_likely], weights[is_likely]
    return kept, weights


def _largest(values: Floats, count: int) -> Ids:
    """The indices of the `count` largest values, largest first, equal values by index."""
    if count >= values.size:
        return np.argsort(-values, kind="stable")
    threshold = np.partition(values, values.size - count)[values.size - count]
    indices = np.flatnonzero(values >= threshold)
    order = np.argsort(-values[indices], kind="stable")
    return indices[order[:count]]


def _nucleus(weights: Floats, top_p: float) -> Ids:
    """The fewest indices, likeliest first, that hold at least `top_p` of the whole weight."""
    goal = top_p * float(weights.sum())
    count = min(_NUCLEUS_FIRST_TRY, weights.size)
    while True:
        order = _largest(weights, count)
        cumulative = np.cumsum(weights[order])
        if cumulative[-1] >= goal or count == weights.size:
            return order[: int(np.searchsorted(cumulative, goal, side="left")) + 1]
        count = min(count * 16, weights.size)


def _raw_logprobs(
    logits: NDArray[np.float32], token_id: int, top_count: int
) -> tuple[float, tuple[TokenLogprob, ...]]:
    values = logits.astype(np.float64)
    values -= values.max()
    values -= np.log(np.exp(values).sum())
    best = _largest(values, min(top_count, values.size)) if top_count else ()
    top = tuple(TokenLogprob(token_id=int(i), logprob=float(values[i])) for i in best)
    return float(values[token_id]), top
