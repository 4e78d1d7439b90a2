"""Quotas: who each page of a tier is charged to, and who may take whose.

Owns the charges of one tier (`Charges`) and the plan they are held against (`QuotaPlan`). Pure; a
`PagePool` that has charges tells them of every page it grants and frees. Never frees a page itself.

An *account* is what shares a reservation: a tenant that is named for the tier has its own, all
others share one, whose quota is the rest of the tier. The quotas of all accounts are the whole
tier, so whoever is within its quota finds pages that are free, its own, or of an account over its
quota. A page is charged to the tenant it was granted to until it is free, whoever refers to it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum, unique
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from baton.errors import Reason, ServiceError

NOBODY: Final = 0
"""The number of no tenant: the page is free."""

REST: Final = ""
"""The account of all tenants without a quota of their own."""

OTHERS: Final = "other"
"""What tenants without a quota are called where names are bounded."""

FEW_PAGES: Final = 16
"""Up to so many pages a loop is faster than an index."""


@unique
class Tier(StrEnum):
    """Where pages are."""

    HOST = "host"
    NVME = "nvme"
    DEVICE = "device"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaPlan:
    """Bytes by tenant and tier, as an operator wrote them; `default` is each other tenant's most.

    A tenant that is not named for a tier shares the rest of that tier with the others.
    """

    tenants: Mapping[str, Mapping[Tier, int]] = field(default_factory=dict)
    default: Mapping[Tier, int] = field(default_factory=dict)

    def named(self, tier: Tier) -> dict[str, int]:
        """Bytes of each tenant that has a quota of its own in the tier."""
        return {name: tiers[tier] for name, tiers in self.tenants.items() if tier in tiers}


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantUsage:
    """What a tenant has of a tier. `quota_pages` None: only what all others share bounds it."""

    tenant: str
    used_pages: int
    quota_pages: int | None
    is_named: bool


@dataclass(slots=True)
class _Account:
    name: str
    quota: int
    used: int = 0

    @property
    def is_over(self) -> bool:
        return self.used > self.quota


@dataclass(slots=True)
class _Tenant:
    name: str
    account: _Account
    limit: int | None
    used: int = 0


class Charges:
    """The charges of one tier of `page_count` pages of `page_bytes`.

    Pages are told once: `charge` when they stop being free, `uncharge` when they are free again.
    """

    def __init__(self, tier: Tier, page_count: int, page_bytes: int, plan: QuotaPlan) -> None:
        self.tier = tier
        self.page_count = page_count
        self.page_bytes = page_bytes
        self.refused: Counter[str] = Counter()
        self.on_refused: Callable[[str], None] = lambda _label: None
        self._number = array("I", [NOBODY]) * page_count
        self._numbers = np.frombuffer(self._number, dtype=np.uint32)
        self._tenants: list[_Tenant | None] = [None]
        self._unused: list[int] = []
        self._number_of: dict[str, int] = {}
        self.apply(plan)

    # --- the plan ---------------------------------------------------------------------------

    def fault(self, plan: QuotaPlan) -> str | None:
        """Why the plan does not fit into this tier: names both numbers and what to change."""
        named = plan.named(self.tier)
        sizes = {f"tenants.{name}.{self.tier}": size for name, size in named.items()}
        if self.tier in plan.default:
            sizes[f"default.{self.tier}"] = plan.default[self.tier]
        for field_name, size in sizes.items():
            if 0 < size < self.page_bytes:
                return (
                    f"{field_name}: {size} bytes are less than one page of {self.page_bytes}; "
                    "give at least that, or 0 for nothing"
                )
        pages = sum(self._pages(quota) for quota in named.values())
        if pages <= self.page_count:
            return None
        return (
            f"tenants.*.{self.tier}: the quotas are {sum(named.values())} bytes together "
            f"({pages} pages), the tier has {self.page_count * self.page_bytes} "
            f"({self.page_count} pages of {self.page_bytes}); lower them or make the tier larger"
        )

    def apply(self, plan: QuotaPlan) -> None:
        """Holds the charges against another plan, which fits; nothing is given up for it now."""
        assert self.fault(plan) is None, "check it first"
        self._plan = plan
        quotas = {name: self._pages(size) for name, size in plan.named(self.tier).items()}
        self._default = plan.default.get(self.tier)
        rest = _Account(REST, self.page_count - sum(quotas.values()))
        self._accounts = {REST: rest} | {name: _Account(name, q) for name, q in quotas.items()}
        for tenant in self._tenants:
            if tenant is not None:
                tenant.account = self._accounts.get(tenant.name, rest)
                tenant.limit = self._limit(tenant.name)
                tenant.account.used += tenant.used

    def _pages(self, size: int) -> int:
        """Whole pages: what does not fill one is not granted."""
        return size // self.page_bytes

    def _limit(self, tenant: str) -> int | None:
        """The most a tenant may have besides what bounds its account."""
        if tenant in self._accounts or self._default is None:
            return None
        return min(self._pages(self._default), self._accounts[REST].quota)

    # --- who may have more ------------------------------------------------------------------

    def account_of(self, tenant: str) -> str:
        """The account a tenant's pages count in."""
        return tenant if tenant in self._accounts else REST

    def eviction_keys(self, tenant: str) -> tuple[str, ...]:
        """The orders of eviction a tenant's logs stand in: its account's, and its own where it
        has a limit of its own in a shared account.
        """
        account = self.account_of(tenant)
        return (account,) if self._limit(tenant) is None else (account, own_key(tenant))

    def quota_pages(self, tenant: str) -> int | None:
        """A tenant's own bound; None where it only shares the rest."""
        account = self._accounts.get(tenant)
        return self._limit(tenant) if account is None else account.quota

    def used(self, tenant: str) -> int:
        """Pages charged to a tenant."""
        found = self._find(tenant)
        return 0 if found is None else found.used

    def own_excess(self, tenant: str, pages: int) -> int:
        """Pages the tenant itself has to give up before it may have `pages` more."""
        bound = self.quota_pages(tenant)
        return 0 if bound is None else max(self.used(tenant) + pages - bound, 0)

    def account_excess(self, tenant: str, pages: int) -> int:
        """Pages its account has to give up before the tenant may have `pages` more."""
        account = self._accounts[self.account_of(tenant)]
        return max(account.used + pages - account.quota, 0)

    def excess(self, tenant: str, pages: int) -> int:
        """The larger of `own_excess` and `account_excess`; 0: it may have them."""
        return max(self.own_excess(tenant, pages), self.account_excess(tenant, pages))

    def may_grant(self, tenant: str, pages: int) -> bool:
        """Whether the quotas let the tenant have `pages` more as it stands."""
        return self.excess(tenant, pages) == 0

    def room(self, tenant: str) -> int:
        """How many pages more the quotas let the tenant have as it stands."""
        account = self._accounts[self.account_of(tenant)]
        room = account.quota - account.used
        bound = self.quota_pages(tenant)
        return max(room if bound is None else min(room, bound - self.used(tenant)), 0)

    def is_covered(self, tenant: str) -> bool:
        """Its account is within its quota: nobody else's need takes its pages."""
        return not self._accounts[self.account_of(tenant)].is_over

    def may_evict(self, owner: str, for_tenant: str | None) -> bool:
        """Whether a need of `for_tenant` (None: the store's own) may take pages of `owner`."""
        account = self.account_of(owner)
        if for_tenant is not None and account == self.account_of(for_tenant):
            return True
        return self._accounts[account].is_over

    def over(self) -> list[str]:
        """The accounts over their quotas: anybody's need takes from them first."""
        return [account.name for account in self._accounts.values() if account.is_over]

    def require(self, tenant: str, pages: int) -> None:
        """QUOTA_EXCEEDED where the tenant can never have so many pages at once."""
        account = self._accounts[self.account_of(tenant)]
        bound = self.quota_pages(tenant)
        if pages > (account.quota if bound is None else bound):
            raise self.refusal(tenant, pages)

    def refusal(self, tenant: str, pages: int) -> ServiceError:
        """Why the tenant gets no `pages` more: QUOTA_EXCEEDED over its own bound, or where all that
        is not others' is too little; else PAGES_EXHAUSTED. Counted.
        """
        account = self._accounts[self.account_of(tenant)]
        bound = self.quota_pages(tenant)
        quota = account.quota if bound is None else bound
        self.refused[self._label(tenant)] += 1
        self.on_refused(self._label(tenant))
        size = self.page_bytes
        used = account.used if bound is None else self.used(tenant)
        numbers = {
            "tier": self.tier.value,
            "wanted_bytes": str(pages * size),
            "used_bytes": str(used * size),
            "quota_bytes": str(quota * size),
        }
        if bound is None and pages <= quota:
            return ServiceError(
                Reason.PAGES_EXHAUSTED,
                f"{pages * size} bytes of the {self.tier} tier wanted; of the {quota * size} that "
                f"tenants without a quota share, {used * size} are in use; retry later",
                metadata=numbers,
                retry_after_s=0.5,
            )
        return ServiceError(
            Reason.QUOTA_EXCEEDED,
            f"the tenant's quota of the {self.tier} tier is {quota * size} bytes, {used * size} "
            f"are in use, {pages * size} more were wanted; end or drop logs, shorten the request, "
            f"or raise tenants.<name>.{self.tier} in the quota file",
            field="tenant",
            metadata=numbers,
        )

    # --- charging ---------------------------------------------------------------------------

    def charge(self, pages: list[int] | npt.NDArray[np.integer[Any]], tenant: str | None) -> None:
        """Pages that were free are the tenant's (None: nobody's in particular) until uncharged."""
        if not len(pages):
            return
        number = self._number_for(tenant or REST)
        if len(pages) <= FEW_PAGES:
            for page in pages:
                self._number[page] = number
        else:
            self._numbers[np.asarray(pages, dtype=np.int64)] = number
        self._add(number, len(pages))

    def uncharge(self, page: int) -> None:
        """The page is free."""
        number = self._number[page]
        if number != NOBODY:
            self._number[page] = NOBODY
            self._add(number, -1)

    def disown(self, page: int) -> None:
        """The page is lost to everybody for good: it counts for nobody in particular."""
        if self._number[page] != NOBODY:
            self.uncharge(page)
            self.charge([page], None)

    def uncharge_many(self, pages: npt.NDArray[np.int64]) -> None:
        """`uncharge` of each page; they are distinct."""
        if len(pages) <= FEW_PAGES:
            for page in pages.tolist():
                self.uncharge(page)
            return
        counts = np.bincount(self._numbers[pages])
        self._numbers[pages] = NOBODY
        for number in np.flatnonzero(counts).tolist():
            if number != NOBODY:
                self._add(number, -int(counts[number]))

    def settle(self, pages: npt.NDArray[np.int64], tenant: str) -> None:
        """After a restart: those of `pages` that are charged to nobody in particular are his."""
        nobody = self._number_of.get(REST)
        if nobody is None:
            return
        found = np.unique(pages[self._numbers[pages] == nobody])
        self.uncharge_many(found)
        self.charge(found, tenant)

    def _add(self, number: int, pages: int) -> None:
        tenant = self._tenants[number]
        assert tenant is not None
        tenant.used += pages
        tenant.account.used += pages
        if tenant.used == 0:
            # Tenants come and go: a number is used again, so that there are no more than pages.
            self._tenants[number] = None
            del self._number_of[tenant.name]
            self._unused.append(number)

    def _find(self, name: str) -> _Tenant | None:
        number = self._number_of.get(name)
        return None if number is None else self._tenants[number]

    def _number_for(self, name: str) -> int:
        number = self._number_of.get(name)
        if number is None:
            account = self._accounts[self.account_of(name)]
            tenant = _Tenant(name, account, self._limit(name))
            if self._unused:
                number = self._unused.pop()
                self._tenants[number] = tenant
            else:
                number = len(self._tenants)
                self._tenants.append(tenant)
            self._number_of[name] = number
        return number

    # --- what is told -----------------------------------------------------------------------

    def owner(self, page: int) -> str | None:
        """Whom the page is charged to; None where it is free."""
        tenant = self._tenants[self._number[page]]
        return None if tenant is None else tenant.name

    def are_charged_to(self, pages: npt.NDArray[np.int64], tenant: str) -> bool:
        """Whether all of `pages` are charged to the tenant."""
        return bool((self._numbers[pages] == self._number_of.get(tenant)).all())

    def usage(self) -> list[TenantUsage]:
        """Every tenant that is named or has pages, by name."""
        names = {*self._number_of, *self._accounts} - {REST}
        return [
            TenantUsage(
                tenant=name,
                used_pages=self.used(name),
                quota_pages=self.quota_pages(name),
                is_named=name in self._accounts,
            )
            for name in sorted(names)
        ]

    def named(self) -> list[str]:
        """The tenants with a quota of their own in this tier."""
        return sorted(set(self._accounts) - {REST})

    def used_by(self, label: str) -> int:
        """Pages of a named tenant, or of all `OTHERS`; 0 for another label."""
        account = self._accounts.get(REST if label == OTHERS else label)
        return 0 if account is None else account.used

    def reserved_for(self, label: str) -> int:
        """Pages a named tenant, or all `OTHERS` together, may have; 0 for another label."""
        account = self._accounts.get(REST if label == OTHERS else label)
        return 0 if account is None else account.quota

    def _label(self, tenant: str) -> str:
        return tenant if tenant in self._accounts else OTHERS

    def check_invariants(self, is_free: npt.NDArray[np.bool_]) -> None:
        """Asserts that exactly the pages that are not free are charged, and that all sums agree."""
        assert np.array_equal(self._numbers == NOBODY, is_free), "charged and free, or neither"
        counts = np.bincount(self._numbers, minlength=len(self._tenants)).tolist()
        sums: Counter[str] = Counter()
        for number, tenant in enumerate(self._tenants):
            used = 0 if tenant is None else tenant.used
            assert number == NOBODY or counts[number] == used, (number, used)
            if tenant is not None:
                assert self._number_of[tenant.name] == number
                assert tenant.account is self._accounts[self.account_of(tenant.name)]
                sums[tenant.account.name] += used
        for account in self._accounts.values():
            assert account.used == sums[account.name], account
        assert sum(account.quota for account in self._accounts.values()) == self.page_count


def own_key(tenant: str) -> str:
    """The eviction order of one tenant's logs alone; no account is called so."""
    return f"\0{tenant}"
