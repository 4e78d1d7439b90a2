"""How much one gateway takes on at once, and when to come back.

Owns the counters; a slot is given back in the scope that took it, however that ends. Never queues:
what does not fit is refused at once. What other gateways say comes on top, where there is any.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass, replace
from typing import Final, Protocol

from baton.clock import Clock
from baton.errors import Reason, ServiceError
from baton.scheduling.fairness import is_below_share

RETRY_AFTER_S = 1.0
RATE_WINDOW_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RateState:
    """What a tenant with a limit may still ask for: `remaining` requests of `limit` a minute; all
    of them again `reset_s` seconds from now.
    """

    limit: int
    remaining: int
    reset_s: float


class RequestLimits:
    """Sequences running now, in all and per tenant."""

    def __init__(self, *, sequences_max: int, tenant_sequences_max: int) -> None:
        assert 0 < tenant_sequences_max <= sequences_max
        self._sequences_max = sequences_max
        self._tenant_sequences_max = tenant_sequences_max
        self._running = 0
        self._by_tenant: dict[str, int] = {}

    @property
    def running(self) -> int:
        """Sequences that hold a slot."""
        return self._running

    def of(self, tenant: str) -> int:
        """Slots that a tenant holds."""
        return self._by_tenant.get(tenant, 0)

    def is_below_share(self, tenant: str) -> bool:
        """Whether the tenant has less than its part of what runs here, by how many run any."""
        tenants = len(self._by_tenant.keys() | {tenant})
        return is_below_share(self.of(tenant), self._running, tenants)

    @contextmanager
    def admitted(self, tenant: str, sequences: int) -> Iterator[None]:
        """Hold slots for the block.

        QUOTA_EXCEEDED (429) over the tenant's share, QUEUE_FULL (503) when the gateway is full.
        """
        if self.of(tenant) + sequences > self._tenant_sequences_max:
            raise share_refused(self._tenant_sequences_max)
        if self._running + sequences > self._sequences_max:
            raise ServiceError(
                Reason.QUEUE_FULL,
                f"this gateway runs {self._sequences_max} answers, the most it takes",
                retry_after_s=RETRY_AFTER_S,
            )
        self._running += sequences
        self._by_tenant[tenant] = self.of(tenant) + sequences
        try:
            yield
        finally:
            self._running -= sequences
            left = self._by_tenant[tenant] - sequences
            if left:
                self._by_tenant[tenant] = left
            else:
                del self._by_tenant[tenant]


class RateLimits:
    """Requests of the last minute, for tenants that have a limit; no bound for the others."""

    def __init__(self, requests_per_minute: Mapping[str, int], clock: Clock) -> None:
        self._limits = dict(requests_per_minute)
        self._clock = clock
        self._began_s: dict[str, deque[float]] = {}

    def limit_of(self, tenant: str) -> int | None:
        """Requests a minute; None: no limit."""
        return self._limits.get(tenant)

    def count(self, tenant: str) -> RateState | None:
        """Count a request; QUOTA_EXCEEDED when the last minute had all that the tenant may have.
        None for a tenant without a limit.
        """
        limit = self.limit_of(tenant)
        if limit is None:
            return None
        now_s = self._clock.monotonic_s()
        began_s = self._began_s.setdefault(tenant, deque())
        while began_s and began_s[0] <= now_s - RATE_WINDOW_S:
            began_s.popleft()
        if len(began_s) >= limit:
            raise rate_refused(limit, began_s[0] + RATE_WINDOW_S - now_s)
        began_s.append(now_s)
        return RateState(limit=limit, remaining=limit - len(began_s), reset_s=RATE_WINDOW_S)

    def uncount(self, tenant: str) -> None:
        """Take back the newest count: the request was refused elsewhere."""
        began_s = self._began_s.get(tenant)
        if began_s:
            began_s.pop()


class AcrossGateways(Protocol):
    """What the other gateways have to say."""

    def admitted(
        self, tenant: str, sequences: int, requests_per_minute: int | None
    ) -> AbstractAsyncContextManager[int | None]:
        """Hold the tenant's places for the block; QUOTA_EXCEEDED where there is none left. Gives
        how many requests of this minute are left; None where nobody could say.
        """
        ...


class Admission:
    """All limits in their order: this gateway's own first, since they cost nothing to ask."""

    def __init__(
        self, limits: RequestLimits, rates: RateLimits, across: AcrossGateways | None = None
    ) -> None:
        self._limits = limits
        self._rates = rates
        self._across = across

    def is_below_share(self, tenant: str) -> bool:
        """Whether the tenant has less than its part of what runs at this gateway."""
        return self._limits.is_below_share(tenant)

    @asynccontextmanager
    async def admitted(self, tenant: str, sequences: int) -> AsyncIterator[RateState | None]:
        """Hold slots and places for the block; gives what is left of a tenant's limit.

        QUOTA_EXCEEDED (429) over the tenant's share or rate, QUEUE_FULL (503) when the gateway is
        full.
        """
        async with AsyncExitStack() as held:
            held.enter_context(self._limits.admitted(tenant, sequences))
            state = self._rates.count(tenant)
            if self._across is not None:
                limit = self._rates.limit_of(tenant)
                across = self._across.admitted(tenant, sequences, limit)
                try:
                    left = await held.enter_async_context(across)
                except ServiceError:
                    self._rates.uncount(tenant)
                    raise
                if state is not None and left is not None:
                    state = replace(state, remaining=min(state.remaining, left))
            yield state


def share_refused(sequences_max: int) -> ServiceError:
    """A tenant has all the answers it may have."""
    return ServiceError(
        Reason.QUOTA_EXCEEDED,
        f"at most {sequences_max} answers at once per tenant; wait for one",
        retry_after_s=RETRY_AFTER_S,
    )


def rate_refused(requests_per_minute: int, after_s: float) -> ServiceError:
    """A tenant asked as often as it may."""
    after_s = max(RETRY_AFTER_S, after_s)
    return ServiceError(
        Reason.QUOTA_EXCEEDED,
        f"at most {requests_per_minute} requests a minute for this tenant; the next one after "
        f"{math.ceil(after_s)} s",
        metadata={"requests_per_minute": str(requests_per_minute)},
        retry_after_s=after_s,
    )
