"""Tier honesty: whether KV on a slower tier is worth loading, and how long a request waits for it.

Owns both rules. Pure: seconds come in, nothing is measured here.

A hit is used only where loading it beats computing it. And since a disk may be slower than it was,
waiting has to be earned: a request that has waited t seconds and got f tokens of KV for it goes on
waiting while t <= f / rate + `ALLOWANCE` of what computing the whole prompt takes. Whatever the
disk does, t + (the time to compute what did not come) <= recompute x (1 + `ALLOWANCE`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ALLOWANCE: Final = 0.05
"""How much slower than computing everything a request may become because of a slow disk."""

WAIT_MAX_S: Final = 10.0
"""The longest wait where nobody knows how fast the asker computes."""


def is_worth_loading(load_s: float, tokens: int, tokens_per_s: float | None) -> bool:
    """Whether loading the KV of `tokens` takes less time than computing it. An asker whose rate is
    not known has nothing to compare with: it loads.
    """
    return tokens_per_s is None or load_s < tokens / tokens_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long one request waits for KV to be loaded. `prompt_tokens`: all it would compute."""

    prompt_tokens: int
    tokens_per_s: float | None
    wait_max_s: float = WAIT_MAX_S

    def left_s(self, waited_s: float, loaded_tokens: int) -> float:
        """Seconds until it goes on without what has not come; none left: it goes on now."""
        most = self.wait_max_s
        if self.tokens_per_s is not None:
            earned = (loaded_tokens + ALLOWANCE * self.prompt_tokens) / self.tokens_per_s
            most = min(most, earned)
        return most - waited_s
