"""Which prefill and which decode worker: estimates and choices, as pure functions.

Owns predicted time to first token, the decode choice and the pool size. Reads no clock, does no
I/O and believes nothing a client says.

Invariants: an unhealthy worker or one without a rate predicts infinity; ties go to the smaller
worker id, so that equal inputs give equal choices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from baton.errors import Reason, ServiceError

ROUTER_SECONDS: Final = 0.01
"""What the gateway's own part of a request costs."""

TARGET_UTILISATION: Final = 0.70


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCandidate:
    """A prefill worker and what is known of it; tokens, tokens per second, seconds."""

    worker_id: str
    queued_tokens: int
    token_rate: float
    cached_tokens: int = 0
    transfer_s: float = 0.0
    is_healthy: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCandidate:
    """A decode worker and what is known of it. `is_local`: on the node where the KV will lie."""

    worker_id: str
    active: int
    active_max: int
    pages_free: int
    tpot_s: float | None = None
    is_local: bool = True


def predicted_ttft_s(candidate: PrefillCandidate, input_tokens: int) -> float:
    """Seconds to the first token at this worker; infinite when it cannot serve.

    Raises INVALID_REQUEST for a negative input.
    """
    if input_tokens < 0:
        raise ServiceError(
            Reason.INVALID_REQUEST, "input_tokens must not be negative", field="input_tokens"
        )
    if not candidate.is_healthy or not candidate.token_rate > 0.0:
        return math.inf
    cached = min(max(candidate.cached_tokens, 0), input_tokens)
    tokens = candidate.queued_tokens + input_tokens - cached
    return ROUTER_SECONDS + tokens / candidate.token_rate + max(candidate.transfer_s, 0.0)


def choose_prefill(
    candidates: Iterable[PrefillCandidate], input_tokens: int, budget_s: float
) -> PrefillCandidate | None:
    """The worker with the smallest predicted time, or None when all are above the budget.

    Raises INVALID_REQUEST for a negative input or a budget that is not positive.
    """
    if not budget_s > 0.0:
        raise ServiceError(
            Reason.INVALID_REQUEST, "budget_s must be greater than zero", field="budget_s"
        )
    ranked = sorted(
        ((predicted_ttft_s(one, input_tokens), one.worker_id, one) for one in candidates),
        key=lambda item: item[:2],
    )
    if not ranked or ranked[0][0] > budget_s or math.isinf(ranked[0][0]):
        return None
    return ranked[0][2]


def choose_decode(
    candidates: Iterable[DecodeCandidate], pages_needed: int
) -> DecodeCandidate | None:
    """The least busy worker that has a slot and the pages; None when there is none.

    Locality comes first, then the share of slots in use, the current pace, free pages, the id.
    """
    fitting = [
        one for one in candidates if one.active < one.active_max and one.pages_free >= pages_needed
    ]
    return min(fitting, key=_decode_rank, default=None)


def _decode_rank(one: DecodeCandidate) -> tuple[bool, float, float, int, str]:
    return (
        not one.is_local,
        one.active / one.active_max,
        one.tpot_s or 0.0,
        -one.pages_free,
        one.worker_id,
    )


def pool_size(
    *,
    requests_per_s: float,
    mean_tokens: float,
    token_rate: float,
    target_utilisation: float = TARGET_UTILISATION,
) -> int:
    """Workers needed: max(1, ceil(requests x mean tokens / (rate x target utilisation))).

    Raises INVALID_REQUEST unless the rate is positive and the utilisation inside (0, 1).
    """
    if not token_rate > 0.0:
        raise ServiceError(
            Reason.INVALID_REQUEST, "token_rate must be positive", field="token_rate"
        )
    if not 0.0 < target_utilisation < 1.0:
        raise ServiceError(
            Reason.INVALID_REQUEST,
            "target_utilisation must lie between 0 and 1, both excluded",
            field="target_utilisation",
        )
    return max(1, math.ceil(requests_per_s * mean_tokens / (token_rate * target_utilisation)))
