"""The cores' journal: what they did, as records for the log writer.

Owns how a log's state becomes records. Their bodies are encoded at once, on the loop, because the
state goes on changing; they are framed and written by the writer's thread. Never waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from baton.kv.crc import slot_list_crc
from baton.kv.digests import ChunkPage, chunk_list_digest
from baton.kv.manifest import Manifest
from services.kvstore.core import Limits
from services.kvstore.log.fields import (
    AckLevel,
    EndReason,
    Extent,
    LogIdentity,
    Logprobs,
    PackedEntries,
    PageEntry,
    PageRef,
)
from services.kvstore.log.format import Record, RecordAddress, RecordType, type_of
from services.kvstore.log.packing import entry_of, packed_entries
from services.kvstore.log.records import (
    Append,
    Checkpoint,
    Grant,
    Moved,
    Release,
    Seal,
    Take,
    Truncate,
    plain_append,
)
from services.kvstore.log.recovery import END_REASONS
from services.kvstore.log.session_records import Session
from services.kvstore.log.state import Arrival, Open, Parent, Snapshot
from services.kvstore.log.store_records import Close, CloseReason, Place, Publish, Revoke, Tier
from services.kvstore.pages import Fence
from services.kvstore.prefixes import Prefix
from services.kvstore.rows import PageArray
from services.kvstore.sessions import SessionState
from services.kvstore.state import LogprobEntry, LogState, PageRow, Phase, Rows

TTL_RECORD_MAX_S = (1 << 32) - 1


class RecordSink(Protocol):
    """Takes records in order; `log.writer.LogWriter` is one."""

    def submit(self, kind: RecordType, payload: bytes, address: RecordAddress) -> None:
        """Queues one encoded record body."""


class LogJournal:
    """Implements `core.Journal` over a record sink."""

    def __init__(
        self,
        sink: RecordSink,
        limits: Limits,
        arena_id: bytes,
        lease_s: float,
        *,
        nvme_id: bytes | None = None,
    ) -> None:
        self._sink = sink
        self._limits = limits
        self._arena_id = arena_id
        self._nvme_id = nvme_id
        self._lease_ms = round(lease_s * 1000)
        self.on_record: Callable[[bytes], None] | None = None

    def opened(
        self,
        log: LogState,
        base: Parent | Manifest | None,
        *,
        is_fork: bool = False,
        is_looked_up: bool = False,
    ) -> None:
        """OPEN. `is_looked_up`: its KV is not the parent's; CHECKPOINT states it."""
        skipped = 0
        if isinstance(base, Parent):
            skipped = base.position
        elif base is not None:
            skipped = base.total_tokens
        record = Open(
            identity=self._identity(log),
            token_ids=log.tokens[skipped:],
            base=base,
            is_fork=is_fork,
            cached_tokens=(
                log.cached_tokens if isinstance(base, Parent) and not is_looked_up else 0
            ),
        )
        self._submit(record, log)

    def adopted(self, log: LogState, first: int, end: int) -> None:
        """CHECKPOINT of KV that was not computed for this log."""
        block_tokens = self._limits.block_tokens
        entries: Sequence[PageEntry]
        if first:
            # A tail that was copied.
            entries = [self._entry(row) for row in log.rows[first // block_tokens :]]
        else:
            entries = self._packed(log.rows.head(end, block_tokens))
        record = Checkpoint(from_position=first, to_position=end, entries=entries, is_adopted=True)
        self._submit(record, log, end)

    def evicted(self, log: LogState, first_block: int) -> None:
        """RELEASE of pages of the log's table."""
        columns = log.rows.columns()
        last = log.rows.last
        assert last is not None
        extents = self._extents(
            np.append(columns.pages, np.uint32(last.page))[first_block:],
            np.append(columns.generations, np.uint64(last.page_generation))[first_block:],
        )
        self._submit(Release(extents=extents), log)

    def snapshot(self, log: LogState) -> None:
        """SNAPSHOT; behind it PLACE of copies and MOVED of a moved log, which it does not say."""
        self._submit(self.snapshot_of(log), log)
        if log.cold:
            self.placed(log, 0)
        if log.moved_to is not None:
            self.moved(log, log.generation - 1, page_list_digest(self._limits, log.rows))

    def snapshot_of(self, log: LogState) -> Snapshot:
        """All of a log's state, as a record body."""
        grants: tuple[Grant, ...] = ()
        if log.writer is not None:
            # With the partial page it is writing, and be it without pages: it names the writer.
            last = log.rows[-1] if log.rows else None
            tail = [last.page] if last and last.tokens < self._limits.block_tokens else []
            grants = (self._grant_of(log, [*tail, *log.granted]),)
        outputs = log.position - log.prompt_tokens
        logprobs = log.logprobs if len(log.logprobs) == outputs else []
        return Snapshot(
            identity=self._identity(log),
            token_ids=log.tokens[:],
            prompt_tokens=log.prompt_tokens,
            cached_tokens=log.cached_tokens,
            entries=self._packed(log.rows),
            chunk_list_digest=_sealed_digest(log),
            end_reason=_end_reason(log.finish_reason),
            logprobs=tuple(
                (position, _logprobs(entry))
                for position, entry in enumerate(logprobs, start=log.prompt_tokens)
            ),
            grants=grants,
            worker_id=None if log.writer is None else log.writer.worker_id,
            is_ended=log.phase in (Phase.ENDED, Phase.KEPT),
        )

    def granted(self, log: LogState, pages: Sequence[int]) -> None:
        """GRANT; without pages it names the writer."""
        self._submit(self._grant_of(log, pages), log)

    def released(self, log: LogState, pages: Sequence[int]) -> None:
        """RELEASE; the pages are still in `log.granted`."""
        extents = self._extents(pages, [log.granted[page] for page in pages])
        self._submit(Release(extents=extents), log)

    def lifted(self, fence: Fence, pages: Mapping[int, int]) -> None:
        """RELEASE under the fenced generation; nothing for no pages."""
        if pages:
            release = Release(extents=self._extents(list(pages), list(pages.values())))
            address = RecordAddress(log_id=fence.log_id, generation=fence.generation, position=0)
            self._put(release, address)

    def fenced(self, fence: Fence, worker_id: str, pages: Mapping[int, int]) -> None:
        """GRANT again, under the fenced generation: its first record is about to be freed."""
        grant = Grant(
            worker_id=worker_id,
            worker_slot=fence.worker_slot,
            worker_incarnation=0,
            extents=self._extents(list(pages), list(pages.values())),
        )
        address = RecordAddress(log_id=fence.log_id, generation=fence.generation, position=0)
        self._put(grant, address)

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
            tail=None if writer is None else self._known_tail(log),
            numeric_class_id=None if writer is None else log.numeric_class_id,
        )
        self._submit(record, log)

    def _known_tail(self, log: LogState) -> PageEntry | None:
        """The page the writer goes on in, if its slots' CRCs are known before they are copied."""
        last = log.rows.last
        if last is None or last.tokens == self._limits.block_tokens:
            return None
        return self._entry(last) if len(last.slot_crcs) == last.tokens else None

    def appended(
        self,
        log: LogState,
        row: PageRow,
        slot_crc: int,
        logprob: LogprobEntry | None,
    ) -> None:
        """APPEND."""
        position = len(log.tokens) - 1
        if logprob is None:
            body = plain_append(
                log.tokens.newest,
                _end_reason(log.finish_reason),
                (self._arena_id, row.page_generation, row.page, slot_crc, row.tokens - 1),
                row.crc,
            )
            address = RecordAddress(log_id=log.log_id, generation=log.generation, position=position)
            self._put_body(RecordType.APPEND, body, address)
            return
        record = Append(
            token_id=log.tokens.newest,
            slot_ref=PageRef(
                arena_id=self._arena_id,
                page=row.page,
                page_generation=row.page_generation,
                crc=slot_crc,
            ),
            slot=row.tokens - 1,
            page_crc=row.crc,
            logprobs=_logprobs(logprob),
            end_reason=_end_reason(log.finish_reason),
        )
        self._submit(record, log, position)

    def truncated(self, log: LogState, previous_generation: int) -> None:
        """TRUNCATE."""
        self._submit(Truncate(previous_generation=previous_generation), log)

    def moved(self, log: LogState, previous_generation: int, digest: bytes) -> None:
        """MOVED."""
        assert log.moved_to is not None
        record = Moved(
            previous_generation=previous_generation,
            to_home=log.moved_to,
            chunk_list_digest=digest,
        )
        self._submit(record, log)

    def arrived(self, log: LogState, from_home: str) -> None:
        """OPEN of a log that another home had."""
        snapshot = self.snapshot_of(log)
        base = Arrival(from_home=from_home, snapshot=snapshot)
        self._submit(Open(identity=snapshot.identity, token_ids=(), base=base), log)

    def closed(self, log: LogState, reason: CloseReason) -> None:
        """CLOSE."""
        self._submit(Close(reason=reason), log)

    def closed_by_id(self, log_id: bytes, generation: int, reason: CloseReason) -> None:
        """CLOSE of a log whose state is not there any more."""
        address = RecordAddress(log_id=log_id, generation=generation, position=0)
        self._put(Close(reason=reason), address)

    def placed(self, owner: LogState | Prefix, first_block: int) -> None:
        """PLACE on the NVMe tier: the copies from that block on, or that there are no more."""
        assert self._nvme_id is not None
        self._place(Tier.NVME, self._nvme_id, owner, owner.cold, first_block)

    def promoted(self, owner: LogState | Prefix, first_block: int) -> None:
        """PLACE in the host: the rows from that block on, or of a prefix that there are no more."""
        rows = owner.rows if isinstance(owner.rows, Rows) else Rows(owner.rows)
        self._place(Tier.HOST, self._arena_id, owner, rows, first_block)

    def _place(
        self, tier: Tier, file_id: bytes, owner: LogState | Prefix, rows: Rows, first_block: int
    ) -> None:
        end = rows.tokens
        record = Place(
            tier=tier,
            from_position=min(first_block * self._limits.block_tokens, end),
            to_position=end,
            entries=packed_entries(file_id, rows, first_block),
            prefix_id=owner.prefix_id if isinstance(owner, Prefix) else None,
        )
        address = RecordAddress(log_id=owner.log_id, generation=owner.generation, position=end)
        self._put(record, address)

    def published(self, prefix: Prefix) -> None:
        """PUBLISH; behind it PLACE of copies."""
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
            tokenizer_hash=prefix.tokenizer_hash,
            numeric_class_id=prefix.numeric_class_id,
            text_bytes=prefix.text_bytes,
            created_wall_ms=round(prefix.create_wall_s * 1000),
            expires_wall_ms=_milliseconds(prefix.expire_wall_s),
            version=prefix.version,
            is_pinned=prefix.is_pinned,
        )
        address = RecordAddress(
            log_id=prefix.log_id, generation=prefix.generation, position=prefix.position
        )
        self._put(record, address)
        if prefix.cold:
            self.placed(prefix, 0)

    def revoked(self, prefix: Prefix, wall_s: float) -> None:
        """REVOKE."""
        record = Revoke(prefix_id=prefix.prefix_id, revoked_wall_ms=round(wall_s * 1000))
        address = RecordAddress(
            log_id=prefix.log_id, generation=prefix.generation, position=prefix.position
        )
        self._put(record, address)

    def session(self, session: SessionState, *, is_deleted: bool) -> None:
        """SESSION."""
        record = Session(
            session_id=session.session_id,
            tenant=session.owner.tenant,
            team=session.owner.team or None,
            generation=session.generation,
            created_wall_ms=round(session.created_wall_s * 1000),
            expires_wall_ms=round(session.expires_wall_s * 1000),
            ttl_s=round(session.ttl_s),
            home=session.home,
            parent_id=session.parent_id,
            parent_position=session.parent_position,
            is_deleted=is_deleted,
        )
        address = RecordAddress(
            log_id=session.log_id, generation=session.log_generation, position=session.position
        )
        self._put(record, address)

    # --- parts ------------------------------------------------------------------------------

    def _submit(self, record: Record, log: LogState, position: int | None = None) -> None:
        at = log.position if position is None else position
        self._put(record, RecordAddress(log_id=log.log_id, generation=log.generation, position=at))

    def _put(self, record: Record, address: RecordAddress) -> None:
        self._put_body(type_of(record), record.encode(), address)

    def _put_body(self, kind: RecordType, body: bytes, address: RecordAddress) -> None:
        self._sink.submit(kind, body, address)
        if self.on_record is not None:
            self.on_record(address.log_id)

    def _identity(self, log: LogState) -> LogIdentity:
        return LogIdentity(
            scope=log.scope,
            request_id=log.request_id,
            body_hash=log.body_hash,
            sampling=log.sampling.to_canonical_bytes(),
            label_digest=log.label_digest,
            kv_digest=log.kv_digest or self._limits.kv_digest,
            tokenizer_hash=log.tokenizer_hash or self._limits.tokenizer_hash,
            numeric_class_id=log.numeric_class_id,
            block_tokens=self._limits.block_tokens,
            ttl_s=min(round(log.ttl_s), TTL_RECORD_MAX_S),
            opened_wall_ms=round(log.opened_wall_s * 1000),
            is_stored=not log.drop_at_end,
            is_cacheable=log.is_cacheable,
            ack_level=AckLevel(int(log.ack_level)),
            base_class_id=log.base_class_id,
        )

    def _grant_of(self, log: LogState, pages: Sequence[int]) -> Grant:
        assert log.writer is not None
        return Grant(
            worker_id=log.writer.worker_id,
            worker_slot=log.writer.slot,
            worker_incarnation=log.writer.incarnation,
            extents=self._extents(pages, [_page_generation(log, page) for page in pages]),
        )

    def _extents(
        self, pages: Sequence[int] | PageArray, generations: Sequence[int] | NDArray[np.uint64]
    ) -> tuple[Extent, ...]:
        """Runs of consecutive pages of one page generation, in the order given."""
        if len(pages) == 1:
            return (self._extent(int(pages[0]), 1, int(generations[0])),)
        if len(pages) == 0:
            return ()
        numbers = np.asarray(pages, dtype=np.int64)
        uses = np.asarray(generations, dtype=np.uint64)
        breaks = np.flatnonzero((np.diff(numbers) != 1) | (uses[1:] != uses[:-1])) + 1
        starts = [0, *breaks.tolist()]
        return tuple(
            self._extent(int(numbers[first]), end - first, int(uses[first]))
            for first, end in zip(starts, [*starts[1:], len(numbers)], strict=True)
        )

    def _extent(self, first_page: int, page_count: int, page_generation: int) -> Extent:
        return Extent(
            arena_id=self._arena_id,
            first_page=first_page,
            page_count=page_count,
            page_generation=page_generation,
        )

    def _packed(self, rows: Rows) -> PackedEntries:
        return packed_entries(self._arena_id, rows)

    def _entry(self, row: PageRow) -> PageEntry:
        return entry_of(self._arena_id, row)


def _page_generation(log: LogState, page: int) -> int:
    """Of a granted page, or of the tail that its writer goes on with."""
    known = log.granted.get(page)
    if known is not None:
        return known
    last = log.rows.last
    assert last is not None
    assert last.page == page
    return last.page_generation


def page_list_digest(limits: Limits, rows: Sequence[PageRow]) -> bytes:
    """Digest (32 bytes) of a page table: positions and CRCs, not places (a chunk list of one)."""
    pages = [
        ChunkPage(
            first_position=index * limits.block_tokens,
            tokens=row.tokens,
            crc=slot_list_crc(row.slot_crcs) if row.crc is None else row.crc,
        )
        for index, row in enumerate(rows)
    ]
    return chunk_list_digest(limits.kv_digest, [pages])


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
