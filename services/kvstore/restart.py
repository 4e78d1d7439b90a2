"""What a kvstore that comes back makes of its log: pages, owners, prefixes and lookups as before.

Owns that step. Pure: what the log says comes in as `Recovered`, which worker slots are still locked
and whether the arena is the one of before as `Standing`. Never reads a page: what it takes over is
compared with its records before anybody goes on from it, as at every take-over.

Rules: a page belongs to who named it last (its highest page generation); rows behind one that lost
its page are gone, their tokens stay. So it is with slots of the NVMe file that is still there,
whatever became of the arena. What a writer may still write is its own, or quarantined, as long as
its slot's lock stands. A log whose writer lives keeps it for one lease, in which it has to
attach again; one whose writer is gone gets a new generation at once, and only that may adopt what
is committed. Under another arena no KV is left, and the generation is raised for everybody.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from baton.kv.digests import ids_hash
from services.kvstore.core import Core
from services.kvstore.log.recovery import OpenGrant, Recovered
from services.kvstore.pages import Fence, PageState
from services.kvstore.prefixes import Prefix
from services.kvstore.quota_book import recharge
from services.kvstore.rows import PageArray, PageRow, Rows
from services.kvstore.state import LogState, Phase, Writer
from services.kvstore.store import Now, Store
from services.kvstore.workers import Former

Generations = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What a start found besides the log. `class_text` names a numeric class by its id."""

    is_same_arena: bool
    locked_slots: frozenset[int]
    model: str
    class_text: Callable[[int], str]


@dataclass(slots=True, kw_only=True)
class Restored:
    """What became of it. `slot_owners`: worker id by slot, of every slot the log names.

    `dirty`: free pages whose bytes are unknown. `unindexed`: logs whose blocks lookups do not find
    yet (`index_some`). `former`: whose logs may be attached again although
    their generation was raised.
    """

    slot_owners: dict[int, str] = field(default_factory=dict)
    dirty: list[int] = field(default_factory=list)
    unindexed: deque[LogState] = field(default_factory=deque)
    former: dict[bytes, Former] = field(default_factory=dict)
    written: int = 0
    cut: int = 0
    lost_prefixes: list[str] = field(default_factory=list)


def restore(store: Store, recovered: Recovered, standing: Standing, now: Now) -> Restored:
    """Fills the empty tables of `store` from what its log came to; asserts conservation."""
    return _Restart(store, recovered, standing, now).run()


