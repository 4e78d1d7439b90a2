"""Waiting for something to happen to a log: how followers learn of commits.

Owns the waiters. Single event loop only; a change that nobody waits for costs one look-up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class LogWatch:
    """Events per log, set whenever a record of the log is made."""

    def __init__(self) -> None:
        self._events: dict[bytes, set[asyncio.Event]] = {}

    def changed(self, log_id: bytes) -> None:
        """A record of the log was made."""
        if self._events:
            for event in self._events.get(log_id, ()):
                event.set()

    @contextmanager
    def on(self, log_id: bytes) -> Iterator[asyncio.Event]:
        """The block's event is set at each change; who waits clears it."""
        event = asyncio.Event()
        self._events.setdefault(log_id, set()).add(event)
        try:
            yield event
        finally:
            waiting = self._events[log_id]
            waiting.discard(event)
            if not waiting:
                del self._events[log_id]

    @property
    def watched(self) -> int:
        """Logs that somebody waits for."""
        return len(self._events)
