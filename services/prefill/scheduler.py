"""Which prompts compute their next chunks together. Pure: no clock, no task, no engine.

Owns the queue's bounds, the prompts that share the compute thread, and who is in its next pass. A
prompt is *entered* when it is admitted, *asks* when it could compute a chunk, is in the *batch*
while that is computed, and *leaves* in the end.

Invariants: one batch at a time, of at most `batch_tokens` tokens or of one chunk. Each tenant's
oldest prompt shares the compute thread, further ones in rounds over the tenants while there are
fewer than `interleave_max`. A batch is filled in rounds over the tenants, the one served longest
ago first; of a tenant's own prompts the one served longest ago, then the oldest. So a short prompt
passes a huge one chunk by chunk, and one tenant's many prompts stand in the way of nobody else's
first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from baton.errors import Reason, ServiceError

RETRY_AFTER_MIN_S = 0.5
RETRY_AFTER_MAX_S = 30.0
BATCH_TOKENS = 512


@dataclass(slots=True)
class _Prompt:
    request_id: str
    tenant: str
    tokens: int = 0
    chunk_tokens: int | None = None
    """Tokens of the chunk that it asks for; None: it does not ask."""
    served: int = 0


@dataclass(slots=True)
class _Tenant:
    """A tenant that has prompts here, oldest first."""

    prompts: list[_Prompt] = field(default_factory=list)
    served: int = 0


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
        # In the order in which their oldest prompts came.
        self._tenants: dict[str, _Tenant] = {}
        self._batch: tuple[str, ...] = ()
        self._batches = 0

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

    def enter(self, request_id: str, *, token_rate: float, tenant: str = "") -> None:
        """Admit a prompt. When the queue is full, a tenant without a prompt here still finds room
        for one, as long as no more than `queue_depth_max` have come so.

        Raises ServiceError QUEUE_FULL with a time to come back (from `token_rate`, tokens a second,
        0 when unknown), ALREADY_EXISTS for an id that is in.
        """
        if request_id in self._prompts:
            raise ServiceError(
                Reason.ALREADY_EXISTS,
                f"request {request_id} runs here already; wait for it or cancel it",
                field="request_id",
            )
        room = self._interleave_max + self._queue_depth_max
        if tenant not in self._tenants:
            room += self._queue_depth_max
        if len(self._prompts) >= room:
            raise ServiceError(
                Reason.QUEUE_FULL,
                f"{len(self._prompts)} prompts wait here, the most this worker queues",
                metadata={"queue_depth_max": str(self._queue_depth_max)},
                retry_after_s=self._retry_after_s(token_rate),
            )
        prompt = _Prompt(request_id, tenant)
        self._prompts[request_id] = prompt
        self._tenants.setdefault(tenant, _Tenant()).prompts.append(prompt)

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
        for prompt in self._in_turn():
            assert prompt.chunk_tokens is not None
            if not chosen or prompt.chunk_tokens <= left:
                chosen.append(prompt)
                left -= prompt.chunk_tokens
        if chosen:
            self._batches += 1
        for prompt in chosen:
            prompt.chunk_tokens, prompt.served = None, self._batches
            self._tenants[prompt.tenant].served = self._batches
        self._batch = tuple(prompt.request_id for prompt in chosen)
        return self._batch

    def end_batch(self) -> None:
        """Its chunks are computed, or given up."""
        assert self._batch, "there is a batch"
        self._batch = ()

    def leave(self, request_id: str) -> None:
        """The prompt is done, however it ended."""
        assert request_id not in self._batch, "end the batch first"
        prompt = self._prompts.pop(request_id)
        tenant = self._tenants[prompt.tenant]
        tenant.prompts.remove(prompt)
        if not tenant.prompts:
            del self._tenants[prompt.tenant]

    def check_invariants(self) -> None:
        """For tests and idle moments."""
        assert len(self._prompts) <= self._interleave_max + 2 * self._queue_depth_max
        assert all(request_id in self._prompts for request_id in self._batch)
        assert sum(len(tenant.prompts) for tenant in self._tenants.values()) == len(self)

    def _sharing(self) -> list[_Prompt]:
        """Each tenant's oldest, then further ones round by round while there is room."""
        sharing = [tenant.prompts[0] for tenant in self._tenants.values()]
        for prompt in _rounds([tenant.prompts[1:] for tenant in self._tenants.values()]):
            if len(sharing) >= self._interleave_max:
                break
            sharing.append(prompt)
        return sharing

    def _in_turn(self) -> Iterator[_Prompt]:
        """The sharing prompts that ask, in the order in which they get a place."""
        asking: dict[str, list[_Prompt]] = {name: [] for name in self._tenants}
        for prompt in self._sharing():
            if prompt.chunk_tokens is not None:
                asking[prompt.tenant].append(prompt)
        # Sorting keeps what is equal in order of arrival.
        names = sorted(asking, key=lambda name: self._tenants[name].served)
        return _rounds([sorted(asking[name], key=lambda one: one.served) for name in names])

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
