"""How much of each tier is used, and by whom.

Owns the counting: what quotas charge where they are held, else a walk over all logs, in slices.
Read-only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from services.kvstore.core import Core
from services.kvstore.listing import TenantPages, host_pages, nvme_pages
from services.kvstore.pages import PagePool
from services.kvstore.quotas import TenantUsage, Tier
from services.kvstore.state import Rows
from services.kvstore.walking import all_logs


@dataclass(frozen=True, slots=True, kw_only=True)
class TierUse:
    """The use of one tier; `logs` counts logs of each tenant, wherever their KV is."""

    tier: Tier
    pages_total: int
    pages_used: int
    tenants: Sequence[TenantUsage]
    logs: Mapping[str, int]


async def usage_of(core: Core) -> list[TierUse]:
    """Every tier there is."""
    pools = {Tier.HOST: core.pool}
    if core.slots is not None:
        pools[Tier.NVME] = core.slots.pool
    walks = {tier: _walk(tier, pool) for tier, pool in pools.items() if pool.charges is None}
    logs_of: Counter[str] = Counter()
    # Published prefixes first: what they share with logs is their owner's.
    for prefix in core.prefixes.all():
        for tier, walk in walks.items():
            rows = Rows(prefix.rows if tier is Tier.HOST else prefix.cold)
            walk.count(prefix.owner_tenant, rows.pages())
    async for logs in all_logs(core):
        logs_of.update(log.tenant for log in logs)
        for walk in walks.values():
            walk.add(logs)
    found = [
        TierUse(
            tier=tier,
            pages_total=pool.page_count,
            pages_used=pool.page_count - pool.free_count,
            tenants=_tenants(pool, walks.get(tier)),
            logs=logs_of,
        )
        for tier, pool in pools.items()
    ]
    if core.device_pools:
        found.append(_device_use(list(core.device_pools.values()), logs_of))
    return found


def _device_use(pools: Sequence[PagePool], logs_of: Mapping[str, int]) -> TierUse:
    """The device tier: pages of all workers together; by tenant where quotas are held."""
    used: Counter[str] = Counter()
    named: dict[str, TenantUsage] = {}
    for pool in pools:
        for one in pool.charges.usage() if pool.charges is not None else ():
            used[one.tenant] += one.used_pages
            named[one.tenant] = one
    return TierUse(
        tier=Tier.DEVICE,
        pages_total=sum(pool.page_count for pool in pools),
        pages_used=sum(pool.page_count - pool.free_count for pool in pools),
        tenants=[replace(one, used_pages=used[name]) for name, one in named.items()],
        logs=logs_of,
    )


def _walk(tier: Tier, pool: PagePool) -> TenantPages:
    return TenantPages(pool, host_pages if tier is Tier.HOST else nvme_pages)


def _tenants(pool: PagePool, walk: TenantPages | None) -> list[TenantUsage]:
    if pool.charges is not None:
        return pool.charges.usage()
    assert walk is not None
    return [
        TenantUsage(tenant=name, used_pages=pages, quota_pages=None, is_named=False)
        for name, pages in walk.pages.items()
    ]
