"""Where a prompt is prefilled: apart or by the decode worker itself.

Owns the decision and its words. Pure: facts in, a placement out. Without a policy file every
request with a compatible pair goes remote.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, unique


@unique
class PrefillMode(StrEnum):
    """The operator's switch."""

    AUTO = "auto"
    REMOTE = "remote"
    LOCAL = "local"


@unique
class Placement(StrEnum):
    """Where this prompt goes now."""

    REMOTE = "remote"
    LOCAL = "local"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class PairFacts:
    """What routing found: is there a pair, a ready prefill worker at all, a decode worker."""

    has_compatible_pair: bool
    has_decode: bool
    has_room_in_prefill_queue: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementDecision:
    """A placement with the reason that logs and metrics carry; `is_fallback` when not as wanted."""

    placement: Placement
    reason: str
    is_fallback: bool = False


def place(mode: PrefillMode, facts: PairFacts) -> PlacementDecision:
    """Decide the placement.

    `auto` goes remote where it can and falls back to local prefill; `remote` refuses instead of
    falling back; `local` never uses a prefill worker.
    """
    if not facts.has_decode:
        return PlacementDecision(placement=Placement.REFUSED, reason="no_decode_worker")
    if mode is PrefillMode.LOCAL:
        return PlacementDecision(placement=Placement.LOCAL, reason="mode_local")
    if facts.has_compatible_pair and facts.has_room_in_prefill_queue:
        return PlacementDecision(placement=Placement.REMOTE, reason="compatible_pair")
    reason = "prefill_queue_full" if facts.has_compatible_pair else "no_prefill_worker"
    if mode is PrefillMode.REMOTE:
        return PlacementDecision(placement=Placement.REFUSED, reason=reason)
    return PlacementDecision(placement=Placement.LOCAL, reason=reason, is_fallback=True)
