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
from enum import Enum, unique
from typing import Final

from baton.errors import Reason, ServiceError
from baton.kv.label import mismatch
from baton.kv.numeric import NumericClass
from services.kvstore.core import Core, Limits, stale
from services.kvstore.pages import Fence, PagePool, pages_exhausted
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
    MOVE = "move"


ALLOWED: Final = {
    Event.GRANT: frozenset({Phase.PREFILL, Phase.DECODE}),
    Event.CHECKPOINT: frozenset({Phase.PREFILL, Phase.DECODE}),
    Event.SEAL: frozenset({Phase.PREFILL}),
    Event.TAKE: frozenset({Phase.PREFILL, Phase.DECODE}),
    Event.APPEND: frozenset({Phase.DECODE}),
    Event.TRUNCATE: frozenset({Phase.DECODE, Phase.ENDED, Phase.KEPT}),
    Event.FORK: frozenset({Phase.DECODE, Phase.ENDED, Phase.KEPT, Phase.MOVED}),
    Event.MOVE: frozenset({Phase.DECODE, Phase.ENDED, Phase.KEPT}),
}
"""In which phases each event is taken; what is not here is refused and changes nothing."""


def require_allowed(log: LogState, event: Event) -> None:
    """INVALID_REQUEST unless the log's phase takes the event; STALE_GENERATION if it moved away."""
    if log.phase is Phase.MOVED and event is not Event.FORK:
        raise ServiceError(
            Reason.STALE_GENERATION,
            f"{event.value} is not possible: the log moved to another kvstore; ask it there",
            field="log_id",
            metadata={"phase": log.phase.value, "event": event.value},
        )
    if log.phase not in ALLOWED[event]:
        raise ServiceError(
            Reason.INVALID_REQUEST,
            f"{event.value} is not possible: the log's phase is {log.phase.value}",
            field="log_id",
            metadata={"phase": log.phase.value, "event": event.value},
        )


def require_same_model(limits: Limits, log: LogState) -> None:
    """COMPAT_MISMATCH for a log that was written under other weights (or RoPE, dtype, page size):
    its answer is not continued by these. Its tokens may be the beginning of another log.
    """
    require_same_tokens(limits, log)
    if log.kv_digest not in (None, limits.kv_digest):
        raise mismatch("kv_digest", limits.kv_digest.hex(), (log.kv_digest or b"").hex())


def require_same_tokens(limits: Limits, log: LogState) -> None:
    """TOKENIZER_MISMATCH for a log whose token ids mean other texts here."""
    if log.tokenizer_hash not in (None, limits.tokenizer_hash):
        theirs = (log.tokenizer_hash or b"").hex()
        raise mismatch("tokenizer_hash", limits.tokenizer_hash.hex(), theirs)