class _Restart:
    def __init__(self, store: Store, recovered: Recovered, standing: Standing, now: Now) -> None:
        self._store = store
        self._core: Core = store.core
        self._recovered = recovered
        self._standing = standing
        self._now = now
        self._out = Restored()
        self._newest: Generations = np.zeros(self._core.pool.page_count, dtype=np.uint64)

    def run(self) -> Restored:
        recovered, core = self._recovered, self._core
        core.tombstones.update(recovered.dropped)
        logs = [log for log in recovered.logs.values() if self._suits(log)]
        prefixes = list(recovered.prefixes)
        self._note_newest(logs, prefixes)
        for log in logs:
            self._cut(log)
        prefixes = [prefix for prefix in prefixes if self._is_whole(prefix)]
        self._claim(logs, prefixes)
        self._claim_slots((*logs, *prefixes))
        for log in logs:
            self._add(log)
        for prefix in prefixes:
            core.prefixes.add(prefix)
            self._store.chains.offer_prefix(prefix)
            self._store.chains.offer_prefix_cold(prefix)
        self._store.session_keeper.adopt(recovered.sessions)
        for grant in self._open_grants():
            self._settle(grant)
        for grant in recovered.grants:
            self._out.slot_owners.setdefault(grant.writer.slot, grant.writer.worker_id)
        self._store.placement.adopt()
        # Only sealed logs serve lookups (O2); the newest are looked for first.
        self._out.unindexed.extend(
            log for log in reversed(logs) if log.is_sealed and (log.rows or log.cold)
        )
        self._out.dirty = core.pool.free_pages() if self._standing.is_same_arena else []
        recharge(core)
        core.check_invariants()
        return self._out

    def _suits(self, log: LogState) -> bool:
        """Tokens of another vocabulary mean nothing here."""
        size = self._core.limits.vocabulary_size
        return size is None or not log.tokens or max(log.tokens) < size

    # --- whose page it is ---------------------------------------------------------------------

    def _note_newest(self, logs: Iterable[LogState], prefixes: Iterable[Prefix]) -> None:
        """Who named a page last has it."""
        if not self._standing.is_same_arena:
            return
        for rows in (*(log.rows for log in logs), *(prefix.rows for prefix in prefixes)):
            self._note(*_columns(rows))
        named = self._recovered.page_generations
        self._note(
            np.fromiter(named, dtype=np.uint32, count=len(named)),
            np.fromiter(named.values(), dtype=np.uint64, count=len(named)),
        )

    def _note(self, pages: PageArray, generations: Generations) -> None:
        known = pages < len(self._newest)
        np.maximum.at(self._newest, pages[known], generations[known])

    def _first_lost(self, rows: Sequence[PageRow]) -> int:
        """The index of the first row whose page is not its own any more; their count if none."""
        if not len(rows) or not self._standing.is_same_arena:
            return 0
        pages, generations = _columns(rows)
        is_lost = pages >= len(self._newest)
        inside = ~is_lost
        is_lost[inside] = self._newest[pages[inside]] != generations[inside]
        is_first = np.zeros(len(pages), dtype=np.bool_)
        is_first[np.unique(pages, return_index=True)[1]] = True
        is_lost |= ~is_first
        return int(np.argmax(is_lost)) if is_lost.any() else len(pages)

    def _cut(self, log: LogState) -> None:
        """Rows whose pages are others' now are gone, and all behind them."""
        kept = self._first_lost(log.rows)
        if kept < len(log.rows):
            del log.rows[kept:]
            log.chunks = []
            self._out.cut += 1
        log.committed = _covered(log.rows, self._core.block_tokens)
        log.cached_tokens = min(log.cached_tokens, log.committed)

    def _is_whole(self, prefix: Prefix) -> bool:
        """Whether all of a prefix's pages are there, or all its copies on the NVMe tier; one of
        which neither is true is withdrawn.
        """
        if ids_hash(prefix.token_ids) != prefix.ids_hash:
            # Its log was cut and went on otherwise before its records were written again.
            return self._withdrawn(prefix)
        wanted = -(-prefix.position // self._core.block_tokens)
        is_hot = len(prefix.rows) == wanted == self._first_lost(prefix.rows)
        if is_hot or prefix.cold.tokens == prefix.position:
            prefix.model = self._standing.model
            prefix.numeric_class = self._standing.class_text(prefix.numeric_class_id)
            if not is_hot and prefix.rows:
                # All or nothing of it in the host; its pages are others' from here on.
                prefix.rows = ()
                self._core.journal.promoted(prefix, 0)
            return True
        return self._withdrawn(prefix)

    def _withdrawn(self, prefix: Prefix) -> bool:
        """It is not published any more: False."""
        self._core.journal.revoked(prefix, self._now.wall_s)
        self._out.lost_prefixes.append(prefix.prefix_id)
        return False

    # --- the pool -----------------------------------------------------------------------------

    def _claim(self, logs: Iterable[LogState], prefixes: Iterable[Prefix]) -> None:
        """Every page somebody refers to or may still write leaves the free list."""
        pool = self._core.pool
        holders = np.zeros(pool.page_count, dtype=np.int64)
        for rows in (*(log.rows for log in logs), *(prefix.rows for prefix in prefixes)):
            if len(rows):
                holders[_columns(rows)[0]] += 1
        held = np.flatnonzero(holders)
        claimed = dict(zip(held.tolist(), self._newest[held].tolist(), strict=True))
        for grant in self._open_grants():
            for page, page_generation in self._still_named(grant):
                claimed.setdefault(page, page_generation)
        pool.claim(claimed)
        pool.commit_many(held)
        holders -= 1
        while len(more := np.flatnonzero(holders > 0)):
            pool.hold_many(more)
            holders -= 1

    def _claim_slots(self, owners: Sequence[LogState | Prefix]) -> None:
        """Every slot that a copy stands in leaves the free list; nobody writes any now."""
        slots = self._core.slots
        if slots is None:
            return
        for owner in owners:
            pages = owner.cold.pages()
            outside = np.flatnonzero(pages >= slots.slot_count)
            del owner.cold[int(outside[0]) if len(outside) else len(pages) :]
        holders = Counter(slot for owner in owners for slot in owner.cold.pages().tolist())
        slots.restore(self._recovered.slot_generations, holders)

    def _open_grants(self) -> list[OpenGrant]:
        """Grants whose writer may be alive; of the others nothing is written any more."""
        if not self._standing.is_same_arena:
            return []
        return [grant for grant in self._recovered.grants if self._is_alive(grant.writer)]

    def _is_alive(self, writer: Writer) -> bool:
        """Its slot's lock stands: some process may still write what it was given."""
        return writer.slot in self._standing.locked_slots

    # --- logs ---------------------------------------------------------------------------------

    def _add(self, log: LogState) -> None:
        """Its writer keeps it where that lives; else its generation is raised."""
        core, now, standing = self._core, self._now, self._standing
        log.numeric_class = standing.class_text(log.numeric_class_id)
        log.base_numeric_class = standing.class_text(log.base_class_id)
        log.last_used_s = now.monotonic_s
        log.writer, log.granted, log.expires_wall_s = None, {}, now.wall_s + log.ttl_s
        moved = self._recovered.moved.get(log.log_id)
        if moved is not None:
            log.phase, log.moved_to = Phase.MOVED, moved.to_home
        writer = self._recovered.writers.get(log.log_id)
        if writer is not None:
            self._out.slot_owners.setdefault(writer.slot, writer.worker_id)
        if writer is None or not log.is_open:
            core.logs[log.log_id] = log
        elif standing.is_same_arena and self._is_alive(writer):
            log.writer, log.expires_wall_s = writer, None
            core.logs[log.log_id] = log
            core.leases.renew(log.log_id, now.monotonic_s)
            self._out.written += 1
        else:
            core.logs[log.log_id] = log
            if not standing.is_same_arena:
                former = Former(writer=writer, generation=log.generation)
                self._out.former[log.log_id] = former
            self._store.keeper.raise_generation(log)

    def _settle(self, grant: OpenGrant) -> None:
        """Its pages are the writer's own again, or quarantined under its fence."""
        pool, log = self._core.pool, self._core.logs.get(grant.log_id)
        if log is not None and log.generation != grant.generation:
            log = None
        is_own = log is not None and log.writer == grant.writer
        fence = Fence(
            worker_slot=grant.writer.slot, log_id=grant.log_id, generation=grant.generation
        )
        for page, page_generation in self._still_named(grant):
            is_granted = pool.state(page) is PageState.GRANTED
            if is_own and log is not None:
                if is_granted:
                    log.granted[page] = page_generation
            else:
                # Also a row's page: a partial tail that a fenced writer may still be writing.
                pool.fence(page, fence)

    def _still_named(self, grant: OpenGrant) -> list[tuple[int, int]]:
        """The pages of a grant that nobody was given since."""
        return [
            (page, page_generation)
            for page, page_generation in grant.pages.items()
            if page < len(self._newest) and self._newest[page] == page_generation
        ]


def index_some(store: Store, logs: deque[LogState], blocks_max: int) -> None:
    """Makes blocks of the first of `logs` findable and takes these out, until about `blocks_max`
    are; a log that has ended meanwhile is skipped.
    """
    blocks = 0
    while logs and blocks < blocks_max:
        log = logs.popleft()
        if store.core.logs.get(log.log_id) is log and log.is_sealed:
            store.chains.offer(log)
            store.chains.offer_cold(log)
            blocks += len(log.rows) + len(log.cold)


def _columns(rows: Sequence[PageRow]) -> tuple[PageArray, Generations]:
    """Page numbers and page generations of all rows."""
    if not isinstance(rows, Rows):
        rows = Rows(rows)
    columns, last = rows.columns(), rows.last
    if last is None:
        return columns.pages, columns.generations
    return (
        np.append(columns.pages, np.uint32(last.page)),
        np.append(columns.generations, np.uint64(last.page_generation)),
    )


def _covered(rows: Rows, block_tokens: int) -> int:
    """Positions that a page table has KV of."""
    if rows.last is None:
        return 0
    return (len(rows) - 1) * block_tokens + rows.last.tokens
