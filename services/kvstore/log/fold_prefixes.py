"""Published prefixes as their records tell them.

Owns the fold of PUBLISH and REVOKE, and each prefix's tables. Pure. A prefix keeps the tokens and
rows its log had when it was published, whatever becomes of the log.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

from services.kvstore.log.fold_bases import Source
from services.kvstore.log.folded import Folded
from services.kvstore.log.format import RecordAddress
from services.kvstore.log.kv_rows import KvRows
from services.kvstore.log.store_records import Publish, Revoke, Tier
from services.kvstore.prefixes import Prefix
from services.kvstore.rows import PageRow, Rows
from services.kvstore.state import TOKEN_TYPECODE


class PrefixFold:
    """The prefixes that are published, in the order of publication."""

    def __init__(self, nvme_id: bytes | None = None) -> None:
        self._nvme_id = nvme_id
        # With the pages of each in the host and the slots of its copies on the NVMe tier.
        self._found: dict[str, tuple[Prefix, KvRows, KvRows]] = {}

    def clear(self) -> None:
        """A REVOKE may be missing: nothing is published any more."""
        self._found.clear()

    def source(self, log_id: bytes, position: int) -> Source | None:
        """Tokens and rows of a log's first `position` positions, if they are published."""
        for prefix, kv, _ in self._found.values():
            if prefix.log_id == log_id and prefix.position >= position:
                return Source(tokens=array(TOKEN_TYPECODE, prefix.token_ids), kv=kv)
        return None

    def publish(self, at: RecordAddress, record: Publish, source: Folded | None) -> None:
        """PUBLISH; again under the same id replaces it. Nothing is published of doubted tokens."""
        self._found.pop(record.prefix_id, None)
        if source is None or source.is_doubted or source.state.position < at.position:
            return
        expires_ms = record.expires_wall_ms
        prefix = Prefix(
            prefix_id=record.prefix_id,
            name=record.name,
            owner_tenant=record.owner_tenant,
            tenants=record.tenants,
            log_id=at.log_id,
            generation=at.generation,
            position=at.position,
            token_ids=tuple(source.state.tokens[: at.position]),
            rows=(),
            numeric_class="",
            numeric_class_id=record.numeric_class_id,
            history_end=record.history_end,
            text_hash=record.text_hash,
            ids_hash=record.ids_hash,
            text_bytes=record.text_bytes,
            template_digest=record.template_digest,
            tokenizer_hash=record.tokenizer_hash,
            model="",
            create_wall_s=record.created_wall_ms / 1000.0,
            expire_wall_s=None if expires_ms is None else expires_ms / 1000.0,
            version=record.version,
            is_pinned=record.is_pinned,
        )
        kv = source.kv.head(at.position)
        self._found[record.prefix_id] = (prefix, kv, KvRows(kv.block_tokens, self._nvme_id))

    def table(self, prefix_id: str, tier: Tier) -> KvRows | None:
        """A prefix's table in a tier; None when nothing is published under the id."""
        known = self._found.get(prefix_id)
        if known is None:
            return None
        return known[1] if tier is Tier.HOST else known[2]

    def revoke(self, record: Revoke) -> None:
        """For all, or for some tenants: these are taken from those it is granted to."""
        known = self._found.get(record.prefix_id)
        if known is None:
            return
        if not record.tenants:
            del self._found[record.prefix_id]
            return
        known[0].tenants = tuple(t for t in known[0].tenants if t not in record.tenants)

    def result(
        self,
        current: Callable[[list[PageRow]], list[PageRow]],
        current_cold: Callable[[KvRows], Rows],
    ) -> list[Prefix]:
        """All of them, with the rows that `current` and `current_cold` leave of theirs."""
        for prefix, kv, cold in self._found.values():
            prefix.rows = tuple(current(kv.found()))
            prefix.cold = current_cold(cold)
        return [prefix for prefix, _, _ in self._found.values()]
