"""The quotas of one store: its plan over all tiers there are.

Owns which tiers are charged, the change from one plan to another, and the charges of a start. Pure.
A store without a quota file has no book, and its pools no charges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from baton.errors import Reason, ServiceError
from services.kvstore.core import Core
from services.kvstore.pages import PagePool
from services.kvstore.quotas import Charges, QuotaPlan, Tier
from services.kvstore.state import PageRow, Rows


class QuotaBook:
    """The charges of a store's tiers, all held against one plan."""

    def __init__(self, core: Core, page_bytes: int, plan: QuotaPlan) -> None:
        """Charges the host's pages and those of the NVMe tier where there is one. INVALID_REQUEST,
        and nothing is charged, where the plan does not fit.
        """
        self._core = core
        self._page_bytes = page_bytes
        self._devices: dict[str, Charges] = {}
        # Told of every refusal: the tier, and the tenant where it is named, else `OTHERS`.
        self.on_refused: Callable[[Tier, str], None] = lambda _tier, _label: None
        # Called when the plan has changed.
        self.on_changed: Callable[[], None] = lambda: None
        self.plan = QuotaPlan()
        pools = {Tier.HOST: core.pool}
        if core.slots is not None:
            pools[Tier.NVME] = core.slots.pool
        self._fixed = {tier: self._charges(tier, pool) for tier, pool in pools.items()}
        self.change(plan)
        for tier, pool in pools.items():
            assert pool.free_count == pool.page_count, "before anything is granted"
            pool.charges = self._fixed[tier]

    def _charges(self, tier: Tier, pool: PagePool) -> Charges:
        charges = Charges(tier, pool.page_count, self._page_bytes, QuotaPlan())
        charges.on_refused = lambda label: self.on_refused(tier, label)
        return charges

    def tiers(self) -> Iterator[Charges]:
        """The charges of every tier; each worker's device memory is one of its own."""
        yield from self._fixed.values()
        yield from self._devices.values()

    def of(self, tier: Tier) -> Charges | None:
        """The charges of the host or NVMe tier; None where there is none."""
        return self._fixed.get(tier)

    def change(self, plan: QuotaPlan) -> None:
        """Holds every tier against `plan` from now on; INVALID_REQUEST, and nothing changed, where
        it does not fit. Nothing is evicted at once: whoever is over is not covered any more.
        """
        for charges in self.tiers():
            fault = charges.fault(plan)
            if fault is not None:
                raise ServiceError(Reason.INVALID_REQUEST, fault, field="tenants")
        self.plan = plan
        for charges in self.tiers():
            charges.apply(plan)
        self._core.logs.order_by(self._fixed[Tier.HOST].eviction_keys)
        self.on_changed()

    # --- device memory ----------------------------------------------------------------------

    def add_device(self, worker_id: str, pool: PagePool) -> None:
        """A worker brought device memory, of which nothing is granted yet."""
        charges = self._charges(Tier.DEVICE, pool)
        fault = charges.fault(self.plan)
        if fault is not None:
            raise ServiceError(Reason.INVALID_REQUEST, fault, field="hello.slots")
        charges.apply(self.plan)
        pool.charges = self._devices[worker_id] = charges

    def forget_device(self, worker_id: str) -> None:
        """The worker's device memory is gone, and what was there with it."""
        self._devices.pop(worker_id, None)


def recharge(core: Core) -> None:
    """At a restart: who was given each page first, as far as the tables still say it.

    A published prefix's pages are its owner's; else the log that was opened first has them, and
    what a fenced writer may still write is its log's. What nobody claims counts for all that have
    no quota of their own. Does nothing where quotas are not held.
    """
    host, nvme = core.pool.charges, None if core.slots is None else core.slots.pool.charges
    logs = sorted(core.logs.values(), key=lambda log: log.opened_wall_s)
    if host is not None:
        for prefix in core.prefixes.all():
            host.settle(_pages(prefix.rows), prefix.owner_tenant)
        for log in logs:
            host.settle(_pages(log.rows), log.tenant)
            host.settle(np.fromiter(log.granted, dtype=np.int64), log.tenant)
        _settle_fenced(core, host)
    if nvme is not None:
        for prefix in core.prefixes.all():
            nvme.settle(_pages(prefix.cold), prefix.owner_tenant)
        for log in logs:
            nvme.settle(_pages(log.cold), log.tenant)


def _settle_fenced(core: Core, host: Charges) -> None:
    for fence in core.pool.fences():
        log = core.logs.get(fence.log_id)
        if log is not None:
            pages = core.pool.fenced_pages(fence)
            host.settle(np.fromiter(pages, dtype=np.int64), log.tenant)


def _pages(rows: Iterable[PageRow]) -> npt.NDArray[np.int64]:
    table = rows if isinstance(rows, Rows) else Rows(rows)
    return table.pages().astype(np.int64)
