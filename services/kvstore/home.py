"""A log's home: who may write it, and every write of its current writer.

Owns generations, fences and the rules of GRANT, CHECKPOINT, SEAL, TAKE, APPEND. Pure: time is
passed in, records go to the core's journal, page work to its list.

Invariants: the generation is checked first and a refused write changes nothing; a page has one
writing generation for its whole life (O7); an append is accepted only at the next position, and the
same token at the same position and generation again is a no-op; pages of a fenced writer are
quarantined until it is gone or has named them as released (O4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum, unique
from typing import Final

from baton.errors import Reason, ServiceError
from baton.kv.numeric import NumericClass
from services.kvstore.core import Core, stale
from services.kvstore.pages import Fence, pages_exhausted
from services.kvstore.state import (
    CheckPages,
    FillPage,
    GrantedPage,
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
        self.check_pages(log, range(log.committed // block_tokens))
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

    def check_pages(self, log: LogState, indexes: Iterable[int]) -> None:
        """Orders the comparison of full pages that the log's new writer goes on from: what is
        damaged is computed again from its tokens, never read.
        """
        blocks = tuple((index, log.rows[index]) for index in indexes)
        if blocks:
            self._core.work.append(
                CheckPages(log_id=log.log_id, generation=log.generation, blocks=blocks)
            )

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
