"""Who may run: slots for active sequences and short reservations. Pure; time is passed in.

Owns admission. Invariant: active + reserved never exceeds `active_max`, except that a sequence
always may use the slot that was reserved for it.
"""

from __future__ import annotations

from typing import Final

from baton.errors import Reason, ServiceError

HOLD_MAX_S: Final = 120.0
RETRY_AFTER_S: Final = 0.5


class SlotScheduler:
    """The slots of one decode worker, by request id."""

    def __init__(self, active_max: int) -> None:
        assert active_max >= 1
        self.active_max = active_max
        self._active: set[str] = set()
        self._reserved: dict[str, float] = {}

    @property
    def active(self) -> int:
        """Sequences that hold a slot."""
        return len(self._active)

    @property
    def reserved(self) -> int:
        """Slots held for sequences to come; some may have expired since the last `expire`."""
        return len(self._reserved)

    def reserve(self, request_id: str, now_s: float, hold_s: float) -> None:
        """Hold a slot for `hold_s` seconds, at most HOLD_MAX_S; again for the same id: anew.

        Raises ServiceError QUEUE_FULL when all slots are taken.
        """
        self.expire(now_s)
        if request_id in self._active:
            return
        if request_id not in self._reserved:
            self._require_room()
        self._reserved[request_id] = now_s + min(max(hold_s, 0.0), HOLD_MAX_S)

    def enter(self, request_id: str, now_s: float) -> None:
        """Take a slot, the reserved one if there is one.

        Raises ServiceError QUEUE_FULL when all slots are taken, ALREADY_EXISTS for an id that is
        active.
        """
        self.expire(now_s)
        if request_id in self._active:
            raise ServiceError(
                Reason.ALREADY_EXISTS,
                f"request {request_id} runs here already",
                field="request_id",
            )
        if self._reserved.pop(request_id, None) is None:
            self._require_room()
        self._active.add(request_id)

    def leave(self, request_id: str) -> None:
        """Give back the slot or the reservation; an unknown id is ignored."""
        self._active.discard(request_id)
        self._reserved.pop(request_id, None)

    def expire(self, now_s: float) -> None:
        """Forget reservations whose time has come."""
        for request_id in [key for key, until in self._reserved.items() if until <= now_s]:
            del self._reserved[request_id]

    def check_invariants(self) -> None:
        """For tests and idle moments."""
        assert len(self._active) + len(self._reserved) <= self.active_max
        assert not self._active & self._reserved.keys()

    def _require_room(self) -> None:
        if len(self._active) + len(self._reserved) >= self.active_max:
            raise ServiceError(
                Reason.QUEUE_FULL,
                f"all {self.active_max} sequence slots of this worker are taken",
                metadata={"active_sequences_max": str(self.active_max)},
                retry_after_s=RETRY_AFTER_S,
            )
