"""Logs that come in whole: pages reserved first, the log made once they are filled.

Owns the core's half of PutBlob. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import Reason, ServiceError
from baton.kv.blocks import Scope
from baton.kv.sizing import pages_for
from baton.sampling_parameters import SamplingParameters
from services.kvstore.state import (
    TOKEN_TYPECODE,
    LogState,
    PageRow,
    Phase,
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

    def reserve(self, log_id: bytes, total_tokens: int) -> list[PageRow]:
        """Rows over fresh pages for so many tokens; nothing refers to them yet."""
        core = self._core
        if log_id in core.logs or log_id in core.tombstones:
            raise ServiceError(
                Reason.ALREADY_EXISTS, "log_id is in use; draw a new one", field="log_id"
            )
        block_tokens = core.block_tokens
        count = pages_for(total_tokens, block_tokens)
        self._store.home.require_room(count)
        pages = core.pool.grant(count)
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
        if order.log_id in core.logs:
            raise ServiceError(
                Reason.ALREADY_EXISTS, "log_id is in use; draw a new one", field="log_id"
            )
        limits = core.limits
        ttl_s = limits.ttl_default_s if order.ttl_s is None else min(order.ttl_s, limits.ttl_max_s)
        log = LogState(
            log_id=order.log_id,
            tenant=order.tenant,
            scope=order.scope,
            tokens=array(TOKEN_TYPECODE, token_ids),
            prompt_tokens=len(token_ids),
            numeric_class=order.numeric_class,
            numeric_class_id=order.numeric_class_id,
            base_class_id=order.numeric_class_id,
            sampling=SamplingParameters(),
            generation=FIRST_GENERATION,
            phase=Phase.KEPT,
            rows=rows,
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
        for row in rows:
            core.importing.discard(row.page)
            core.pool.commit(row.page)
        core.logs[log.log_id] = log
        core.journal.opened(log, None)
        core.journal.snapshot(log)
        self._store.chains.offer(log)
        return log
