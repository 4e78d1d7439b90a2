"""Which prompt computes its next chunk. Pure: no clock, no task, no engine.

Owns the queue's bound, the few prompts that share the compute thread, and their rotation. A prompt
is *entered* when it is admitted, *asks* for a turn when it could compute a chunk, holds the *turn*
while it does, and *leaves* in the end.

Invariants: at most one prompt holds the turn; only the oldest `interleave_max` prompts get turns,
so a prompt waits for at most so many others at a time; among those that ask, the one whose last
turn is longest ago goes next, so a short prompt passes a huge one chunk by chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.errors import Reason, ServiceError

RETRY_AFTER_MIN_S = 0.5
RETRY_AFTER_MAX_S = 30.0


@dataclass(slots=True)
class _Prompt:
    tokens: int = 0
    asks: bool = False
    served: int = 0


class PromptScheduler:
    """The prompts of one worker, in order of arrival."""

    def __init__(self, *, queue_depth_max: int, interleave_max: int) -> None:
        assert queue_depth_max >= 1
        assert interleave_max >= 1
        self._queue_depth_max = queue_depth_max
        self._interleave_max = interleave_max
        self._prompts: dict[str, _Prompt] = {}
        self._holder: str | None = None
        self._turns = 0

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def queued(self) -> int:
        """Prompts beyond those that share the compute thread now."""
        return max(0, len(self._prompts) - self._interleave_max)

    @property
    def pending_tokens(self) -> int:
        """Tokens that entered prompts still have to compute."""
        return sum(prompt.tokens for prompt in self._prompts.values())

    @property
    def holder(self) -> str | None:
        """Who holds the turn."""
        return self._holder

    def enter(self, request_id: str, *, token_rate: float) -> None:
        """Admit a prompt.

        Raises ServiceError QUEUE_FULL with a time to come back (from `token_rate`, tokens a second,
        0 when unknown), ALREADY_EXISTS for an id that is in.
        """
        if request_id in self._prompts:
            raise ServiceError(
                Reason.ALREADY_EXISTS,
                f"request {request_id} runs here already; wait for it or cancel it",
                field="request_id",
            )
        if len(self._prompts) >= self._interleave_max + self._queue_depth_max:
            raise ServiceError(
                Reason.QUEUE_FULL,
                f"{len(self._prompts)} prompts wait here, the most this worker queues",
                metadata={"queue_depth_max": str(self._queue_depth_max)},
                retry_after_s=self._retry_after_s(token_rate),
            )
        self._prompts[request_id] = _Prompt()

    def set_tokens(self, request_id: str, tokens: int) -> None:
        """How many tokens the prompt still has to compute."""
        assert tokens >= 0
        self._prompts[request_id].tokens = tokens

    def ask(self, request_id: str) -> None:
        """The prompt could compute a chunk now."""
        assert self._holder != request_id, "it holds the turn"
        self._prompts[request_id].asks = True

    def withdraw(self, request_id: str) -> None:
        """The prompt no longer asks."""
        self._prompts[request_id].asks = False

    def next_turn(self) -> str | None:
        """Give the turn to the next prompt that asks; None if it is taken or nobody may have it."""
        if self._holder is not None:
            return None
        sharing = list(self._prompts.items())[: self._interleave_max]
        asking = [(prompt.served, request_id) for request_id, prompt in sharing if prompt.asks]
        if not asking:
            return None
        chosen = min(asking, key=lambda item: item[0])[1]
        self._turns += 1
        prompt = self._prompts[chosen]
        prompt.asks, prompt.served = False, self._turns
        self._holder = chosen
        return chosen

    def end_turn(self, request_id: str) -> None:
        """The chunk is computed, or given up."""
        assert self._holder == request_id, (self._holder, request_id)
        self._holder = None

    def leave(self, request_id: str) -> None:
        """The prompt is done, however it ended."""
        assert self._holder != request_id, "end the turn first"
        del self._prompts[request_id]

    def check_invariants(self) -> None:
        """For tests and idle moments."""
        assert len(self._prompts) <= self._interleave_max + self._queue_depth_max
        assert self._holder is None or self._holder in self._prompts

    def _retry_after_s(self, token_rate: float) -> float:
        if token_rate <= 0.0:
            return RETRY_AFTER_MIN_S
        wait_s = self.pending_tokens / token_rate / max(1, len(self._prompts))
        return min(RETRY_AFTER_MAX_S, max(RETRY_AFTER_MIN_S, wait_s))
