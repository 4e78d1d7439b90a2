"""Leases: which logs are owned, until when, and whether their workers make progress.

Owns deadlines on one monotonic clock, which is passed in. Pure; never raises a generation itself:
`expired` names the logs and the keeper fences them.

Invariant: a log is in the table exactly while it has a writer.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Progress:
    incarnation: int
    progress: int


class LeaseTable:
    """Deadlines of written logs, in monotonic seconds."""

    __slots__ = ("_deadlines", "_progress", "lease_s")

    def __init__(self, lease_s: float) -> None:
        assert lease_s > 0.0, lease_s
        self.lease_s = lease_s
        self._deadlines: dict[bytes, float] = {}
        self._progress: dict[str, _Progress] = {}

    def __len__(self) -> int:
        return len(self._deadlines)

    def __contains__(self, log_id: bytes) -> bool:
        return log_id in self._deadlines

    def renew(self, log_id: bytes, now_s: float) -> None:
        """The log is owned for another lease from now; also starts one."""
        self._deadlines[log_id] = now_s + self.lease_s

    def end(self, log_id: bytes) -> None:
        """Nobody writes the log any more; ending twice is harmless."""
        self._deadlines.pop(log_id, None)

    def expired(self, now_s: float) -> list[bytes]:
        """The logs whose deadline has come; they stay in the table until `end`."""
        return [log_id for log_id, deadline in self._deadlines.items() if deadline <= now_s]

    def has_progressed(self, worker_id: str, incarnation: int, progress: int) -> bool:
        """True, and remembered, when the worker's counter grew since its last renewal.

        A stuck loop does not move it, so that a timer alone never keeps a log. Another incarnation
        starts over.
        """
        known = self._progress.get(worker_id)
        if known is None or known.incarnation != incarnation:
            self._progress[worker_id] = _Progress(incarnation, progress)
            return True
        if progress <= known.progress:
            return False
        known.progress = progress
        return True

    def forget_worker(self, worker_id: str) -> None:
        """The worker is gone; its progress starts over if it comes back."""
        self._progress.pop(worker_id, None)
