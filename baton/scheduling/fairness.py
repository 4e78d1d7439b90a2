"""Fair shares between tenants: the one place that says what fair is. Pure; time is passed in.

Owns three things, of which every scheduler uses what it needs. `ServiceLedger`: how much a tenant
was served of late, for slots that are held for long. `TenantTurns`: whose turn is next, for a
resource that is handed out a turn at a time. `is_below_share`: who still comes into a full queue.
Never knows what is served: tokens or seconds, they are divided by the tenant's weight, and so a
tenant of weight 2 gets twice as much before it counts as equal.

Levels (class, priority) come before all of this and are the schedulers' own: a lower one waits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

HALF_LIFE_S: Final = 30.0
TENANTS_MAX: Final = 4096
NOTHING: Final = 1e-3
"""So little is as good as none."""

REMEMBERED_MAX: Final = 1024
"""Tenants whose turns are remembered while they want none."""


class ServiceLedger:
    """What each tenant was served of late, by weight; half of it counts no more after a half-life.

    So nobody saves up for later, and nobody pays for long ago. Bounded: who was served least is
    forgotten first.
    """

    def __init__(self, half_life_s: float = HALF_LIFE_S, tenants_max: int = TENANTS_MAX) -> None:
        assert half_life_s > 0.0
        assert tenants_max >= 1
        self._half_life_s = half_life_s
        self._tenants_max = tenants_max
        self._served: dict[str, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self._served)

    def served(self, tenant: str, now_s: float) -> float:
        """What it was served of late, divided by its weight."""
        amount, at_s = self._served.get(tenant, (0.0, now_s))
        return amount * math.exp2(-max(0.0, now_s - at_s) / self._half_life_s)

    def charge(self, tenant: str, amount: float, now_s: float, weight: int = 1) -> None:
        """The tenant was served so much more."""
        assert weight >= 1
        self._served[tenant] = (self.served(tenant, now_s) + amount / weight, now_s)
        if len(self._served) > self._tenants_max:
            self._forget(now_s)

    def _forget(self, now_s: float) -> None:
        left = {name: self.served(name, now_s) for name in self._served}
        for name, amount in left.items():
            if amount < NOTHING:
                del self._served[name]
        while len(self._served) > self._tenants_max:
            del self._served[min(self._served, key=lambda name: left[name])]


class TenantTurns:
    """Whose turn is next: of the tenants that want one, who had least by weight; of several that
    had as much, the one whose last turn is longest ago. One of these for each level.

    A tenant that comes has had at least as much as the one whose turn was last had before that
    turn (start-time fair queueing): nobody saves up, nobody pays for having come late, it is next,
    and whoever leaves for a moment keeps what it had.
    """

    def __init__(self) -> None:
        self._had: dict[str, float] = {}
        self._last: dict[str, int] = {}
        self._floor = 0.0
        """What the tenant of the last turn had before it: nobody who waits had less."""
        self._turns = 0

    def __len__(self) -> int:
        return len(self._had)

    def come(self, tenant: str) -> None:
        """The tenant wants turns from now on."""
        self._had[tenant] = self._had_by(tenant)
        if len(self._had) > REMEMBERED_MAX:
            self._forget()

    def next_of(self, tenants: Iterable[str]) -> str | None:
        """Who is next of these, who all came; None of nobody. What is equal keeps its order."""
        return min(
            tenants, key=lambda name: (self._had_by(name), self._last.get(name, 0)), default=None
        )

    def charge(self, tenant: str, amount: float, weight: int = 1) -> None:
        """The tenant's turn took so much."""
        assert weight >= 1
        had = self._had_by(tenant)
        self._turns += 1
        self._floor, self._last[tenant] = had, self._turns
        self._had[tenant] = had + max(0.0, amount) / weight

    def _had_by(self, tenant: str) -> float:
        return max(self._floor, self._had.get(tenant, 0.0))

    def _forget(self) -> None:
        """Those that had no more than a newcomer has are as good as one."""
        self._had = {name: had for name, had in self._had.items() if had > self._floor}
        while len(self._had) > REMEMBERED_MAX:
            del self._had[min(self._had, key=self._had.__getitem__)]
        self._last = {name: turn for name, turn in self._last.items() if name in self._had}


def is_below_share(own: int, places: int, tenants: int) -> bool:
    """Whether a tenant that has `own` of so many places has less than its part of them, where
    `tenants`, itself among them, want some.

    Such a one still comes into a queue that others filled. So one tenant's many requests take
    every place that nobody else wants, and none that somebody does.
    """
    assert tenants >= 1
    return own * tenants < places
