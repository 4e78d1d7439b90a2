"""Leases: which logs are owned, until when, and whether their workers make progress.

Owns deadlines on one monotonic clock, which is passed in. Pure; never raises a generation itself:
`expired` names the logs and the keeper fences them.

Invariant: a log is in the table exactly while it has a writer.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(slots=True)
class _Progress:
    incarnation: int
    progress: int


class LeaseTable:
    """Deadlines of written logs, in monotonic seconds."""

    __slots__ = ("_deadlines", "_due", "_heap", "_progress", "lease_s")

    def __init__(self, lease_s: float) -> None:
        assert lease_s > 0.0, lease_s
        self.lease_s = lease_s
        self._deadlines: dict[bytes, float] = {}
        # One entry a log, at or before its deadline: a renewal does not touch it, a look at what is
        # due moves it on.
        self._due: dict[bytes, float] = {}
        self._heap: list[tuple[float, bytes]] = []
        self._progress: dict[str, _Progress] = {}

    def __len__(self) -> int:
        return len(self._deadlines)

    def __contains__(self, log_id: bytes) -> bool:
        return log_id in self._deadlines

    def __iter__(self) -> Iterator[bytes]:
        """The logs that are owned."""
        return iter(self._deadlines)

    def renew(self, log_id: bytes, now_s: float) -> None:
        """The log is owned for another lease from now; also starts one."""
        deadline = now_s + self.lease_s
        self._deadlines[log_id] = deadline
        due = self._due.get(log_id)
        if due is None or deadline < due:
            self._push(log_id, deadline)

    def _push(self, log_id: bytes, due: float) -> None:
        self._due[log_id] = due
        heapq.heappush(self._heap, (due, log_id))

    def end(self, log_id: bytes) -> None:
        """Nobody writes the log any more; ending twice is harmless."""
        self._deadlines.pop(log_id, None)

    def expired(self, now_s: float) -> list[bytes]:
        """The logs whose deadline has come; they stay in the table until `end`.

        Costs as much as what came up: each log once a lease, however many there are.
        """
        expired: list[bytes] = []
        heap = self._heap
        while heap and heap[0][0] <= now_s:
            due, log_id = heapq.heappop(heap)
            if self._due.get(log_id) != due:
                continue
            del self._due[log_id]
            deadline = self._deadlines.get(log_id)
            if deadline is None:
                continue
            if deadline <= now_s:
                expired.append(log_id)
            else:
                self._push(log_id, deadline)
        for log_id in expired:
            self._push(log_id, self._deadlines[log_id])
        return expired

    def extend(self, seconds: float) -> None:
        """Every lease lasts so much longer: the store itself was stopped, and heard nobody."""
        for log_id in self._deadlines:
            self._deadlines[log_id] += seconds

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
