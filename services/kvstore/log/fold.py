"""From records back to logs: how each record changes tokens, metadata, KV references and grants.

Owns the fold that a restarted kvstore begins with. Pure; reads no files and knows no segments.

Invariants: records come in the order of their LSN, each once. A log's tokens are exactly those its
records say, or the log is given up as damaged. Where records are missing (`missing`), a log may
have lost some: it is doubted until a later record of it proves that nothing of its tokens is
missing (the position and generation a record states are those the fold has), and given up if none
does. What began from a doubted log is doubted with it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from baton.kv.manifest import Manifest, Segment
from services.kvstore.log.fields import EndReason, Extent, LogIdentity, PageEntry
from services.kvstore.log.fold_appends import AppendRun
from services.kvstore.log.fold_bases import Base, Source, manifest_base, parent_base
from services.kvstore.log.fold_grants import Grantee, GrantTable
from services.kvstore.log.fold_places import PlaceFold
from services.kvstore.log.fold_prefixes import PrefixFold
from services.kvstore.log.fold_sessions import SessionFold
from services.kvstore.log.folded import (
    END_WORDS,
    HARMLESS_TYPES,
    Folded,
    MovedTo,
    add_token,
    chunk_of,
    continue_from,
    entry_of,
    is_unchanged,
    log_of,
    log_of_snapshot,
)
from services.kvstore.log.format import Record, RecordAddress, RecordType, SkippedRecord
from services.kvstore.log.kv_rows import KvRows
from services.kvstore.log.records import (
    Append,
    Checkpoint,
    Grant,
    Moved,
    Release,
    Seal,
    Take,
    Truncate,
)
from services.kvstore.log.recovered import Recovered
from services.kvstore.log.session_records import Session
from services.kvstore.log.state import Arrival, Open, Parent, Snapshot
from services.kvstore.log.store_records import Close, Place, Publish, Revoke, Tier
from services.kvstore.rows import PageRow, Rows
from services.kvstore.state import TOKEN_TYPECODE, Phase, Writer

DROPPED_MAX = 65_536


class Fold:
    """Applies records. `arena_id`, `nvme_id`: whose KV is asked for; None: of neither."""

    def __init__(self, arena_id: bytes | None = None, nvme_id: bytes | None = None) -> None:
        self._arena_id = arena_id
        self._logs: dict[bytes, Folded] = {}
        self._places = PlaceFold(nvme_id)
        self._prefixes = PrefixFold(nvme_id)
        self._sessions = SessionFold()
        self._moved: dict[bytes, MovedTo] = {}
        self._dropped: OrderedDict[bytes, int] = OrderedDict()
        self._damaged: set[bytes] = set()
        # Logs that records name although nothing began them here.
        self._unknown: set[bytes] = set()
        self._grants = GrantTable(arena_id)
        self._may_lack_grants = False
        self.has_holes = False

    def apply(self, at: RecordAddress, record: Record | SkippedRecord) -> None:
        """One record of any type."""
        match record:
            case Open():
                self._open(at, record)
            case Snapshot():
                self._snapshot(at, record)
            case Close():
                self._close(at)
            case Publish():
                self._prefixes.publish(at, record, self._logs.get(at.log_id))
            case Revoke():
                self._prefixes.revoke(record)
            case Session():
                self._sessions.apply(at, record)
            case Place():
                self._place(at, record)
            case Grant():
                self._grant(at, record)
            case Release():
                self._release(at, record)
            case Append():
                self.append(at.log_id, AppendRun.of_one(at, record, self._arena_id))
            case Checkpoint() | Seal() | Take() | Truncate() | Moved():
                self._change(at, record)
            case _:
                return

    def unreadable(self, at: RecordAddress, type_code: int) -> None:
        """A record whose frame holds but whose body does not: as if it were missing."""
        self.missing(at.log_id, type_code)

    def missing(self, log_id: bytes | None = None, type_code: int | None = None) -> None:
        """Records are missing here: of one log, if that much of the only one is known."""
        self.has_holes = True
        self._sessions.missing(type_code)
        if type_code is None or type_code in (RecordType.GRANT, RecordType.TAKE):
            self._may_lack_grants |= self._grants.has_seen_arena
        if type_code == RecordType.SNAPSHOT and log_id is not None and log_id not in self._logs:
            self._unknown.add(log_id)
        if type_code is not None and type_code in HARMLESS_TYPES:
            return
        if log_id is None or type_code == RecordType.REVOKE:
            # What was withdrawn must not be served: nothing is published any more.
            self._prefixes.clear()
        if type_code == RecordType.REVOKE:
            return
        if log_id is None:
            for folded in self._logs.values():
                folded.doubt()
        elif log_id in self._logs:
            self._logs[log_id].doubt()
        else:
            self._unknown.add(log_id)

    # --- whole logs -------------------------------------------------------------------------

    def _open(self, at: RecordAddress, record: Open) -> None:
        if isinstance(record.base, Arrival):
            self._snapshot(at, record.base.snapshot)
            self._moved.pop(at.log_id, None)
            return
        base = self._base_of(record)
        tokens = array(TOKEN_TYPECODE, base.tokens)
        tokens.extend(record.token_ids)
        state = log_of(at, record.identity, tokens, len(tokens))
        if state is None:
            self._give_up(at.log_id, at.generation)
            return
        kv = base.kv if base.kv is not None else self._no_kv(record.identity)
        folded = Folded(
            state=state, kv=kv, cold=self._places.none_of(record.identity), doubts=list(base.doubts)
        )
        folded.is_unresolved = not base.is_resolved
        state.cached_tokens = kv.committed
        if isinstance(record.base, Parent):
            state.parent_id, state.parent_position = record.base.log_id, record.base.position
        if base.source is not None and record.is_fork:
            continue_from(state, base.source)
        self._keep(at.log_id, folded)

    def _base_of(self, record: Open) -> Base:
        match record.base:
            case Parent() as parent:
                source = self._logs.get(parent.log_id)
                if source is None:
                    return Base(tokens=array(TOKEN_TYPECODE, bytes(4 * parent.position)))
                return parent_base(source, parent, record.cached_tokens, is_fork=record.is_fork)
            case Manifest() as manifest:
                sources = [self._source_of(segment) for segment in manifest.segments]
                return manifest_base(manifest, sources, self._arena_id)
            case _:
                return Base(tokens=array(TOKEN_TYPECODE), is_resolved=True)

    def _source_of(self, segment: Segment) -> Source | None:
        """Tokens and rows of a segment's source: a published prefix, or a log."""
        log_id, position = segment.log_id, segment.to_position
        published = self._prefixes.source(log_id, position)
        if published is not None:
            return published
        folded = self._logs.get(log_id)
        if folded is None or folded.is_unresolved or folded.state.position < position:
            return None
        return Source(tokens=folded.state.tokens, kv=folded.kv, doubts=tuple(folded.doubts))

    def _no_kv(self, identity: LogIdentity) -> KvRows:
        return KvRows(identity.block_tokens, self._arena_id)

    def _place(self, at: RecordAddress, record: Place) -> None:
        if record.tier is Tier.HOST:
            self._see(record.entries)
        self._places.apply(at, record, self._logs.get(at.log_id), self._prefixes)

    def _snapshot(self, at: RecordAddress, record: Snapshot) -> None:
        state = log_of_snapshot(at, record)
        if state is None:
            self._give_up(at.log_id, at.generation)
            return
        kv = self._no_kv(record.identity)
        kv.state(record.entries)
        self._see(record.entries)
        state.cached_tokens = record.cached_tokens
        before = self._logs.get(at.log_id)
        folded = Folded(state=state, kv=kv, cold=self._places.none_of(record.identity))
        if record.worker_id is not None:
            for grant in record.grants:
                self._grants.grant(at.log_id, at.generation, grant)
                folded.writer = Writer(
                    worker_id=grant.worker_id,
                    slot=grant.worker_slot,
                    incarnation=grant.worker_incarnation,
                )
            known = None if before is None else before.writer
            if folded.writer is None and known is not None:
                folded.writer = known if known.worker_id == record.worker_id else None
        if before is not None and before.state.generation == at.generation:
            state.chunks = before.state.chunks
        if before is not None:
            state.parent_id = before.state.parent_id
            state.parent_position = before.state.parent_position
        if before is not None and is_unchanged(before.state, state):
            before.prove()
        self._keep(at.log_id, folded)

    def _keep(self, log_id: bytes, folded: Folded) -> None:
        self._logs[log_id] = folded
        self._damaged.discard(log_id)
        self._unknown.discard(log_id)
        self._dropped.pop(log_id, None)

    def _close(self, at: RecordAddress) -> None:
        folded = self._logs.pop(at.log_id, None)
        self._moved.pop(at.log_id, None)
        self._damaged.discard(at.log_id)
        self._unknown.discard(at.log_id)
        generation = at.generation
        if folded is not None:
            generation = max(generation, folded.state.generation)
        self._drop(at.log_id, generation)

    def _drop(self, log_id: bytes, generation: int) -> None:
        self._dropped[log_id] = generation
        self._dropped.move_to_end(log_id)
        if len(self._dropped) > DROPPED_MAX:
            self._dropped.popitem(last=False)

    def _give_up(self, log_id: bytes, generation: int) -> None:
        self._logs.pop(log_id, None)
        self._damaged.add(log_id)
        self._drop(log_id, generation)

    # --- grants -----------------------------------------------------------------------------

    def _grant(self, at: RecordAddress, record: Grant) -> None:
        self._grants.grant(at.log_id, at.generation, record)
        folded = self._logs.get(at.log_id)
        if folded is None or folded.state.generation != at.generation:
            return
        if at.position == folded.state.position:
            folded.prove()
        folded.writer = Writer(
            worker_id=record.worker_id,
            slot=record.worker_slot,
            incarnation=record.worker_incarnation,
        )

    def _release(self, at: RecordAddress, record: Release) -> None:
        self._grants.release(at.log_id, at.generation, record.extents)
        folded = self._logs.get(at.log_id)
        # A fenced writer's pages that are rows now are only not written any more.
        is_evicted = folded is not None and at.generation >= folded.state.generation
        if folded is not None and is_evicted and folded.kv.release(record.extents):
            state = folded.state
            state.cached_tokens = min(state.cached_tokens, folded.kv.committed)

    def _see(self, entries: Sequence[PageEntry]) -> None:
        self._grants.see([entry.ref for entry in entries])

    # --- changes of one log -----------------------------------------------------------------

    def _change(
        self, at: RecordAddress, record: Checkpoint | Seal | Take | Truncate | Moved
    ) -> None:
        folded = self._logs.get(at.log_id)
        if folded is None:
            if at.log_id not in self._dropped:
                self._unknown.add(at.log_id)
            return
        if not self._follows(folded, at, record):
            self._give_up(at.log_id, max(at.generation, folded.state.generation))

    def _follows(
        self,
        folded: Folded,
        at: RecordAddress,
        record: Checkpoint | Seal | Take | Truncate | Moved,
    ) -> bool:
        """False when the record does not follow from the log's state."""
        match record:
            case Checkpoint():
                return self._checkpoint(folded, at, record)
            case Seal():
                return self._seal(folded, at, record)
            case Take():
                return self._take(folded, at, record)
            case Truncate():
                return self._truncate(folded, at, record)
            case Moved():
                return self._move(folded, at, record)

    def _checkpoint(self, folded: Folded, at: RecordAddress, record: Checkpoint) -> bool:
        state = folded.state
        if at.generation != state.generation or record.to_position > state.position:
            return False
        self._see(record.entries)
        is_new = folded.kv.checkpoint(record.from_position, record.to_position, record.entries)
        self._fill(folded, record.from_position, record.to_position)
        if record.is_adopted:
            # What it began with, and the copied end of that, which is stated by itself.
            is_base = record.from_position in (0, state.cached_tokens)
            if is_base and state.phase is Phase.PREFILL:
                state.cached_tokens = record.to_position
        elif is_new and state.phase is Phase.PREFILL:
            size = folded.kv.block_tokens
            start = record.from_position // size * size
            state.chunks.append(chunk_of(record.entries, start, size))
        return True

    def _fill(self, folded: Folded, first: int, end: int) -> None:
        """Pages that are full are not written any more."""
        size = folded.kv.block_tokens
        for row in folded.kv.rows[first // size : end // size]:
            if row is not None:
                self._grants.fill(row.page, row.page_generation)

    def _seal(self, folded: Folded, at: RecordAddress, record: Seal) -> bool:
        state = folded.state
        if at.generation != state.generation or at.position != state.prompt_tokens:
            return False
        if state.phase is not Phase.PREFILL:
            return False
        folded.prove()
        state.chunk_list_digest = record.chunk_list_digest
        state.phase = Phase.DECODE
        state.chunks = []
        if record.token_id is not None:
            add_token(state, record.token_id, record.logprobs)
        self._end(folded, record.end_reason, is_end=record.token_id is None)
        return True

    def append(self, log_id: bytes, run: AppendRun) -> None:
        """Tokens of one log that no other record of it stands between."""
        folded = self._logs.get(log_id)
        if folded is None:
            if log_id not in self._dropped:
                self._unknown.add(log_id)
            return
        state = folded.state
        if not run.follows(state) or state.phase is not Phase.DECODE:
            self._give_up(log_id, max(run.newest_generation, state.generation))
            return
        folded.prove()
        first = state.position - 1
        for index, logprobs in run.logprobs:
            entry = entry_of(int(run.token_id[index]), logprobs)
            state.logprobs.append(entry)
        state.tokens.frombytes(run.token_id.tobytes())
        self._grants.see_pages(run.kv)
        folded.kv.append(first, run.kv)
        self._fill(folded, first, first + len(run.token_id))
        self._end(folded, run.end_reason)

    def _end(self, folded: Folded, reason: EndReason | None, *, is_end: bool = False) -> None:
        """The writer ended the log by name: it writes nothing of this generation any more."""
        if reason is None and not is_end:
            return
        state = folded.state
        state.phase = Phase.ENDED
        state.finish_reason = None if reason is None else END_WORDS[reason]
        folded.writer = None
        self._grants.end(state.log_id, state.generation)

    def _take(self, folded: Folded, at: RecordAddress, record: Take) -> bool:
        state = folded.state
        if at.generation <= state.generation:
            return False
        if at.position != state.position or not folded.follows(record.previous_generation):
            return False
        state.generation = at.generation
        if record.worker_id is None:
            folded.writer = None
            return True
        folded.writer = Writer(
            worker_id=record.worker_id,
            slot=record.worker_slot,
            incarnation=record.worker_incarnation,
        )
        state.chunks = []
        if record.numeric_class_id is not None:
            state.numeric_class_id = record.numeric_class_id
        folded.kv.replace_tail(record.tail)
        self._grant_tail(folded, record.tail)
        return True

    def _grant_tail(self, folded: Folded, tail: PageEntry | None) -> None:
        """The page of a copied tail is the new writer's, although no GRANT names it."""
        if tail is None or folded.writer is None:
            return
        extent = Extent(
            arena_id=tail.ref.arena_id,
            first_page=tail.ref.page,
            page_count=1,
            page_generation=tail.ref.page_generation,
        )
        state = folded.state
        grantee = Grantee(state.log_id, state.generation, folded.writer)
        self._grants.give(grantee, (extent,))

    def _truncate(self, folded: Folded, at: RecordAddress, record: Truncate) -> bool:
        state = folded.state
        if at.generation <= state.generation or at.position > state.position:
            return False
        if not folded.follows(record.previous_generation):
            return False
        state.generation = at.generation
        del state.logprobs[max(at.position - state.prompt_tokens, 0) :]
        del state.tokens[at.position :]
        state.prompt_tokens = min(state.prompt_tokens, at.position)
        state.phase = Phase.DECODE
        state.finish_reason = None
        state.chunks = []
        folded.writer = None
        folded.kv.cut(min(folded.kv.committed, at.position - 1))
        folded.cold.cut(min(folded.cold.committed, at.position - 1))
        state.cached_tokens = min(state.cached_tokens, folded.kv.committed)
        if record.tail is not None:
            self._see((record.tail,))
            folded.kv.replace_tail(record.tail)
        return True

    def _move(self, folded: Folded, at: RecordAddress, record: Moved) -> bool:
        """The log's home is elsewhere; forks of what is here stay possible."""
        state = folded.state
        if at.generation < state.generation or at.position != state.position:
            return False
        if not folded.follows(record.previous_generation):
            return False
        state.generation = at.generation
        folded.writer = None
        self._moved[at.log_id] = MovedTo(record.to_home, at.generation)
        return True

    # --- the end ----------------------------------------------------------------------------

    def result(self) -> Recovered:
        """What all records came to. The fold is used up."""
        for log_id in [log_id for log_id, folded in self._logs.items() if folded.is_doubted]:
            self._give_up(log_id, self._logs[log_id].state.generation)
        self._damaged |= self._unknown
        for folded in self._logs.values():
            self._finish(folded)
        return Recovered(
            logs={log_id: folded.state for log_id, folded in self._logs.items()},
            writers={
                log_id: folded.writer
                for log_id, folded in self._logs.items()
                if folded.writer is not None
            },
            grants=self._grants.open_grants(),
            prefixes=self._prefixes.result(self._current, self._places.current),
            sessions=self._sessions.result(),
            moved={key: moved for key, moved in self._moved.items() if key in self._logs},
            dropped=self._dropped,
            damaged=self._damaged,
            page_generations=self._grants.newest,
            slot_generations=self._places.newest,
            arena_ids=self._grants.arena_ids,
            may_lack_grants=self._may_lack_grants,
        )

    def _finish(self, folded: Folded) -> None:
        state = folded.state
        rows = self._current(folded.kv.found())
        state.rows = Rows(rows)
        state.cold = self._places.current(folded.cold)
        state.committed = sum(row.tokens for row in rows)
        state.cached_tokens = min(state.cached_tokens, state.committed)

    def _current(self, rows: list[PageRow]) -> list[PageRow]:
        """The rows before the first whose page was used again since."""
        newest = self._grants.newest
        for index, row in enumerate(rows):
            if newest.get(row.page, 0) > row.page_generation:
                return rows[:index]
        return rows
