"""The bounded queue between a decode worker's stream and one sequence.

Owns the bound that keeps one slow client from holding up everyone on the same stream. Never waits
when something is put in: a sequence that is behind is detached with an error instead.

Invariant: after a terminal event (an error, a lost stream, the last token) nothing more comes out.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from baton.clock import Clock
from baton.errors import Reason, ServiceError
from services.gateway.events import Exactness, TokenDelta, TokenUsage

EVENTS_MAX: Final = 256
BEHIND_S_MAX: Final = 10.0
SILENCE_MAX_S: Final = 30.0
"""A running sequence hears of its worker at every step. The longest regular pause is a store's that
stands still for a lease, or a wait for a page; both end within 10 s with a token or a reason."""


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
class Waiting:
    """The worker has not forgotten the sequence: it waits there for a slot or for pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The worker refused or failed this sequence, or this gateway gave it up."""

    error: ServiceError


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The stream broke or the worker died: the sequence may go on elsewhere.

    `since_s`: the worker's last sign of life, in this process's monotonic time. `is_cut`: only the
    connection is known to be gone; the worker may still run the sequence.
    """

    why: str
    since_s: float
    is_cut: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """The worker drains: it goes on with this sequence, but better another did."""


SequenceEvent = Started | Token | Failed | Lost


class Inbox:
    """One sequence's events, in order. `start_s_max`: seconds until the first must have come."""

    def __init__(
        self,
        clock: Clock,
        *,
        start_s_max: float = math.inf,
        events_max: int = EVENTS_MAX,
        behind_s_max: float = BEHIND_S_MAX,
    ) -> None:
        self._clock = clock
        self._events_max = events_max
        self._behind_s_max = behind_s_max
        self._events: deque[tuple[float, SequenceEvent]] = deque()
        self._available = asyncio.Event()
        self._is_closed = False
        self._is_leaving = False
        self._heard_s = clock.monotonic_s()
        self._quiet_s_max = start_s_max

    @property
    def is_overdue(self) -> bool:
        """Nothing came for so long that the worker, alive or not, has lost this sequence."""
        return not self._is_closed and self._clock.monotonic_s() - self._heard_s > self._quiet_s_max

    @property
    def is_closed(self) -> bool:
        """True once a terminal event was put in."""
        return self._is_closed

    def put(self, event: SequenceEvent | Waiting) -> bool:
        """Add an event. False when the reader was so far behind that it was detached just now.

        That a sequence waits is heard, and nothing for its reader.
        """
        if self._is_closed:
            return True
        now_s = self._clock.monotonic_s()
        if isinstance(event, Waiting):
            self._heard_s = now_s
            return True
        self._heard_s, self._quiet_s_max = now_s, SILENCE_MAX_S
        is_behind = bool(self._events) and now_s - self._events[0][0] > self._behind_s_max
        if is_behind or len(self._events) >= self._events_max:
            self._events.clear()
            self._add(now_s, Failed(error=self._detached()))
            return False
        self._add(now_s, event)
        return True

    def leave(self) -> None:
        """Tell the reader once, behind what it has not read yet, that the worker drains. It says
        nothing of the sequence itself: neither its silence nor its bound changes.
        """
        if not self._is_closed:
            self._is_leaving = True
            self._available.set()

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

    async def get(self) -> SequenceEvent | Leaving:
        """The next event; waits for it (the request's deadline bounds the wait)."""
        while not self._events:
            if self._is_leaving:
                self._is_leaving = False
                return Leaving()
            self._available.clear()
            await self._available.wait()
        return self._events.popleft()[1]
