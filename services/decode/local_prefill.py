"""How much of the machine a local prefill may take while sequences decode here. Pure.

Owns the budget: the gap between tokens is measured with and without a prompt computing beside the
steps, and two things adapt so that it stays within a factor of the quiet one. `piece_tokens` is how
many tokens are computed at once, so that one layer of them takes no longer than the gap may grow;
`rest_s` is how long the prompt rests after each layer. Never waits, never computes.

Nobody decodes: whole chunks, no rests. With a core to spare the rests vanish by themselves.

`stepped` and `idled` are called from the loop, `computed`, `piece_tokens` and `rest_s` from the
thread that computes prompts: each number has one writer, and readers take any recent value.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Final

from baton.scheduling.claims import Claim, Level
from baton.scheduling.fairness import TenantTurns

WEIGHT: Final = 0.1
CLIP: Final = 8.0
"""A gap counts as at most so many quiet ones: one hiccup of the machine is not a trend."""
REST_MAX: Final = 4.0
"""The longest rest, in times of what was computed: a fifth of a core is any prompt's."""
NOISE_QUANTILE: Final = 0.95
NOISE_STEP: Final = 0.2
REST_START: Final = 0.25
REST_GROWTH: Final = 1.5
REST_DECAY: Final = 0.99
REST_STEP: Final = 0.002
REST_S_MAX: Final = 0.25
"""The longest rest at a time: a cancel is seen after it."""
STALE_STEPS: Final = 200
"""After so many steps beside a prompt a quiet one is wanted again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetTerms:
    """`gap`: the factor of the quiet gap between tokens that a prompt may make of it, over 1.
    `chunk_tokens`: the most tokens computed at once. `tokens_per_s`: as measured before the first
    prompt, more than 0.
    """

    gap: float
    chunk_tokens: int
    block_tokens: int
    layers: int
    tokens_per_s: float


class GapBudget:
    """The budget of one worker."""

    def __init__(self, terms: BudgetTerms) -> None:
        assert terms.gap > 1.0
        assert terms.tokens_per_s > 0.0
        self._terms = terms
        self._token_s = 1.0 / terms.tokens_per_s
        self._quiet_s: dict[int, float] = {}
        self._beside_s: float | None = None
        self._noise = 1.0
        self._sequences = 0
        self._unseen = 0
        self._rest = 0.0

    @property
    def rest_ratio(self) -> float:
        """Seconds of rest for each second computed."""
        return self._rest

    @property
    def is_decoding(self) -> bool:
        """Somebody would notice."""
        return self._sequences > 0

    @property
    def quiet_s(self) -> float | None:
        """The gap of a batch as large as now with nothing beside it; None: not known."""
        if not self._quiet_s:
            return None
        nearest = min(self._quiet_s, key=lambda size: (abs(size - self._sequences), size))
        return self._quiet_s[nearest]

    @property
    def beside_s(self) -> float | None:
        """The gap with a prompt computing beside the steps; None: there was none yet."""
        return self._beside_s

    @property
    def gap_max_s(self) -> float | None:
        """The gap that a prompt may make; more only where quiet ones are longer anyway, because
        of whatever else this machine does. None: not known.
        """
        quiet_s = self.quiet_s
        return None if quiet_s is None else max(self._terms.gap, self._noise) * quiet_s

    @property
    def wants_quiet(self) -> bool:
        """It is to be seen what a quiet step of this batch takes before the next piece."""
        if not self.is_decoding:
            return False
        return self._sequences not in self._quiet_s or self._unseen >= STALE_STEPS

    def stepped(self, gap_s: float, sequences: int, *, is_beside: bool) -> None:
        """A step of so many sequences ended `gap_s` after the one before."""
        assert sequences >= 1
        self._sequences = sequences
        if gap_s <= 0.0:
            return
        if not is_beside:
            self._seen_quiet(gap_s, sequences)
            return
        self._unseen += 1
        quiet_s, most_s = self.quiet_s, self.gap_max_s
        if quiet_s is None or most_s is None:
            return
        self._beside_s = _moved(self._beside_s, min(gap_s, CLIP * quiet_s))
        if gap_s > most_s:
            self._rest = min(REST_MAX, max(REST_START, self._rest * REST_GROWTH))
        else:
            self._rest = max(0.0, self._rest * REST_DECAY - REST_STEP)

    def _seen_quiet(self, gap_s: float, sequences: int) -> None:
        known = self._quiet_s.get(sequences)
        clipped_s = gap_s if known is None else min(gap_s, CLIP * known)
        if known is not None:
            # Moves towards what all but a few quiet gaps stay under, in usual quiet gaps.
            is_over = clipped_s > self._noise * known
            moved = self._noise + NOISE_STEP * (is_over - (1.0 - NOISE_QUANTILE))
            self._noise = min(CLIP, max(1.0, moved))
        self._quiet_s[sequences] = _moved(known, clipped_s)
        self._unseen = 0

    def idled(self) -> None:
        """Nobody decodes now."""
        self._sequences = 0

    def computed(self, tokens: int, seconds: float) -> None:
        """A piece of so many tokens took so long, its rests not counted."""
        if tokens > 0 and seconds > 0.0:
            self._token_s = _moved(self._token_s, seconds / tokens)

    def piece_tokens(self) -> int:
        """The most tokens to compute at once now: whole pages, at least one."""
        terms = self._terms
        most = -(-terms.chunk_tokens // terms.block_tokens) * terms.block_tokens
        quiet_s = self.quiet_s
        if not self.is_decoding or quiet_s is None:
            return most
        layer_s_max = (terms.gap - 1.0) * quiet_s
        tokens = min(float(most), layer_s_max * terms.layers / self._token_s)
        return max(1, int(tokens) // terms.block_tokens) * terms.block_tokens

    def rest_s(self, computed_s: float) -> float:
        """How long to rest after having computed for so long; 0 when nobody decodes."""
        if not self.is_decoding or computed_s <= 0.0:
            return 0.0
        return min(REST_S_MAX, self._rest * computed_s)


class TurnQueue:
    """Which prompt computes its next chunk: of the highest level that asks the tenant that had the
    least of the thread (`baton.scheduling.fairness`), its prompts one after the other.
    """

    def __init__(self) -> None:
        self._turns: defaultdict[Level, TenantTurns] = defaultdict(TenantTurns)
        self._asking: dict[tuple[Level, str], deque[tuple[int, Claim]]] = {}
        self._holder: tuple[int, Claim] | None = None

    @property
    def holder(self) -> int | None:
        """Who computes."""
        return None if self._holder is None else self._holder[0]

    def __len__(self) -> int:
        return sum(len(keys) for keys in self._asking.values())

    def ask(self, key: int, claim: Claim) -> None:
        """A prompt could compute a chunk; `key` is its own for this turn."""
        if (claim.level, claim.tenant) not in self._asking:
            self._turns[claim.level].come(claim.tenant)
        self._asking.setdefault((claim.level, claim.tenant), deque()).append((key, claim))

    def withdraw(self, key: int, claim: Claim) -> None:
        """It no longer asks."""
        asking = self._asking[claim.level, claim.tenant]
        asking.remove((key, claim))
        if not asking:
            del self._asking[claim.level, claim.tenant]

    def next_turn(self) -> int | None:
        """Gives the turn; None when it is taken or nobody asks."""
        if self._holder is not None or not self._asking:
            return None
        highest = max(level for level, _ in self._asking)
        turns = self._turns[highest]
        tenant = turns.next_of(name for level, name in self._asking if level == highest)
        assert tenant is not None
        self._holder = self._asking[highest, tenant][0]
        self.withdraw(*self._holder)
        return self._holder[0]

    def end_turn(self, key: int, seconds: float) -> None:
        """The turn is over; it took so long."""
        assert self._holder is not None
        assert self._holder[0] == key, (self._holder, key)
        claim, self._holder = self._holder[1], None
        self._turns[claim.level].charge(claim.tenant, seconds, claim.weight)


def _moved(old: float | None, new: float) -> float:
    return new if old is None else old + WEIGHT * (new - old)
