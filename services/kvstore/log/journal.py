"""The cores' journal: what they did, as records for the log writer.

Owns how a log's state becomes records. Their bodies are encoded at once, on the loop, because the
state goes on changing; they are framed and written by the writer's thread. Never waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from baton.kv.crc import slot_list_crc
from baton.kv.manifest import Manifest
from services.kvstore.core import Limits
from services.kvstore.log.fields import (
    AckLevel,
    EndReason,
    Extent,
    LogIdentity,
    Logprobs,
    PageEntry,
    PageRef,
)
from services.kvstore.log.format import Record, RecordAddress, RecordType, type_of
from services.kvstore.log.records import (
    Append,
    Checkpoint,
    Grant,
    Release,
    Seal,
    Take,
    Truncate,
)
from services.kvstore.log.recovery import END_REASONS
from services.kvstore.log.state import Open, Parent, Snapshot
from services.kvstore.log.store_records import Close, CloseReason, Publish, Revoke
from services.kvstore.prefixes import Prefix
from services.kvstore.state import LogprobEntry, LogState, PageRow

TTL_RECORD_MAX_S = (1 << 32) - 1


class RecordSink(Protocol):
    """Takes records in order; `log.writer.LogWriter` is one."""

    def submit(self, kind: RecordType, payload: bytes, address: RecordAddress) -> None:
        """Queues one encoded record body."""


class LogJournal:
    """Implements `core.Journal` over a record sink."""

    def __init__(self, sink: RecordSink, limits: Limits, arena_id: bytes, lease_s: float) -> None:
        self._sink = sink
        self._limits = limits
        self._arena_id = arena_id
        self._lease_ms = round(lease_s * 1000)

    def opened(self, log: LogState, base: Parent | Manifest | None) -> None:
        """OPEN."""
        skipped = 0
        if isinstance(base, Parent):
            skipped = base.position
        elif base is not None:
            skipped = base.total_tokens
        record = Open(
            identity=self._identity(log), token_ids=tuple(log.tokens[skipped:]), base=base
        )
        self._submit(record, log)

    def snapshot(self, log: LogState) -> None:
        """SNAPSHOT."""
        grants: tuple[Grant, ...] = ()
        if log.writer is not None and log.granted:
            grants = (self._grant_of(log, list(log.granted)),)
        outputs = log.position - log.prompt_tokens
        logprobs = log.logprobs if len(log.logprobs) == outputs else []
        record = Snapshot(
            identity=self._identity(log),
            token_ids=tuple(log.tokens),
            prompt_tokens=log.prompt_tokens,
            cached_tokens=log.cached_tokens,
            entries=tuple(self._known_entries(log.rows)),
            chunk_list_digest=_sealed_digest(log),
            end_reason=_end_reason(log.finish_reason),
            logprobs=tuple(
                (position, _logprobs(entry))
                for position, entry in enumerate(logprobs, start=log.prompt_tokens)
            ),
            grants=grants,
            worker_id=None if log.writer is None else log.writer.worker_id,
        )
        self._submit(record, log)

    def granted(self, log: LogState, pages: Sequence[int]) -> None:
        """GRANT; nothing for no pages."""
        if pages:
            self._submit(self._grant_of(log, pages), log)

    def released(self, log: LogState, pages: Sequence[int]) -> None:
        """RELEASE; the pages are still in `log.granted`."""
        extents = self._extents((page, log.granted[page]) for page in pages)
        self._submit(Release(extents=extents), log)

    def checkpointed(self, log: LogState, first: int, end: int, rows: Sequence[PageRow]) -> None:
        """CHECKPOINT."""
        entries = tuple(self._entry(row) for row in rows)
        self._submit(Checkpoint(from_position=first, to_position=end, entries=entries), log, end)

    def sealed(
        self, log: LogState, digest: bytes, first_token: int | None, logprob: LogprobEntry | None
    ) -> None:
        """SEAL."""
        record = Seal(
            chunk_list_digest=digest,
            chunk_count=len(log.chunks),
            token_id=first_token,
            logprobs=None if logprob is None else _logprobs(logprob),
            end_reason=_end_reason(log.finish_reason),
        )
        self._submit(record, log, log.prompt_tokens)

    def taken(self, log: LogState, previous_generation: int) -> None:
        """TAKE; without a worker when the log was only fenced."""
        writer = log.writer
        record = Take(
            previous_generation=previous_generation,
            worker_id=None if writer is None else writer.worker_id,
            worker_slot=0 if writer is None else writer.slot,
            worker_incarnation=0 if writer is None else writer.incarnation,
            lease_ms=0 if writer is None else self._lease_ms,
        )
        self._submit(record, log)

    def appended(
        self,
        log: LogState,
        row: PageRow,
        slot_crc: int,
        logprob: LogprobEntry | None,
    ) -> None:
        """APPEND."""
        record = Append(
            token_id=log.tokens[-1],
            slot_ref=PageRef(
                arena_id=self._arena_id,
                page=row.page,
                page_generation=row.page_generation,
                crc=slot_crc,
            ),
            slot=row.tokens - 1,
            page_crc=row.crc,
            logprobs=None if logprob is None else _logprobs(logprob),
            end_reason=_end_reason(log.finish_reason),
        )
        self._submit(record, log, log.position - 1)

    def truncated(self, log: LogState, previous_generation: int) -> None:
        """TRUNCATE."""
        self._submit(Truncate(previous_generation=previous_generation), log)

    def closed(self, log: LogState, reason: CloseReason) -> None:
        """CLOSE."""
        self._submit(Close(reason=reason), log)

    def closed_by_id(self, log_id: bytes, generation: int, reason: CloseReason) -> None:
        """CLOSE of a log whose state is not there any more."""
        address = RecordAddress(log_id=log_id, generation=generation, position=0)
        self._put(Close(reason=reason), address)

    def published(self, prefix: Prefix) -> None:
        """PUBLISH."""
        record = Publish(
            prefix_id=prefix.prefix_id,
            name=prefix.name,
            owner_tenant=prefix.owner_tenant,
            tenants=prefix.tenants,
            text_hash=prefix.text_hash,
            ids_hash=prefix.ids_hash,
            history_end=prefix.history_end,
            template_digest=prefix.template_digest,
            kv_digest=self._limits.kv_digest,
            tokenizer_hash=self._limits.tokenizer_hash,
            numeric_class_id=prefix.numeric_class_id,
            text_bytes=prefix.text_bytes,
            created_wall_ms=round(prefix.create_wall_s * 1000),
            expires_wall_ms=_milliseconds(prefix.expire_wall_s),
        )
        address = RecordAddress(
            log_id=prefix.log_id, generation=prefix.generation, position=prefix.position
        )
        self._put(record, address)

    def revoked(self, prefix: Prefix, wall_s: float) -> None:
        """REVOKE."""
        record = Revoke(prefix_id=prefix.prefix_id, revoked_wall_ms=round(wall_s * 1000))
        address = RecordAddress(
            log_id=prefix.log_id, generation=prefix.generation, position=prefix.position
        )
        self._put(record, address)

    # --- parts ------------------------------------------------------------------------------

    def _submit(self, record: Record, log: LogState, position: int | None = None) -> None:
        at = log.position if position is None else position
        self._put(record, RecordAddress(log_id=log.log_id, generation=log.generation, position=at))

    def _put(self, record: Record, address: RecordAddress) -> None:
        self._sink.submit(type_of(record), record.encode(), address)

    def _identity(self, log: LogState) -> LogIdentity:
        return LogIdentity(
            scope=log.scope,
            request_id=log.request_id,
            body_hash=log.body_hash,
            sampling=log.sampling.to_canonical_bytes(),
            label_digest=log.label_digest,
            kv_digest=self._limits.kv_digest,
            tokenizer_hash=self._limits.tokenizer_hash,
            numeric_class_id=log.numeric_class_id,
            block_tokens=self._limits.block_tokens,
            ttl_s=min(round(log.ttl_s), TTL_RECORD_MAX_S),
            opened_wall_ms=round(log.opened_wall_s * 1000),
            is_stored=not log.drop_at_end,
            is_cacheable=log.is_cacheable,
            ack_level=AckLevel(int(log.ack_level)),
        )

    def _grant_of(self, log: LogState, pages: Sequence[int]) -> Grant:
        assert log.writer is not None
        return Grant(
            worker_id=log.writer.worker_id,
            worker_slot=log.writer.slot,
            worker_incarnation=log.writer.incarnation,
            extents=self._extents((page, log.granted[page]) for page in pages),
        )

    def _extents(self, pages: Iterable[tuple[int, int]]) -> tuple[Extent, ...]:
        """Runs of consecutive pages of one page generation."""
        runs: list[list[int]] = []
        for page, page_generation in sorted(pages):
            if runs and runs[-1][0] + runs[-1][1] == page and runs[-1][2] == page_generation:
                runs[-1][1] += 1
            else:
                runs.append([page, 1, page_generation])
        return tuple(
            Extent(
                arena_id=self._arena_id,
                first_page=first,
                page_count=count,
                page_generation=page_generation,
            )
            for first, count, page_generation in runs
        )

    def _known_entries(self, rows: Sequence[PageRow]) -> Iterable[PageEntry]:
        """The rows up to the first whose copy has not been checked yet."""
        for row in rows:
            if row.crc is None and len(row.slot_crcs) != row.tokens:
                return
            yield self._entry(row)

    def _entry(self, row: PageRow) -> PageEntry:
        is_partial = row.crc is None
        slot_crcs = tuple(row.slot_crcs) if is_partial else ()
        crc = slot_list_crc(slot_crcs) if row.crc is None else row.crc
        return PageEntry(
            ref=PageRef(
                arena_id=self._arena_id,
                page=row.page,
                page_generation=row.page_generation,
                crc=crc,
            ),
            tokens=row.tokens,
            slot_crcs=slot_crcs,
        )


def _sealed_digest(log: LogState) -> bytes | None:
    if not log.is_sealed:
        return None
    return log.chunk_list_digest if log.chunk_list_digest is not None else bytes(32)


def _end_reason(word: str | None) -> EndReason | None:
    return None if word is None else END_REASONS[word]


def _logprobs(entry: LogprobEntry) -> Logprobs:
    return Logprobs(
        logprob=entry.logprob, top=tuple((item.token_id, item.logprob) for item in entry.top)
    )


def _milliseconds(wall_s: float | None) -> int | None:
    return None if wall_s is None else round(wall_s * 1000)
