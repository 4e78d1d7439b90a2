"""Quotas in a running store: read at the start, read again when the file changes, shown as metrics.

Owns the book of one store and the families that show it, with a quota file or without. Decides
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from baton.errors import ServiceError, StartupError
from baton.metrics import Metrics
from baton.metrics_table import counter, gauge
from services.kvstore.core import Core
from services.kvstore.pages import PagePool
from services.kvstore.quota_book import QuotaBook
from services.kvstore.quota_file import QuotaFile
from services.kvstore.quotas import OTHERS, Charges, QuotaPlan, Tier

LOOK_INTERVAL_S: Final = 2.0
"""How often the file is looked at."""

_log = structlog.stdlib.get_logger("services.kvstore")


class QuotaDesk:
    """The quotas of a store that has a quota file. `page_bytes`: what a page counts for."""

    def __init__(self, core: Core, page_bytes: int, path: Path, metrics: Metrics) -> None:
        """Before anything is granted. StartupError where the file, or what it says, does not do."""
        self._file = QuotaFile(path)
        try:
            self.book = QuotaBook(core, page_bytes, self._file.read())
        except ServiceError as error:
            raise StartupError(
                f"quotas: {error.message}", hint="docs/quotas.md shows a file", exit_code=2
            ) from error
        self._bytes = gauge(metrics, "baton_kvstore_quota_bytes")
        self._used = gauge(metrics, "baton_kvstore_quota_used_bytes")
        self._refused = counter(metrics, "baton_kvstore_quota_refused")
        self.book.on_refused = self._count
        self._show()
        _log.info("quotas_held", file=str(path), tenants=len(self.book.plan.tenants))

    async def look(self) -> None:
        """Takes over what the file says, if it has changed; every `LOOK_INTERVAL_S`."""
        self._file.follow(self._change)

    def _change(self, plan: QuotaPlan) -> None:
        self.book.change(plan)
        self._show()

    def _show(self) -> None:
        """Follows every tenant that is named; one that is not any more reads 0."""
        for tier in Tier:
            for label in (OTHERS, *sorted(self.book.plan.named(tier))):
                self._bytes.follow(self._sum(tier, label, _reserved), tier=tier.value, tenant=label)
                self._used.follow(self._sum(tier, label, _used), tier=tier.value, tenant=label)

    def _sum(
        self, tier: Tier, label: str, read: Callable[[Charges, str], int]
    ) -> Callable[[], float]:
        """Bytes over all arenas of the tier; each worker has one of its own in the device tier."""
        return lambda: float(
            sum(
                read(charges, label) * charges.page_bytes
                for charges in self.book.tiers()
                if charges.tier is tier
            )
        )

    def _count(self, tier: Tier, label: str) -> None:
        self._refused.add(tier=tier.value, tenant=label)


def _reserved(charges: Charges, label: str) -> int:
    return charges.reserved_for(label)


def _used(charges: Charges, label: str) -> int:
    return charges.used_by(label)


def show_no_quotas(core: Core, page_bytes: int, metrics: Metrics) -> None:
    """The same families of a store without a quota file: everybody together may have everything."""

    def pools(tier: Tier) -> list[PagePool]:
        if tier is Tier.HOST:
            return [core.pool]
        if tier is Tier.NVME:
            return [] if core.slots is None else [core.slots.pool]
        return list(core.device_pools.values())

    def reading(tier: Tier, read: Callable[[PagePool], int]) -> Callable[[], float]:
        return lambda: float(sum(read(pool) for pool in pools(tier)) * page_bytes)

    reserved = gauge(metrics, "baton_kvstore_quota_bytes")
    used = gauge(metrics, "baton_kvstore_quota_used_bytes")
    counter(metrics, "baton_kvstore_quota_refused")
    for tier in Tier:
        labels = {"tier": tier.value, "tenant": OTHERS}
        reserved.follow(reading(tier, lambda pool: pool.page_count), **labels)
        used.follow(reading(tier, lambda pool: pool.page_count - pool.free_count), **labels)
