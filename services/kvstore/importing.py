"""Logs that come in whole: pages reserved first, the log made once they are filled.

Owns the core's half of PutBlob. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import Reason, ServiceError
from baton.kv.blocks import Scope
from baton.kv.sizing import pages_for
from baton.sampling_parameters import SamplingParameters
from services.kvstore.state import (
    LogState,
    PageRow,
    Phase,
    Rows,
    Tokens,
)
from services.kvstore.store import FIRST_GENERATION, Now, Store


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOrder:
    """What the new log is."""

    log_id: bytes
    request_id: str
    body_hash: bytes
    tenant: str
    scope: Scope
    label_digest: bytes
    numeric_class: str
    numeric_class_id: int
    ttl_s: float | None


class Importer:
    """Reserves pages for a transfer and turns filled ones into a sealed, kept log."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._core = store.core

    def require_new(self, log_id: bytes) -> None:
        """ALREADY_EXISTS for an id that a log has, or had; DRAINING or QUOTA_EXCEEDED where no
        other one is taken.
        """
        self._require_unused(log_id)
        self._store.require_not_draining()
        self._store.require_log_room()

    def _require_unused(self, log_id: bytes) -> None:
        if log_id in self._core.logs or log_id in self._core.tombstones:
            raise ServiceError(
                Reason.ALREADY_EXISTS, "log_id is in use; draw a new one", field="log_id"
            )

    def reserve(self, log_id: bytes, total_tokens: int, tenant: str) -> list[PageRow]:
        """Rows over fresh pages for so many tokens; nothing refers to them yet."""
        core = self._core
        self.require_new(log_id)
        block_tokens = core.block_tokens
        count = pages_for(total_tokens, block_tokens)
        self._store.home.require_room(count, tenant)
        pages = core.pool.grant(count, tenant)
        core.importing.update(pages)
        return [
            PageRow(
                page=page,
                page_generation=core.pool.generation(page),
                tokens=min(block_tokens, total_tokens - index * block_tokens),
            )
            for index, page in enumerate(pages)
        ]

    def abandon(self, rows: Sequence[PageRow]) -> None:
        """Gives reserved pages back."""
        for row in rows:
            self._core.importing.discard(row.page)
            self._core.pool.give_back(row.page)
        self._core.drain_freed()

    def adopt(
        self, order: ImportOrder, rows: list[PageRow], token_ids: Sequence[int], now: Now
    ) -> LogState:
        """The reserved pages are filled: they become a log nobody writes."""
        core = self._core
        self._require_unused(order.log_id)
        self._store.require_log_room()
        limits = core.limits
        ttl_s = limits.ttl_default_s if order.ttl_s is None else min(order.ttl_s, limits.ttl_max_s)
        log = LogState(
            log_id=order.log_id,
            tenant=order.tenant,
            scope=order.scope,
            tokens=Tokens(token_ids),
            prompt_tokens=len(token_ids),
            numeric_class=order.numeric_class,
            numeric_class_id=order.numeric_class_id,
            base_class_id=order.numeric_class_id,
            sampling=SamplingParameters(),
            generation=FIRST_GENERATION,
            phase=Phase.KEPT,
            rows=Rows(rows),
            committed=len(token_ids),
            chunk_list_digest=bytes(32),
            ttl_s=ttl_s,
            last_used_s=now.monotonic_s,
            expires_wall_s=now.wall_s + ttl_s,
            request_id=order.request_id,
            body_hash=order.body_hash,
            label_digest=order.label_digest,
            opened_wall_s=now.wall_s,
        )
        pages = [row.page for row in rows]
        core.importing.difference_update(pages)
        core.pool.commit_many(pages)
        core.logs[log.log_id] = log
        core.journal.opened(log, None)
        core.journal.snapshot(log)
        self._store.chains.offer(log)
        return log