class Home:
    """The writes of one store's logs. `make_room(pages, tenant)` frees pages of kept logs if it can
    and the tenant may have them.
    """

    def __init__(self, core: Core, make_room: Callable[[int, str], None]) -> None:
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
        pool = self._core.pool
        self._make_room(pages, log.tenant)
        pages = min(pages, pool.free_count)
        if pool.charges is not None:
            pages = min(pages, pool.charges.room(log.tenant))
        return self.give(log, pages)

    def grant_again(self, log: LogState, pages: int) -> tuple[GrantedPage, ...]:
        """For a repeated request whose answer was lost: the newest of the pages granted since,
        which are those of that answer, and more only where there are fewer.
        """
        told = granted_pages(log, list(log.granted)[-pages:])
        return (*told, *self.grant_up_to(log, pages - len(told)))

    def give(self, log: LogState, pages: int) -> tuple[GrantedPage, ...]:
        """Grants to the log's writer; the caller has checked everything but the room."""
        if pages <= 0:
            return ()
        pool = self._core.pool
        self.require_room(pages, log.tenant)
        granted = pool.grant(pages, log.tenant)
        add_granted(log, pool, granted)
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
        require_same_model(self._core.limits, log)
        self.check_readable(log.numeric_class_id, numeric_class)
        block_tokens = self._core.block_tokens
        needed = pages + (1 if log.committed % block_tokens else 0)
        self.require_room(needed, log.tenant)
        previous = log.generation
        self.fence(log)
        # The new writer's chunk list covers what it commits itself; the rest it adopts verified.
        log.chunks = []
        log.numeric_class, log.numeric_class_id = numeric_class.text, numeric_class.id
        granted = self.install(log, writer, pages, now_s)
        self.check_pages(log, log.committed // block_tokens)
        self._core.journal.taken(log, previous)
        self.journal_grants(log, granted)
        return TakeAnswer(generation=log.generation, position=log.position, granted=granted)

    def journal_grants(self, log: LogState, granted: Sequence[GrantedPage]) -> None:
        """GRANT behind a TAKE, which itself names the copied tail only where its CRCs are known."""
        pages = [page.page for page in granted]
        if log.committed % self._core.block_tokens:
            tail = log.rows[-1]
            if len(tail.slot_crcs) != tail.tokens:
                pages.append(tail.page)
        if pages:
            self._core.journal.granted(log, pages)

    def make_room(self, pages: int, tenant: str) -> None:
        """Evicts kept logs' KV until the tenant can have so many pages, or nothing is left."""
        self._make_room(pages, tenant)

    def require_room(self, pages: int, tenant: str) -> None:
        """PAGES_EXHAUSTED, before anything is changed, unless so many pages can be granted;
        QUOTA_EXCEEDED where the tenant may not have them.
        """
        pool = self._core.pool
        if pool.charges is not None:
            pool.charges.require(tenant, pages)
        self._make_room(pages, tenant)
        require_grantable(pool, pages, tenant)

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
        # Its time to be kept begins anew when nobody writes it again.
        log.expires_wall_s = None
        if log.committed % core.block_tokens:
            self._copy_tail(log)
        granted = core.pool.grant(pages, log.tenant)
        add_granted(log, core.pool, granted)
        return granted_pages(log, granted)

    def _copy_tail(self, log: LogState) -> None:
        core = self._core
        old = log.rows[-1]
        (page,) = core.pool.grant(1, log.tenant)
        core.pool.commit(page)
        source = SlotSource(row=old, first_slot=0, tokens=old.tokens)
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
        if row.slot_crcs and core.pool.holders(old.page) == 1:
            core.tree.follow(old, row)
        log.rows[-1] = row
        core.pool.drop(old.page)
        core.drain_freed()

    def check_pages(
        self, log: LogState, blocks: int, indexes: tuple[int, ...] | None = None
    ) -> None:
        """Orders the comparison of the first full `blocks` (of them `indexes`; None: all), which
        the log's new writer goes on from: what is damaged is computed again, never read.
        """
        core = self._core
        if blocks and indexes != ():
            core.work.append(
                CheckPages(
                    log_id=log.log_id,
                    generation=log.generation,
                    rows=log.rows.head(blocks * core.block_tokens, core.block_tokens),
                    indexes=indexes,
                )
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
        core.idle(log)

    def cut_kv(self, log: LogState, committed: int) -> None:
        """Keeps the KV of the first `committed` positions. Not journalled here."""
        core = self._core
        block_tokens = core.block_tokens
        core.pool.drop_many(log.rows.cut(committed, block_tokens))
        log.committed = committed
        log.cached_tokens = min(log.cached_tokens, committed)
        full = committed // block_tokens
        if full < log.indexed_blocks:
            log.indexed_blocks = full
        core.drain_freed()

    def give_up_kv(self, log: LogState, blocks: int) -> None:
        """The log keeps the KV of its first `blocks` only, and its record says so."""
        if blocks < len(log.rows):
            self._core.journal.evicted(log, blocks)
            self.cut_kv(log, blocks * self._core.block_tokens)

    def filled(self, work: FillPage) -> None:
        """A tail was copied whose CRCs its source did not tell: it is recorded, so that a restart
        finds it.
        """
        log = self._core.logs.get(work.log_id)
        if log is None or log.generation != work.generation or log.rows.last is not work.target:
            return
        first = work.block_index * self._core.block_tokens
        tokens = work.target.tokens
        is_told = bool(known_slot_crcs(work.sources))
        is_tail = tokens < self._core.block_tokens and log.committed == first + tokens
        if is_tail and not is_told:
            self._core.journal.adopted(log, first, log.committed)

    def discard_tail(self, work: FillPage) -> None:
        """A copied block turned out damaged: the log keeps the blocks before it only.

        The damaged source is not found by lookups again. The fresh page stays with the log's
        writer as a granted one.
        """
        core = self._core
        for source in work.sources:
            core.disbelieve(source.row.page)
        log = core.logs.get(work.log_id)
        if log is None or log.generation != work.generation or work.block_index >= len(log.rows):
            return
        self.give_up_kv(log, work.block_index)
        if log.writer is not None:
            self.grant_up_to(log, 1)


def add_granted(log: LogState, pool: PagePool, pages: Sequence[int]) -> None:
    """Freshly granted pages belong to the log's writer."""
    if len(pages) == 1:
        log.granted[pages[0]] = pool.generation(pages[0])
    else:
        log.granted.update(zip(pages, pool.generations(pages), strict=True))


def require_grantable(pool: PagePool, pages: int, tenant: str) -> None:
    """After room was made: QUOTA_EXCEEDED or PAGES_EXHAUSTED unless `pages` can be granted now."""
    if pool.charges is not None and not pool.charges.may_grant(tenant, pages):
        raise pool.charges.refusal(tenant, pages)
    if pages > pool.free_count:
        raise pages_exhausted(pages, pool.free_count)


def granted_pages(log: LogState, pages: Sequence[int]) -> tuple[GrantedPage, ...]:
    """Granted pages of a log with their page generations."""
    return tuple(GrantedPage(page=page, page_generation=log.granted[page]) for page in pages)


def known_slot_crcs(sources: Sequence[SlotSource]) -> list[int]:
    """The slot CRCs of a copy of one partial page; empty where the copy has to tell."""
    if len(sources) != 1 or sources[0].row.crc is not None:
        return []
    return sources[0].row.slot_crcs[: sources[0].tokens]
