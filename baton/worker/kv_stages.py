"""Where a prompt's KV is computed, as its run sees it: in the arena, or on its way there.

Owns the interface. On a CPU the stages fall together: KV is computed where it stays.
"""

from __future__ import annotations

from typing import Protocol


class KvStages(Protocol):
    """What a run calls for the chunks whose `owner` it is."""

    def land(self, owner: int, first_position: int) -> None:
        """Returns when the KV of the computed chunk at that position is in the arena. Called in the
        packing thread, once for each chunk, in the order of the chunks.
        """
        ...

    def forget(self, owner: int) -> None:
        """The run is over, however it ended; nothing of it is computed or landed any more."""
        ...


class InPlace:
    """`KvStages` of an engine that computes in the arena."""

    def land(self, owner: int, first_position: int) -> None:
        """It is there."""

    def forget(self, owner: int) -> None:
        """There is nothing to forget."""
