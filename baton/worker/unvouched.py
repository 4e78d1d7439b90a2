"""Where this worker wrote KV since its last golden check that passed.

Owns the list: for each log the first position that nobody vouches for yet. A check that passes
vouches for what was computed before it began, no more. May be used from any thread.
"""

from __future__ import annotations

import threading
from typing import Final

LOGS_MAX: Final = 32_768
"""From so many logs on a check is due at once, whatever its interval."""


class Unvouched:
    """See the module."""

    def __init__(self) -> None:
        self._before: dict[bytes, int] = {}
        self._since: dict[bytes, int] = {}
        self._lock = threading.Lock()

    def note(self, log_id: bytes, position: int) -> None:
        """KV of the log is about to be written at this position and behind it."""
        with self._lock:
            known = self._since.get(log_id)
            if known is None or position < known:
                self._since[log_id] = position

    @property
    def is_full(self) -> bool:
        """More logs than a list should have: time for a check."""
        return len(self._since) >= LOGS_MAX

    def begin(self) -> None:
        """A check begins: its pass will vouch for what was noted until now."""
        with self._lock:
            for log_id, position in self._since.items():
                self._before[log_id] = min(position, self._before.get(log_id, position))
            self._since = {}

    def passed(self) -> None:
        """The check that began last passed."""
        with self._lock:
            self._before = {}

    def all(self) -> dict[bytes, int]:
        """Log id -> first position that is not vouched for."""
        self.begin()
        return dict(self._before)

    def told(self) -> dict[bytes, int]:
        """As `all`, changing nothing."""
        with self._lock:
            since, before = dict(self._since), dict(self._before)
        for log_id, position in before.items():
            since[log_id] = min(position, since.get(log_id, position))
        return since

    def forget(self) -> None:
        """All of it was given up."""
        with self._lock:
            self._before, self._since = {}, {}
