"""Events on their way to one gateway: posted by the loop, taken by the stream, many in a message.

Owns the bound. A gateway always reads; one that does not is given up when the bound is reached, and
its sequences run on for a while for whoever comes back for them.
"""

from __future__ import annotations

import asyncio
from typing import Final

from services.decode.events import SequenceEvent

EVENTS_MAX: Final = 65_536
EVENTS_PER_MESSAGE_MAX: Final = 2_048


class Outbox:
    """Events of one gateway stream, in order. Used from the event loop only."""

    def __init__(self, gateway_id: str, events_max: int = EVENTS_MAX) -> None:
        self.gateway_id = gateway_id
        self._events_max = events_max
        self._events: list[SequenceEvent] = []
        self._has_news = asyncio.Event()
        self._is_closed = False
        self._is_last_call = False
        self._open_requests: set[str] = set()

    @property
    def is_closed(self) -> bool:
        """Nobody takes events any more."""
        return self._is_closed

    def expect(self, request_id: str) -> None:
        """A sequence was started over this stream; its last event ends the expectation."""
        self._open_requests.add(request_id)

    def close_when_told(self) -> None:
        """No more commands come: close once every expected sequence has had its last event."""
        self._is_last_call = True
        if not self._open_requests:
            self.close()

    def post(self, event: SequenceEvent) -> None:
        """Add an event; dropped when closed, and closing when the bound is reached."""
        if self._is_closed:
            return
        if len(self._events) >= self._events_max:
            self.close()
            return
        self._events.append(event)
        self._has_news.set()
        if event.is_last:
            self._open_requests.discard(event.request_id)
            if self._is_last_call and not self._open_requests:
                self.close()

    async def take(self) -> list[SequenceEvent]:
        """The events so far, at least one; empty once closed and drained."""
        while not self._events and not self._is_closed:
            self._has_news.clear()
            await self._has_news.wait()
        taken = self._events[:EVENTS_PER_MESSAGE_MAX]
        del self._events[:EVENTS_PER_MESSAGE_MAX]
        return taken

    def close(self) -> None:
        """The stream is over."""
        self._is_closed = True
        self._has_news.set()
