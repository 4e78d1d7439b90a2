"""How much one gateway takes on at once, and when to come back.

Owns the counters; a slot is given back in the scope that took it, however that ends. Never queues:
what does not fit is refused at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from baton.errors import Reason, ServiceError

RETRY_AFTER_S = 1.0


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

    @contextmanager
    def admitted(self, tenant: str, sequences: int) -> Iterator[None]:
        """Hold slots for the block.

        QUOTA_EXCEEDED (429) over the tenant's share, QUEUE_FULL (503) when the gateway is full.
        """
        if self.of(tenant) + sequences > self._tenant_sequences_max:
            raise ServiceError(
                Reason.QUOTA_EXCEEDED,
                f"at most {self._tenant_sequences_max} answers at once per tenant; wait for one",
                retry_after_s=RETRY_AFTER_S,
            )
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
