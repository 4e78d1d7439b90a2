"""What chunk size a curve of measurements speaks for. Pure.

Owns the numbers of a point and the choice. Never measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from baton.worker.chunk_profile import CurvePoint

SLACK: Final = 0.05
"""Two sizes are as good when they differ by less: measurements repeat no better."""


@dataclass(slots=True, kw_only=True)
class Rounds:
    """What was seen with one chunk size; seconds.

    `quiet_s` and `beside_s` are gaps between the streams' tokens, without and with a prompt under
    way; `first_token_s` how long each prompt took to its first token.
    """

    quiet_s: list[float] = field(default_factory=list)
    beside_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The size, and why in a few words."""

    chunk_tokens: int
    reason: str


def point_of(chunk_tokens: int, rounds: Rounds) -> CurvePoint:
    """One point of the curve; there must be first tokens and gaps of both kinds."""
    quiet, beside = np.array(rounds.quiet_s), np.array(rounds.beside_s)
    firsts = np.array(rounds.first_token_s)
    assert min(len(quiet), len(beside), len(firsts)) > 0, "nothing was measured"
    low, high = np.percentile(firsts, (10, 90))
    return CurvePoint(
        chunk_tokens=chunk_tokens,
        first_token_ms=_ms(np.median(firsts)),
        jitter_ms=_ms(high - low),
        gap_ms=_ms(quiet.mean()),
        added_gap_ms=_ms(beside.mean() - quiet.mean()),
        gap_p99_ms=_ms(np.percentile(beside, 99)),
    )


def choose(curve: Sequence[CurvePoint], added_gap_max_ms: float | None = None) -> Choice:
    """Of the sizes that add at most `added_gap_max_ms` to a gap (None: no bound) those with the
    fastest first token; of these the ones that add least to a gap; of these the smallest, because
    others get their turn sooner.

    Where no size keeps the bound, the one that adds least is taken, and the reason says so.
    """
    assert curve, "a curve has points"
    kept = [p for p in curve if added_gap_max_ms is None or p.added_gap_ms <= added_gap_max_ms]
    if not kept:
        least = min(curve, key=lambda p: (p.added_gap_ms, p.chunk_tokens))
        return Choice(
            chunk_tokens=least.chunk_tokens,
            reason=f"no size adds at most {added_gap_max_ms:g} ms to a gap; this one adds least, "
            f"{least.added_gap_ms:.1f} ms",
        )
    fastest = min(kept, key=lambda p: p.first_token_ms)
    fast = [p for p in kept if p.first_token_ms <= fastest.first_token_ms * (1 + SLACK)]
    least = min(fast, key=lambda p: p.added_gap_ms)
    calm = [p for p in fast if p.added_gap_ms <= least.added_gap_ms + SLACK * p.gap_ms]
    taken = min(calm, key=lambda p: p.chunk_tokens)
    return Choice(
        chunk_tokens=taken.chunk_tokens,
        reason=f"first token in {taken.first_token_ms:.0f} ms, the fastest is "
        f"{fastest.first_token_ms:.0f} ms; adds {taken.added_gap_ms:.1f} ms to a gap",
    )


def _ms(seconds: float | np.floating) -> float:
    return round(float(seconds) * 1e3, 3)
