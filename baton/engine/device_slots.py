"""Which device slots hold which prompt's KV. Pure bookkeeping, without torch.

Owns the slots: free, or of one prompt. A prompt's slots stand for its pages in order. What a prompt
has here is a copy that may go: it is in the arena as well, once its chunks have landed. Not
thread-safe.

Invariants: free + all prompts' = all; a prompt with a chunk in flight keeps its slots.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from baton.errors import Reason, ServiceError


@dataclass(slots=True)
class Resident:
    """One prompt: the slots of its pages, and up to which position they hold its KV.

    `flights`: chunks whose KV is on its way to the arena.
    """

    slots: list[int] = field(default_factory=list)
    valid_end: int = 0
    flights: int = 0


class DeviceSlots:
    """`count` slots, each of one page of `block_tokens` positions."""

    def __init__(self, count: int, block_tokens: int) -> None:
        assert count >= 1
        self._count = count
        self._block_tokens = block_tokens
        self._free = list(reversed(range(count)))
        # In the order of their last use.
        self._residents: dict[int, Resident] = {}

    @property
    def free(self) -> int:
        """Slots of nobody."""
        return len(self._free)

    def of(self, owner: int) -> Resident:
        """What the prompt has here; it counts as used now."""
        resident = self._residents.pop(owner, None) or Resident()
        self._residents[owner] = resident
        return resident

    def reach(self, owner: int, end: int, kept: Collection[int]) -> Resident:
        """Slots for the prompt's positions [0, end). Prompts used longest ago give theirs up, but
        none of `kept` and none with a chunk in flight.

        Raises ServiceError PAGES_EXHAUSTED; the prompt then has what it had.
        """
        resident = self.of(owner)
        wanted = -(-end // self._block_tokens) - len(resident.slots)
        for other in list(self._residents):
            if wanted <= len(self._free):
                break
            if other != owner and other not in kept and not self._residents[other].flights:
                self.forget(other)
        if wanted > len(self._free):
            raise ServiceError(
                Reason.PAGES_EXHAUSTED,
                f"{end} positions need {wanted} more device pages, {len(self._free)} are free; "
                "retry when other prompts have ended",
                retry_after_s=1.0,
            )
        for _ in range(wanted):
            resident.slots.append(self._free.pop())
        return resident

    def forget(self, owner: int) -> None:
        """Its slots are free again."""
        resident = self._residents.pop(owner, None)
        if resident is not None:
            assert not resident.flights, "its KV is on its way to the arena"
            self._free += reversed(resident.slots)

    def check_invariants(self) -> None:
        """For tests and idle moments."""
        owned = [slot for one in self._residents.values() for slot in one.slots]
        assert sorted([*self._free, *owned]) == list(range(self._count))
