"""Publishing and revoking prefixes in the store's core.

Owns the checks of a publication and the pages a published prefix holds. Pure.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from baton.errors import Reason, ServiceError
from baton.kv.digests import history_at, ids_hash
from baton.kv.sizing import pages_for
from services.kvstore.chains import ScopeChains
from services.kvstore.core import Core, invalid
from services.kvstore.home import Event, require_allowed
from services.kvstore.keeper import require_tenant
from services.kvstore.prefixes import (
    PREFIX_NAME_CHARS_MAX,
    PREFIX_TENANTS_MAX,
    Prefix,
)

NO_HASH = bytes(32)
TENANT_BYTES_MAX = 256
MODEL_CHARS_MAX = 256
VERSION_MAX = (1 << 32) - 1
PINNED_SHARE_MAX = 0.5
"""Of the arena's pages, how many pinned prefixes may hold in all."""

EXPIRE_WALL_S_MAX = 253_402_300_800.0
"""The end of the year 9999, where timestamps end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishOrder:
    """A request to publish positions [0, position) of a log. Empty hashes are not compared.

    `version` must be above that of every prefix of the same name, whose place it takes.
    """

    prefix_id: str
    name: str
    tenant: str
    tenants: tuple[str, ...]
    log_id: bytes
    position: int
    text_hash: bytes
    ids_hash: bytes
    history_end: bytes
    text_bytes: int
    template_digest: bytes
    model: str
    expire_wall_s: float | None
    version: int = 1
    is_pinned: bool = False


class PrefixKeeper:
    """Publishes and revokes."""

    def __init__(self, core: Core, chains: ScopeChains) -> None:
        self._core = core
        self._chains = chains

    def publish(self, order: PublishOrder, wall_s: float) -> Prefix:
        """Offers a prefix under a name; its pages stay whatever becomes of the log.

        Older ones of the name are withdrawn in the same step, but for pinned ones of other
        content. ALREADY_EXISTS where the name has this version or a later one.
        """
        log = self._core.find(order.log_id)
        require_tenant(log, order.tenant)
        require_allowed(log, Event.FORK)
        older = self._check(order, wall_s)
        if not 1 <= order.position <= log.committed:
            raise invalid("prefix.log.position", f"must be 1 to {log.committed}, where KV ends")
        tokens = tuple(log.tokens[: order.position])
        limits = self._core.limits
        history_end = history_at(limits.kv_digest, limits.block_tokens, tokens)
        own_ids_hash = ids_hash(tokens)
        if order.ids_hash not in (b"", own_ids_hash):
            raise invalid("prefix.segment.ids_hash", "is not that of the log's tokens")
        if order.history_end not in (b"", history_end):
            raise invalid("prefix.segment.history_end", "is not that of the log's tokens")
        rows = list(log.rows.head(order.position, limits.block_tokens))
        prefix = Prefix(
            prefix_id=order.prefix_id,
            name=order.name,
            owner_tenant=order.tenant,
            tenants=order.tenants,
            log_id=order.log_id,
            generation=log.generation,
            position=order.position,
            token_ids=tokens,
            rows=tuple(rows),
            numeric_class=log.numeric_class,
            numeric_class_id=log.numeric_class_id,
            history_end=history_end,
            text_hash=order.text_hash or NO_HASH,
            ids_hash=own_ids_hash,
            text_bytes=order.text_bytes,
            template_digest=order.template_digest or bytes(16),
            tokenizer_hash=limits.tokenizer_hash,
            model=order.model,
            create_wall_s=wall_s,
            expire_wall_s=order.expire_wall_s,
            version=order.version,
            is_pinned=order.is_pinned,
        )
        replaced = [one for one in older if not one.is_pinned or one.is_content_of(prefix)]
        if prefix.is_pinned:
            self._require_pinnable(len(rows), {one.prefix_id for one in replaced})
        self._core.prefixes.add(prefix)
        self._core.pool.hold_many([row.page for row in rows])
        self._core.journal.published(prefix)
        self._chains.offer_prefix(prefix)
        for one in replaced:
            self._withdraw(one, wall_s)
        return prefix

    def _require_pinnable(self, pages: int, replaced: Collection[str]) -> None:
        """QUOTA_EXCEEDED where pinned prefixes, but those `replaced` (ids), would hold more of the
        arena than they may; one that is on NVMe only comes back on use, and counts.
        """
        pinned = sum(
            pages_for(one.position, self._core.block_tokens)
            for one in self._core.prefixes.all()
            if one.is_pinned and one.prefix_id not in replaced
        )
        most = int(PINNED_SHARE_MAX * self._core.pool.page_count)
        if pinned + pages > most:
            raise ServiceError(
                Reason.QUOTA_EXCEEDED,
                f"pinned prefixes hold {pinned} pages of at most {most}, and this one needs "
                f"{pages}; publish it without pin, or delete a pinned one",
                field="prefix.pinned",
            )

    def _check(self, order: PublishOrder, wall_s: float) -> list[Prefix]:
        """The prefixes of the same name; raises for what cannot be published."""
        if not 1 <= len(order.name) <= PREFIX_NAME_CHARS_MAX:
            raise invalid("prefix.name", f"must have 1 to {PREFIX_NAME_CHARS_MAX} characters")
        if len(order.tenants) > PREFIX_TENANTS_MAX or any(
            not 1 <= len(tenant.encode()) <= TENANT_BYTES_MAX for tenant in order.tenants
        ):
            raise invalid("prefix.tenants", f"name at most {PREFIX_TENANTS_MAX} tenants")
        for name, value, sizes in (
            ("segment.text_hash", order.text_hash, (0, 32)),
            ("template_digest", order.template_digest, (0, 16)),
        ):
            if len(value) not in sizes:
                raise invalid(f"prefix.{name}", f"must be {sizes[-1]} bytes")
        if order.expire_wall_s is not None and order.expire_wall_s <= wall_s:
            raise invalid("prefix.expire_time", "is over already")
        if order.expire_wall_s is not None and order.expire_wall_s > EXPIRE_WALL_S_MAX:
            raise invalid("prefix.expire_time", "is no time; leave it out to have no end")
        if len(order.model) > MODEL_CHARS_MAX:
            raise invalid("prefix.model", f"must have at most {MODEL_CHARS_MAX} characters")
        if not 1 <= order.version <= VERSION_MAX:
            raise invalid("prefix.version", f"must be 1 to {VERSION_MAX}")
        named = self._core.prefixes.named(order.tenant, order.name)
        newest = max((prefix.version for prefix in named), default=0)
        if order.version <= newest:
            raise ServiceError(
                Reason.ALREADY_EXISTS,
                f"version {newest} of this name is published; give a later one, or revoke it first",
                field="prefix.name",
            )
        return named

    def revoke(self, prefix_id: str, tenant: str | None, wall_s: float) -> Prefix:
        """Ends lookups and forks at once; logs that use its pages keep them.

        `tenant` None is an operator. Another tenant's prefix looks like none.
        """
        prefix = self._core.prefixes.find(prefix_id)
        if tenant is not None and prefix.owner_tenant != tenant:
            raise ServiceError(
                Reason.PREFIX_NOT_FOUND, "no published prefix of this id", field="prefix_id"
            )
        self._withdraw(prefix, wall_s)
        return prefix

    def _withdraw(self, prefix: Prefix, wall_s: float) -> None:
        self._core.prefixes.remove(prefix.prefix_id)
        self._core.journal.revoked(prefix, wall_s)
        self._core.cut_copies(prefix, 0)
        self._chains.withdraw_prefix(prefix)
        for row in prefix.rows:
            self._core.pool.drop(row.page)
        self._core.drain_freed()

    def expire(self, wall_s: float) -> None:
        """Withdraws what has come to its own end."""
        for prefix in self._core.prefixes.over(wall_s):
            self._withdraw(prefix, wall_s)
