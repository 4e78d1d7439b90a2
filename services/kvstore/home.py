"""A log's home: who may write it, and every write of its current writer.

Owns generations, fences and the rules of GRANT, CHECKPOINT, SEAL, TAKE, APPEND. Pure: time is
passed in, records go to the core's journal, page work to its list.

Invariants: the generation is checked first and a refused write changes nothing; a page has one
writing generation for its whole life (O7); an append is accepted only at the next position, and the
same token at the same position and generation again is a no-op; pages of a fenced writer are
quarantined until it is gone or has named them as released (O4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, unique
from typing import Final

from baton.errors import Reason, ServiceError
from baton.kv.crc import slot_list_crc
from baton.kv.digests import ChunkPage, chunk_list_digest
from baton.kv.layout import page_spans
from baton.kv.numeric import NumericClass
from services.kvstore.core import Core, invalid, stale
from services.kvstore.pages import Fence, pages_exhausted
from services.kvstore.state import (
    FillPage,
    GrantedPage,
    LogprobEntry,
    LogState,
    PageRow,
    Phase,
    SlotSource,
    TakeAnswer,
    Writer,
)


@unique
class Event(Enum):
    """What can be asked of a log."""

    GRANT = "grant"
    CHECKPOINT = "checkpoint"
    SEAL = "seal"
    TAKE = "take"
    APPEND = "append"
    TRUNCATE = "truncate"
    FORK = "fork"


ALLOWED: Final = {
    Event.GRANT: frozenset({Phase.PREFILL, Phase.DECODE}),
    Event.CHECKPOINT: frozenset({Phase.PREFILL, Phase.DECODE}),
    Event.SEAL: frozenset({Phase.PREFILL}),
    Event.TAKE: frozenset({Phase.PREFILL, Phase.DECODE}),
    Event.APPEND: frozenset({Phase.DECODE}),
    Event.TRUNCATE: frozenset({Phase.DECODE, Phase.ENDED, Phase.KEPT}),
    Event.FORK: frozenset({Phase.DECODE, Phase.ENDED, Phase.KEPT}),
}
"""In which phases each event is taken; what is not here is refused and changes nothing."""


def require_allowed(log: LogState, event: Event) -> None:
    """INVALID_REQUEST unless the log's phase takes the event."""
    if log.phase not in ALLOWED[event]:
        raise ServiceError(
            Reason.INVALID_REQUEST,
            f"{event.value} is not possible: the log's phase is {log.phase.value}",
            field="log_id",
            metadata={"phase": log.phase.value, "event": event.value},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendItem:
    """One token of one log, and the KV slot of the token before it."""

    log_id: bytes
    generation: int
    position: int
    token_id: int
    page: int
    page_generation: int
    slot_crc: int
    page_crc: int | None = None
    logprob: LogprobEntry | None = None
    finish_reason: str | None = None


class Home:
    """The writes of one store's logs. `make_room(pages)` frees pages of kept logs if it can."""

    def __init__(self, core: Core, make_room: Callable[[int], None]) -> None:
        self._core = core
        self._make_room = make_room

    # --- grants -----------------------------------------------------------------------------

    def grant(
        self, log_id: bytes, generation: int, worker_id: str, pages: int
    ) -> tuple[GrantedPage, ...]:
        """Exactly `pages` more pages for the writer, or PAGES_EXHAUSTED."""
        log = self.writing(log_id, generation, worker_id)
        require_allowed(log, Event.GRANT)
        return self.give(log, pages)

    def grant_up_to(self, log: LogState, pages: int) -> tuple[GrantedPage, ...]:
        """As many of `pages` as there are."""
        self._make_room(pages)
        return self.give(log, min(pages, self._core.pool.free_count))

    def give(self, log: LogState, pages: int) -> tuple[GrantedPage, ...]:
        """Grants to the log's writer; the caller has checked everything but the room."""
        if pages <= 0:
            return ()
        pool = self._core.pool
        self._make_room(pages)
        granted = pool.grant(pages)
        for page in granted:
            log.granted[page] = pool.generation(page)
        self._core.journal.granted(log, granted)
        return granted_pages(log, granted)

    def writing(self, log_id: bytes, generation: int, worker_id: str) -> LogState:
        """The log, if this worker is its writer at this generation; else STALE_GENERATION."""
        log = self._core.current(log_id, generation)
        if log.writer is None or log.writer.worker_id != worker_id:
            self._core.stale_refused += 1
            raise stale(log_id, generation, log.generation)
        return log

    # --- checkpoint and seal ----------------------------------------------------------------

    def checkpoint(
        self,
        log_id: bytes,
        generation: int,
        span: tuple[int, int],
        pages: Sequence[PageRow],
        now_s: float,
    ) -> int:
        """Records the KV of positions [span[0], span[1]); returns the committed position."""
        log = self._core.current(log_id, generation)
        require_allowed(log, Event.CHECKPOINT)
        first, end = span
        if self._is_committed_again(log, span, pages):
            return log.committed
        self._check_checkpoint(log, span, pages)
        core, block_tokens = self._core, self._core.block_tokens
        for index, given in enumerate(pages, start=first // block_tokens):
            if index == len(log.rows):
                core.pool.commit(given.page)
                del log.granted[given.page]
                log.rows.append(given)
            else:
                log.rows[index] = given
        log.committed = end
        if log.phase is Phase.PREFILL:
            log.chunks.append(chunk_of(pages, first, block_tokens))
        self._touch(log, now_s)
        core.journal.checkpointed(log, first, end, pages)
        return end

    def _is_committed_again(
        self, log: LogState, span: tuple[int, int], pages: Sequence[PageRow]
    ) -> bool:
        """A repeated call whose answer was lost."""
        first_row = span[0] // self._core.block_tokens
        return (
            span[0] < span[1] == log.committed
            and list(pages) == log.rows[first_row:]
            and bool(pages)
        )

    def _check_checkpoint(
        self, log: LogState, span: tuple[int, int], pages: Sequence[PageRow]
    ) -> None:
        first, end = span
        last = log.prompt_tokens if log.phase is Phase.PREFILL else log.position - 1
        if first != log.committed:
            raise invalid("from_position", f"must be {log.committed}, where KV ends now")
        if not first < end <= last:
            raise invalid("to_position", f"must be over {first} and at most {last}")
        block_tokens = self._core.block_tokens
        spans = list(page_spans(block_tokens, first, end - first))
        if len(pages) != len(spans):
            raise invalid("pages", f"the range touches {len(spans)} pages, {len(pages)} given")
        seen: set[int] = set()
        for place, given in zip(spans, pages, strict=True):
            tokens = place.first_slot + place.tokens
            field = f"pages[{place.block_index - spans[0].block_index}]"
            self._check_page(log, place.block_index, given, field)
            if given.page in seen:
                raise invalid(f"{field}.page", "is listed twice")
            seen.add(given.page)
            if given.tokens != tokens:
                raise invalid(f"{field}.tokens", f"must be {tokens}")
            if tokens < block_tokens and len(given.slot_crcs) != tokens:
                raise invalid(f"{field}.slot_crc32c", f"give one for each of {tokens} slots")

    def _check_page(self, log: LogState, block_index: int, given: PageRow, field: str) -> None:
        """The page of a row that exists must be that row's; of a new row, a granted one."""
        if block_index < len(log.rows):
            row = log.rows[block_index]
            if (given.page, given.page_generation) != (row.page, row.page_generation):
                raise invalid(f"{field}.page", f"this block's page is {row.page}")
            if given.slot_crcs and given.slot_crcs[: row.tokens] != row.slot_crcs:
                raise invalid(f"{field}.slot_crc32c", "a committed slot was written again")
        elif log.granted.get(given.page) != given.page_generation:
            raise invalid(f"{field}.page", "is not granted to this log's writer")

    def seal(
        self,
        log_id: bytes,
        generation: int,
        digest: bytes,
        end: SealEnd,
        now_s: float,
    ) -> int:
        """Ends prefill; returns the log's position. Repeating the same seal is harmless."""
        log = self._core.current(log_id, generation)
        if self._is_sealed_again(log, digest, end):
            return log.position
        require_allowed(log, Event.SEAL)
        if log.committed != log.prompt_tokens:
            raise invalid(
                "log_id", f"KV is committed to {log.committed} of {log.prompt_tokens} positions"
            )
        if chunk_list_digest(self._core.limits.kv_digest, log.chunks) != digest:
            raise ServiceError(
                Reason.CHECKSUM_MISMATCH,
                "chunk_list_digest is not that of the committed chunks; prefill again",
                field="chunk_list_digest",
            )
        self._check_token(end.token_id)
        log.chunk_list_digest = digest
        log.phase = Phase.DECODE
        if end.token_id is not None:
            log.tokens.append(end.token_id)
            if end.logprob is not None:
                log.logprobs.append(end.logprob)
        log.finish_reason = end.finish_reason
        self._core.journal.sealed(log, digest, end.token_id, end.logprob)
        log.chunks = []
        self._touch(log, now_s)
        if end.token_id is None or end.finish_reason is not None:
            self._finish(log)
        return log.position

    def _is_sealed_again(self, log: LogState, digest: bytes, end: SealEnd) -> bool:
        tokens = 0 if end.token_id is None else 1
        return (
            log.chunk_list_digest == digest
            and log.position == log.prompt_tokens + tokens
            and (end.token_id is None or log.tokens[-1] == end.token_id)
        )

    def _check_token(self, token_id: int | None) -> None:
        size = self._core.limits.vocabulary_size
        if token_id is not None and size is not None and token_id >= size:
            raise invalid("token_id", f"{token_id} is not in the vocabulary of {size} tokens")

    # --- append -----------------------------------------------------------------------------

    def append(self, item: AppendItem, worker_id: str, now_s: float) -> LogState:
        """One token; returns its log. A repeated item changes nothing."""
        log = self.writing_or_ended(item, worker_id)
        tokens = log.tokens
        if item.position != len(tokens) or log.phase is not Phase.DECODE:
            if not self._is_appended_again(log, item):
                require_allowed(log, Event.APPEND)
                raise invalid("position", f"must be {len(tokens)}, the log's next position")
            return log
        core = self._core
        row = self._slot_row(log, item)
        size = core.limits.vocabulary_size
        if size is not None and item.token_id >= size:
            raise invalid("token_id", f"not in the vocabulary of {size} tokens")
        if row is None:
            core.pool.commit(item.page)
            del log.granted[item.page]
            row = PageRow(page=item.page, page_generation=item.page_generation, tokens=0)
            log.rows.append(row)
        row.tokens += 1
        if item.page_crc is not None and row.tokens == core.limits.block_tokens:
            row.crc = item.page_crc
            row.slot_crcs = []
        else:
            row.slot_crcs.append(item.slot_crc)
        log.committed += 1
        tokens.append(item.token_id)
        if item.logprob is not None:
            log.logprobs.append(item.logprob)
        log.finish_reason = item.finish_reason
        core.journal.appended(log, item.position, item.token_id, row, item.slot_crc, item.logprob)
        self._touch(log, now_s)
        if item.finish_reason is not None:
            self._finish(log)
        return log

    def writing_or_ended(self, item: AppendItem, worker_id: str) -> LogState:
        """The log at the item's generation; its writer may have just ended it by name."""
        log = self._core.current(item.log_id, item.generation)
        writer = log.writer
        if writer is None:
            if log.phase is Phase.ENDED:
                return log
        elif writer.worker_id == worker_id:
            return log
        self._core.stale_refused += 1
        raise stale(item.log_id, item.generation, log.generation)

    def _is_appended_again(self, log: LogState, item: AppendItem) -> bool:
        return (
            log.prompt_tokens <= item.position < log.position
            and log.tokens[item.position] == item.token_id
        )

    def _slot_row(self, log: LogState, item: AppendItem) -> PageRow | None:
        """The row whose next slot the item names; None when a granted page begins a new row."""
        if log.committed != item.position - 1:
            raise invalid(
                "position", f"KV is committed to {log.committed}; checkpoint the rest first"
            )
        block_tokens = self._core.limits.block_tokens
        slot = log.committed % block_tokens
        if slot == block_tokens - 1 and item.page_crc is None:
            raise invalid("page_crc32c", "is missing: the slot is its page's last")
        if slot == 0:
            if log.granted.get(item.page) != item.page_generation:
                raise invalid("page", "is not granted to this log's writer")
            return None
        row = log.rows[-1]
        if row.page != item.page or row.page_generation != item.page_generation:
            raise invalid("page", f"position {item.position - 1} belongs into page {row.page}")
        return row

    # --- generations ------------------------------------------------------------------------

    def take(
        self,
        log_id: bytes,
        generation: int,
        writer: Writer,
        numeric_class: NumericClass,
        *,
        pages: int,
        now_s: float,
    ) -> TakeAnswer:
        """Raises the generation and makes `writer` the writer; older ones are fenced."""
        log = self._core.current(log_id, generation)
        require_allowed(log, Event.TAKE)
        self.check_readable(log.numeric_class_id, numeric_class)
        block_tokens = self._core.block_tokens
        needed = pages + (1 if log.committed % block_tokens else 0)
        self.require_room(needed)
        previous = log.generation
        self.fence(log)
        # The new writer's chunk list covers what it commits itself; the rest it adopts verified.
        log.chunks = []
        log.numeric_class, log.numeric_class_id = numeric_class.text, numeric_class.id
        granted = self.install(log, writer, pages, now_s)
        self._core.journal.taken(log, previous)
        if granted:
            self._core.journal.granted(log, [page.page for page in granted])
        return TakeAnswer(generation=log.generation, position=log.position, granted=granted)

    def require_room(self, pages: int) -> None:
        """PAGES_EXHAUSTED, before anything is changed, unless so many pages can be granted."""
        self._make_room(pages)
        if pages > self._core.pool.free_count:
            raise pages_exhausted(pages, self._core.pool.free_count)

    def check_readable(self, writer_class_id: int, reader: NumericClass) -> None:
        """COMPAT_MISMATCH unless the policy lets `reader` continue KV of the writer's class."""
        if not self._core.limits.policy.is_readable(writer=writer_class_id, reader=reader.id):
            raise ServiceError(
                Reason.COMPAT_MISMATCH,
                "numeric_class differs from the log's and the policy does not pair them",
                field="numeric_class",
                metadata={
                    "field": "numeric_class",
                    "ours": f"{writer_class_id:08x}",
                    "theirs": f"{reader.id:08x}",
                },
            )

    def install(
        self, log: LogState, writer: Writer, pages: int, now_s: float
    ) -> tuple[GrantedPage, ...]:
        """Makes `writer` the writer of an unwritten log: tail copied (O7), pages granted.

        Not journalled here: the caller's record names the writer.
        """
        assert log.writer is None, "fence the old writer first"
        core = self._core
        log.writer = writer
        core.leases.renew(log.log_id, now_s)
        log.last_used_s = now_s
        if log.committed % core.block_tokens:
            self._copy_tail(log)
        granted = core.pool.grant(pages)
        for page in granted:
            log.granted[page] = core.pool.generation(page)
        return granted_pages(log, granted)

    def _copy_tail(self, log: LogState) -> None:
        core = self._core
        old = log.rows[-1]
        (page,) = core.pool.grant(1)
        core.pool.commit(page)
        source = SlotSource(row=copy_row(old), first_slot=0, tokens=old.tokens)
        row = PageRow(
            page=page,
            page_generation=core.pool.generation(page),
            tokens=old.tokens,
            slot_crcs=known_slot_crcs((source,)),
        )
        core.work.append(
            FillPage(
                log_id=log.log_id,
                generation=log.generation,
                block_index=len(log.rows) - 1,
                target=row,
                sources=(source,),
            )
        )
        log.rows[-1] = row
        core.pool.drop(old.page)
        core.drain_freed()

    def fence(self, log: LogState) -> None:
        """Raises the generation; what the old writer may still write is quarantined.

        Not journalled here: the caller's record carries the new generation.
        """
        core, writer = self._core, log.writer
        old_generation = log.generation
        log.generation += 1
        if writer is None:
            return
        fence = Fence(worker_slot=writer.slot, log_id=log.log_id, generation=old_generation)
        for page in log.granted:
            core.pool.fence(page, fence)
        if log.rows and log.rows[-1].tokens < core.block_tokens:
            core.pool.fence(log.rows[-1].page, fence)
        log.granted = {}
        log.writer = None
        core.leases.end(log.log_id)

    def discard_tail(self, work: FillPage) -> None:
        """A copied block turned out damaged: the log keeps the blocks before it only.

        The damaged source is not found by lookups again. The fresh page stays with the log's
        writer as a granted one.
        """
        core = self._core
        for source in work.sources:
            core.index.forget_page(source.row.page)
        log = core.logs.get(work.log_id)
        if log is None or log.generation != work.generation or work.block_index >= len(log.rows):
            return
        for row in reversed(log.rows[work.block_index :]):
            core.pool.drop(row.page)
        del log.rows[work.block_index :]
        log.committed = work.block_index * core.block_tokens
        log.cached_tokens = min(log.cached_tokens, log.committed)
        core.drain_freed()
        if log.writer is not None:
            self.grant_up_to(log, 1)

    def _finish(self, log: LogState) -> None:
        """The writer ended the log by name: it writes nothing more, what it had left is free."""
        core = self._core
        if log.granted:
            core.journal.released(log, list(log.granted))
        for page in log.granted:
            core.pool.give_back(page)
        log.granted = {}
        log.writer = None
        log.phase = Phase.ENDED
        core.leases.end(log.log_id)
        core.drain_freed()

    def _touch(self, log: LogState, now_s: float) -> None:
        log.last_used_s = now_s
        if log.writer is not None:
            self._core.leases.renew(log.log_id, now_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SealEnd:
    """What prefill sampled, if it did, and whether the answer ends with it."""

    token_id: int | None
    logprob: LogprobEntry | None = None
    finish_reason: str | None = None


def granted_pages(log: LogState, pages: Sequence[int]) -> tuple[GrantedPage, ...]:
    """Granted pages of a log with their page generations."""
    return tuple(GrantedPage(page=page, page_generation=log.granted[page]) for page in pages)


def copy_row(row: PageRow) -> PageRow:
    """A row that later appends to the original do not change."""
    return PageRow(
        page=row.page,
        page_generation=row.page_generation,
        tokens=row.tokens,
        crc=row.crc,
        slot_crcs=list(row.slot_crcs),
    )


def known_slot_crcs(sources: Sequence[SlotSource]) -> list[int]:
    """The slot CRCs of a copy of one partial page; empty where the copy has to tell."""
    if len(sources) != 1 or sources[0].row.crc is not None:
        return []
    return sources[0].row.slot_crcs[: sources[0].tokens]


def chunk_of(pages: Sequence[PageRow], first: int, block_tokens: int) -> list[ChunkPage]:
    """One commit's part of the chunk list that SEAL's digest covers."""
    start = first // block_tokens * block_tokens
    return [
        ChunkPage(
            first_position=start + index * block_tokens,
            tokens=row.tokens,
            crc=slot_list_crc(row.slot_crcs) if row.crc is None else row.crc,
        )
        for index, row in enumerate(pages)
    ]
