"""Which prompts compute their next chunks together. Pure: no clock, no task, no engine.

Owns the queue's bounds, the prompts that share the compute thread, and who is in its next pass. A
prompt is *entered* when it is admitted, *asks* when it could compute a chunk, is in the *batch*
while that is computed, and *leaves* in the end.

A *party* is a tenant's prompts of one level, (class, priority). Invariants: one batch at a time, of
at most `batch_tokens` tokens or of one chunk. Each party's oldest prompt shares the compute thread,
further ones in rounds over the parties, higher levels first, while there are fewer than
`interleave_max`. Of those that share and ask, the highest level goes first; within it the tenant
that had the fewest tokens by weight (`baton.scheduling.fairness`); of a party's own the prompt
served longest ago, then the oldest. So a short prompt passes a huge one chunk by chunk, and one
tenant's many prompts stand in the way of nobody else's first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from baton.errors import Reason, ServiceError
from baton.scheduling.claims import Claim, Level
from baton.scheduling.fairness import TenantTurns, is_below_share

RETRY_AFTER_MIN_S = 0.5
RETRY_AFTER_MAX_S = 30.0
BATCH_TOKENS = 512

Party: TypeAlias = tuple[Level, str]


@dataclass(slots=True)
class _Prompt:
    claim: Claim
    number: int
    """Order of arrival."""
    tokens: int = 0
    chunk_tokens: int | None = None
    """Tokens of the chunk that it asks for; None: it does not ask."""
    served: int = 0

    @property
    def party(self) -> Party:
        """Among whom it takes turns."""
        return (self.claim.level, self.claim.tenant)


class PromptScheduler:
    """The prompts of one worker."""

    def __init__(
        self, *, queue_depth_max: int, interleave_max: int, batch_tokens: int = BATCH_TOKENS
    ) -> None:
        assert queue_depth_max >= 1
        assert interleave_max >= 1
        assert batch_tokens >= 1
        self._queue_depth_max = queue_depth_max
        self._interleave_max = interleave_max
        self._batch_tokens = batch_tokens
        self._prompts: dict[str, _Prompt] = {}
        # Oldest prompts first, in the order in which those came.
        self._parties: dict[Party, list[_Prompt]] = {}
        self._turns: defaultdict[Level, TenantTurns] = defaultdict(TenantTurns)
        self._batch: tuple[str, ...] = ()
        self._batches = 0
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def queued(self) -> int:
        """Prompts beyond those that share the compute thread now."""
        return len(self._prompts) - len(self._sharing())

    @property
    def pending_tokens(self) -> int:
        """Tokens that entered prompts still have to compute."""
        return sum(prompt.tokens for prompt in self._prompts.values())

    @property
    def batch(self) -> tuple[str, ...]:
        """Whose chunks are computed now."""
        return self._batch

    def enter(self, claim: Claim, *, token_rate: float) -> None:
        """Admit a prompt. When the queue is full, a tenant with less than its part of the places
        still finds room, as long as no more than `queue_depth_max` have come so.

        Raises ServiceError QUEUE_FULL with a time to come back (from `token_rate`, tokens a second,
        0 when unknown), ALREADY_EXISTS for an id that is in.
        """
        if claim.request_id in self._prompts:
            raise ServiceError(
                Reason.ALREADY_EXISTS,
                f"request {claim.request_id} runs here already; wait for it or cancel it",
                field="request_id",
            )
        held = Counter(prompt.claim.tenant for prompt in self._prompts.values())
        self._require_room(held, claim.tenant, token_rate)
        self._arrivals += 1
        prompt = _Prompt(claim, self._arrivals)
        if prompt.party not in self._parties:
            self._turns[claim.level].come(claim.tenant)
        self._prompts[claim.request_id] = prompt
        self._parties.setdefault(prompt.party, []).append(prompt)

    def _require_room(self, held: Counter[str], tenant: str, token_rate: float) -> None:
        places, taken = self._interleave_max + self._queue_depth_max, len(self._prompts)
        if taken < places:
            return
        is_below = is_below_share(held[tenant], places, len(held.keys() | {tenant}))
        if is_below and taken < places + self._queue_depth_max:
            return
        raise ServiceError(
            Reason.QUEUE_FULL,
            f"{taken} prompts wait here, the most this worker queues",
            metadata={"queue_depth_max": str(self._queue_depth_max)},
            retry_after_s=self._retry_after_s(token_rate),
        )

    def set_tokens(self, request_id: str, tokens: int) -> None:
        """How many tokens the prompt still has to compute."""
        assert tokens >= 0
        self._prompts[request_id].tokens = tokens

    def ask(self, request_id: str, chunk_tokens: int) -> None:
        """The prompt could compute a chunk of so many tokens now."""
        assert request_id not in self._batch, "it is being computed"
        assert chunk_tokens >= 1
        self._prompts[request_id].chunk_tokens = chunk_tokens

    def withdraw(self, request_id: str) -> None:
        """The prompt no longer asks."""
        self._prompts[request_id].chunk_tokens = None

    def next_batch(self) -> tuple[str, ...]:
        """Begin the next batch, of prompts that ask; none while one is computed or nobody may."""
        if self._batch:
            return ()
        chosen: list[_Prompt] = []
        left = self._batch_tokens
        asking = [prompt for prompt in self._sharing() if prompt.chunk_tokens is not None]
        if asking:
            self._batches += 1
        while asking:
            prompt = self._first(asking)
            asking.remove(prompt)
            assert prompt.chunk_tokens is not None
            if chosen and prompt.chunk_tokens > left:
                continue
            chosen.append(prompt)
            left -= prompt.chunk_tokens
            claim = prompt.claim
            self._turns[claim.level].charge(claim.tenant, float(prompt.chunk_tokens), claim.weight)
            prompt.chunk_tokens, prompt.served = None, self._batches
        self._batch = tuple(prompt.claim.request_id for prompt in chosen)
        return self._batch

    def end_batch(self) -> None:
        """Its chunks are computed, or given up."""
        assert self._batch, "there is a batch"
        self._batch = ()

    def leave(self, request_id: str) -> None:
        """The prompt is done, however it ended."""
        assert request_id not in self._batch, "end the batch first"
        prompt = self._prompts.pop(request_id)
        party = self._parties[prompt.party]
        party.remove(prompt)
        if not party:
            del self._parties[prompt.party]

    def check_invariants(self) -> None:
        """For tests and idle moments."""
        assert len(self._prompts) <= self._interleave_max + 2 * self._queue_depth_max
        assert all(request_id in self._prompts for request_id in self._batch)
        assert sum(len(prompts) for prompts in self._parties.values()) == len(self)

    def _sharing(self) -> list[_Prompt]:
        """Each party's oldest, then further ones round by round while there is room."""
        # Sorting keeps what is equal in order of arrival.
        parties = sorted(self._parties, key=lambda party: party[0], reverse=True)
        sharing = [self._parties[party][0] for party in parties]
        for prompt in _rounds([self._parties[party][1:] for party in parties]):
            if len(sharing) >= self._interleave_max:
                break
            sharing.append(prompt)
        return sharing

    def _first(self, asking: list[_Prompt]) -> _Prompt:
        """Whose chunk comes before all others'."""
        highest = max(prompt.claim.level for prompt in asking)
        peers = [prompt for prompt in asking if prompt.claim.level == highest]
        tenant = self._turns[highest].next_of(prompt.claim.tenant for prompt in peers)
        own = [prompt for prompt in peers if prompt.claim.tenant == tenant]
        return min(own, key=lambda prompt: (prompt.served, prompt.number))

    def _retry_after_s(self, token_rate: float) -> float:
        if token_rate <= 0.0:
            return RETRY_AFTER_MIN_S
        wait_s = self.pending_tokens / token_rate / max(1, len(self._prompts))
        return min(RETRY_AFTER_MAX_S, max(RETRY_AFTER_MIN_S, wait_s))


def _rounds(rows: list[list[_Prompt]]) -> Iterator[_Prompt]:
    """The first of each row, then the second of each, and so on."""
    for index in range(max(map(len, rows), default=0)):
        for row in rows:
            if index < len(row):
                yield row[index]
