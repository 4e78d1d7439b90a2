"""The bounded queue between a decode worker's stream and one sequence.

Owns the bound that keeps one slow client from holding up everyone on the same stream. Never waits
when something is put in: a sequence that is behind is detached with an error instead.

Invariant: after a terminal event (an error, a lost stream, the last token) nothing more comes out.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from baton.clock import Clock
from baton.errors import Reason, ServiceError
from services.gateway.events import Exactness, TokenDelta, TokenUsage

EVENTS_MAX: Final = 256
BEHIND_S_MAX: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The worker took the log and runs it."""

    generation: int
    position: int
    kv_transfer_s: float
    exactness: Exactness
    prefill_compute_s: float | None
    stage_seconds: Mapping[str, float] = field(default_factory=dict, hash=False)
    total_s: float = 0.0
    transfer_bytes: int = 0
    transport: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One token; `usage` and `stage_seconds` come with the last one."""

    delta: TokenDelta
    usage: TokenUsage | None
    stage_seconds: Mapping[str, float] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The worker refused or failed this sequence, or this gateway gave it up."""

    error: ServiceError


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The stream broke or the worker died: the sequence may go on elsewhere.

    `since_s`: the worker's last sign of life, in this process's monotonic time.
    """

    why: str
    since_s: float


SequenceEvent = Started | Token | Failed | Lost


class Inbox:
    """One sequence's events, in order."""

    def __init__(
        self, clock: Clock, *, events_max: int = EVENTS_MAX, behind_s_max: float = BEHIND_S_MAX
    ) -> None:
        self._clock = clock
        self._events_max = events_max
        self._behind_s_max = behind_s_max
        self._events: deque[tuple[float, SequenceEvent]] = deque()
        self._available = asyncio.Event()
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """True once a terminal event was put in."""
        return self._is_closed

    def put(self, event: SequenceEvent) -> bool:
        """Add an event. False when the reader was so far behind that it was detached just now."""
        if self._is_closed:
            return True
        now_s = self._clock.monotonic_s()
        is_behind = bool(self._events) and now_s - self._events[0][0] > self._behind_s_max
        if is_behind or len(self._events) >= self._events_max:
            self._events.clear()
            self._add(now_s, Failed(error=self._detached()))
            return False
        self._add(now_s, event)
        return True

    def _add(self, now_s: float, event: SequenceEvent) -> None:
        self._events.append((now_s, event))
        is_last = isinstance(event, Token) and event.delta.finish is not None
        self._is_closed = is_last or isinstance(event, Failed | Lost)
        self._available.set()

    def _detached(self) -> ServiceError:
        return ServiceError(
            Reason.CANCELLED,
            f"the client was {self._events_max} events or {self._behind_s_max:g} s behind and was "
            "detached; read faster or ask for fewer tokens",
        )

    async def get(self) -> SequenceEvent:
        """The next event; waits for it (the request's deadline bounds the wait)."""
        while not self._events:
            self._available.clear()
            await self._available.wait()
        return self._events.popleft()[1]
