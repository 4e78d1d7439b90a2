"""What the cores of the kvstore share: tables, limits, the journal they write to, refusals.

Owns `Core` (the one mutable aggregate) and the `Journal` protocol. Pure: no I/O, no clock. The
cores change the tables at once and emit, in order, journal calls and page work; the runtime makes
them durable and done before it answers.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from baton.errors import Reason, ServiceError
from baton.ids import log_id_text
from baton.kv.manifest import Manifest
from baton.kv.numeric import DEFAULT_POLICY, CompatPolicy
from services.kvstore.idle import LogTable
from services.kvstore.lease import LeaseTable
from services.kvstore.log.state import Parent
from services.kvstore.log.store_records import CloseReason
from services.kvstore.pages import Fence, PagePool
from services.kvstore.prefixes import Prefix, PrefixTable
from services.kvstore.quotas import Charges
from services.kvstore.rows import PageArray, Rows
from services.kvstore.sessions import SessionState, SessionTable
from services.kvstore.state import FillPage, LogprobEntry, LogState, PageRow, PageWork, ZeroPages
from services.kvstore.tiers.slots import Slots
from services.kvstore.tree import BlockTree

TOMBSTONES_MAX = 65_536
FORGET_AT_ONCE_MAX = 256


class Journal(Protocol):
    """Where the cores record what they did; each call is one record, in order."""

    def opened(
        self,
        log: LogState,
        base: Parent | Manifest | None,
        *,
        is_fork: bool = False,
        is_looked_up: bool = False,
    ) -> None:
        """A log began from `base`. With a manifest a snapshot follows; a parent's records stay
        until this log's next snapshot. `is_fork`: sealed from the start, all the parent's.
        `is_looked_up`: its KV is not the base's; `adopted` states it.
        """

    def adopted(self, log: LogState, first: int, end: int) -> None:
        """The log began with KV of positions [first, end) that was not computed for it."""

    def evicted(self, log: LogState, first_block: int) -> None:
        """The log gives up its KV from that block on; its rows are still there."""

    def snapshot(self, log: LogState) -> None:
        """All of the log's state, so that its earlier records are not needed any more."""

    def granted(self, log: LogState, pages: Sequence[int]) -> None:
        """Pages were granted to the log's writer; without pages the record only names it."""

    def released(self, log: LogState, pages: Sequence[int]) -> None:
        """Granted pages came back unwritten."""

    def checkpointed(self, log: LogState, first: int, end: int, rows: Sequence[PageRow]) -> None:
        """KV of positions [first, end) is in `rows`."""

    def lifted(self, fence: Fence, pages: Mapping[int, int]) -> None:
        """A fenced writer cannot write these pages (page -> page generation) any more."""

    def sealed(
        self, log: LogState, digest: bytes, first_token: int | None, logprob: LogprobEntry | None
    ) -> None:
        """Prefill is complete."""

    def taken(self, log: LogState, previous_generation: int) -> None:
        """The generation was raised; the log's writer may have changed, or be None."""

    def appended(
        self,
        log: LogState,
        row: PageRow,
        slot_crc: int,
        logprob: LogprobEntry | None,
    ) -> None:
        """The log's last token, and the KV slot of the token before it (the last of `row`)."""

    def truncated(self, log: LogState, previous_generation: int) -> None:
        """The log was cut to its position, under a new generation."""

    def closed(self, log: LogState, reason: CloseReason) -> None:
        """The log is gone."""

    def moved(self, log: LogState, previous_generation: int, digest: bytes) -> None:
        """The log's home is `log.moved_to` now; `digest` covers its page table."""

    def arrived(self, log: LogState, from_home: str) -> None:
        """A log of another home begins here, with all its state."""

    def published(self, prefix: Prefix) -> None:
        """A prefix is offered."""

    def revoked(self, prefix: Prefix, wall_s: float) -> None:
        """A prefix is withdrawn."""

    def session(self, session: SessionState, *, is_deleted: bool) -> None:
        """A session is what it is now, or gone."""

    def placed(self, owner: LogState | Prefix, first_block: int) -> None:
        """Blocks from that one on stand in `owner.cold`, which ends where it ends now."""

    def promoted(self, owner: LogState | Prefix, first_block: int) -> None:
        """Blocks from that one on stand in `owner.rows` again, copied from `owner.cold`. Of a
        prefix the rows end where they end now.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Sizes and times the cores hold to."""

    block_tokens: int
    kv_digest: bytes
    tokenizer_hash: bytes
    vocabulary_size: int | None = None
    tokens_max: int = 1 << 20
    logs_max: int = 65_536
    ttl_default_s: float = 3600.0
    ttl_max_s: float = 7 * 86_400.0
    policy: CompatPolicy = DEFAULT_POLICY


@dataclass(slots=True, kw_only=True)
class Core:
    """Every table of one kvstore."""

    limits: Limits
    pool: PagePool
    leases: LeaseTable
    journal: Journal
    tree: BlockTree = field(init=False)
    prefixes: PrefixTable = field(default_factory=PrefixTable)
    sessions: SessionTable = field(default_factory=SessionTable)
    logs: LogTable = field(default_factory=LogTable)
    # Generations of dropped logs: their late writers are told they are stale, not that the log
    # never was. Bounded; the oldest is forgotten first.
    tombstones: OrderedDict[bytes, int] = field(default_factory=OrderedDict)
    work: list[PageWork] = field(default_factory=list)
    # Holders that are neither logs nor prefixes: page -> open transfers.
    transfers: dict[int, int] = field(default_factory=dict)
    # Pages granted to a transfer that fills them; no log refers to them yet.
    importing: set[int] = field(default_factory=set)
    # The NVMe tier's slots; None: there is no such tier. What holds them beside cold rows (slot ->
    # reads under way), and those that are granted because they are being written.
    slots: Slots | None = None
    slot_readers: dict[int, int] = field(default_factory=dict)
    placing: set[int] = field(default_factory=set)
    # The slots of each worker's device memory.
    device_pools: dict[str, PagePool] = field(default_factory=dict)
    # Told of pages that became free, before anybody is granted them.
    freed_listeners: list[Callable[[Sequence[int]], None]] = field(default_factory=list)
    stale_refused: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    loaded_hit_tokens: int = 0
    evicted_logs: int = 0

    def __post_init__(self) -> None:
        self.tree = BlockTree(self.pool.is_held, self._is_slot_held)

    def _is_slot_held(self, slot: int, slot_generation: int) -> bool:
        return self.slots is not None and self.slots.is_current(slot, slot_generation)

    @property
    def block_tokens(self) -> int:
        """Token slots of one page."""
        return self.limits.block_tokens

    def find(self, log_id: bytes) -> LogState:
        """The log; LOG_NOT_FOUND."""
        log = self.logs.get(log_id)
        if log is None:
            raise log_not_found(log_id)
        return log

    def current(self, log_id: bytes, generation: int) -> LogState:
        """The log, if `generation` is its current one; STALE_GENERATION, and nothing changed."""
        log = self.logs.get(log_id)
        if log is not None and log.generation == generation:
            return log
        newest = self.tombstones.get(log_id) if log is None else log.generation
        if newest is None:
            raise log_not_found(log_id)
        self.stale_refused += 1
        raise stale(log_id, generation, newest)

    def idle(self, log: LogState) -> None:
        """Nobody writes the log any more: its time may end, its KV may be evicted."""
        assert log.writer is None
        if log.log_id in self.logs:
            self.logs.add(log)

    def hold_for_transfer(self, pages: Iterable[int]) -> None:
        """These held pages stay what they are until `end_transfer`."""
        for page in pages:
            self.pool.hold(page)
            self.transfers[page] = self.transfers.get(page, 0) + 1

    def end_transfer(self, pages: Iterable[int]) -> None:
        """Undoes one `hold_for_transfer`. The caller drains what was freed."""
        for page in pages:
            self.transfers[page] -= 1
            if not self.transfers[page]:
                del self.transfers[page]
            self.pool.drop(page)

    def cut_copies(self, owner: LogState | Prefix, tokens: int) -> bool:
        """Gives up the NVMe copies of all positions from `tokens` on; False if there are none.

        Not journalled here: TRUNCATE and CLOSE say it themselves.
        """
        if self.slots is None or owner.cold.tokens <= tokens:
            return False
        self.slots.drop(owner.cold.cut(tokens, self.block_tokens))
        return True

    def written_from(self, log: LogState, position: int) -> None:
        """The log's KV from that position on is written: copies of what stood there before, which
        was not in the host any more, are other bytes.
        """
        if log.cold and self.cut_copies(log, position):
            self.journal.placed(log, len(log.cold))

    def drain_freed(self) -> None:
        """Turns pages the pool has freed into work and takes them out of the tree.

        Many at once stay in the tree, which looks whether a page is still the same.
        """
        freed = self.pool.take_freed_array()
        if freed:
            if len(freed) <= FORGET_AT_ONCE_MAX:
                for page in freed:
                    self.tree.forget_page(page)
            if self.slots is not None:
                self.slots.forget_pages(freed)
            for listener in self.freed_listeners:
                listener(freed)
            self.work.append(ZeroPages(pages=freed))

    def disbelieve(self, page: int) -> None:
        """A host page is not what it should be: nothing finds it, and no copy stands for it."""
        self.tree.forget_page(page)
        if self.slots is not None:
            self.slots.forget_pages((page,))

    def take_work(self) -> list[PageWork]:
        """The page work ordered since the last call, in order."""
        self.drain_freed()
        work, self.work = self.work, []
        return work

    def bury(self, log: LogState) -> None:
        """Forgets a log but for its generation."""
        del self.logs[log.log_id]
        for session in self.sessions.named_by(log.log_id):
            self.sessions.remove(session.session_id)
            self.journal.session(session, is_deleted=True)
        self.tombstones[log.log_id] = log.generation
        if len(self.tombstones) > TOMBSTONES_MAX:
            self.tombstones.popitem(last=False)

    def check_invariants(self) -> None:
        """Asserts page conservation, holder counts and the agreement of logs, leases and pool."""
        self.pool.check_invariants()
        self.tree.check_invariants()
        self.sessions.check_invariants(self.logs)
        holders = np.zeros(self.pool.page_count, dtype=np.int64)
        for page, count in self.transfers.items():
            holders[page] += count
        granted: set[int] = set(self.importing)
        for log in self.logs.values():
            _check_log(log, self.block_tokens)
            assert (log.log_id in self.leases) == (log.writer is not None), log_id_text(log.log_id)
            assert log.writer is not None or self.logs.is_registered(log.log_id)
            np.add.at(holders, log.rows.pages(), 1)
            for page, page_generation in log.granted.items():
                assert page not in granted, "a page granted to two logs"
                assert self.pool.generation(page) == page_generation
                granted.add(page)
        for prefix in self.prefixes.all():
            for row in prefix.rows:
                holders[row.page] += 1
        wrong = np.flatnonzero(holders != self.pool.holder_counts()).tolist()
        assert not len(wrong), [(page, self.pool.holders(page), holders[page]) for page in wrong]
        if self.pool.charges is not None:
            for log in self.logs.values():
                # A block that comes back from NVMe may join a page that another tenant brought.
                rows = log.rows.pages()[-(-log.cached_tokens // self.block_tokens) :]
                _check_charges(self.pool.charges, log, rows if self.slots is None else rows[:0])
        counts = self.pool.counts()
        assert counts.granted == len(granted), (counts, len(granted))
        assert counts.live + counts.shared == np.count_nonzero(holders)
        self._check_copies()

    def _check_copies(self) -> None:
        """Conservation of the NVMe tier's slots: free, being written, or held by cold rows and
        reads; and copies are copies.
        """
        owners: list[LogState | Prefix] = [*self.logs.values(), *self.prefixes.all()]
        if self.slots is None:
            assert not any(owner.cold for owner in owners)
            return
        holders = Counter(self.slot_readers)
        for owner in owners:
            if owner.cold:
                _check_owner_copies(owner, self.block_tokens)
                _check_slots(owner.cold, self.slots)
                holders.update(owner.cold.pages().tolist())
        self.slots.check_invariants(holders, sorted(self.placing))


def _check_slots(cold: Rows, slots: Slots) -> None:
    """Every slot is still in the use that the copy was made in."""
    last = cold.last
    assert last is not None
    assert slots.is_current(last.page, last.page_generation), last
    columns = cold.columns()
    assert slots.pool.generations(columns.pages) == columns.generations.tolist()


def _check_owner_copies(owner: LogState | Prefix, block_tokens: int) -> None:
    """A copy of a block that is in the host too has the same CRC."""
    rows = owner.rows if isinstance(owner.rows, Rows) else Rows(owner.rows)
    ours, copies = rows.columns().crcs, owner.cold.columns().crcs
    full = min(len(ours), len(copies))
    # A page that is still being filled has none yet.
    assert np.all((ours[:full] == copies[:full]) | (ours[:full] == 0)), owner
    for at in range(full, min(len(rows), len(owner.cold))):
        row, copy = rows[at], owner.cold[at]
        if row.crc is not None and copy.crc is not None:
            # A row that was cut inside a full page has that page's CRC, not its own.
            assert row.crc == copy.crc or copy.tokens < block_tokens, (row, copy)
        else:
            common = min(len(row.slot_crcs), len(copy.slot_crcs))
            assert row.slot_crcs[:common] == copy.slot_crcs[:common], (row, copy)
    if isinstance(owner, LogState):
        assert owner.cold.tokens <= owner.position
        is_cut = owner.committed % block_tokens
        assert owner.cold.tokens <= owner.committed or not is_cut, "KV ends in a block copied whole"


def _check_log(log: LogState, block_tokens: int) -> None:
    rows, last = log.rows, log.rows.last
    assert rows.row_tokens in ({0, block_tokens} if len(rows) < 2 else {block_tokens})
    covered = 0 if last is None else (len(rows) - 1) * block_tokens + last.tokens
    assert covered == log.committed, (covered, log.committed)
    assert len(rows) == -(-log.committed // block_tokens)
    assert log.committed <= log.position
    assert log.writer is not None or not log.granted
    if last is not None and rows.known() == len(rows):
        assert last.tokens < block_tokens or last.crc is not None


def _check_charges(charges: Charges, log: LogState, computed: PageArray) -> None:
    """What the log was granted and what it computed itself is charged to its tenant."""
    granted = np.fromiter(log.granted, dtype=np.int64)
    for pages in (granted, computed.astype(np.int64)):
        assert charges.are_charged_to(pages, log.tenant), log_id_text(log.log_id)


def fill_failed(work: FillPage) -> ServiceError:
    """The source of a copy does not hash to what its record says."""
    return ServiceError(
        Reason.CHECKSUM_MISMATCH,
        f"KV block {work.block_index} of the base is damaged; compute it again from its tokens",
        metadata={"block_index": str(work.block_index)},
    )


def log_not_found(log_id: bytes) -> ServiceError:
    """The refusal for a log this store does not have."""
    return ServiceError(
        Reason.LOG_NOT_FOUND,
        f"no log {log_id.hex()} here; it ended, its time was over, or another kvstore has it",
        field="log_id",
        metadata={"log_id": log_id.hex()},
    )


def stale(log_id: bytes, generation: int, newest: int) -> ServiceError:
    """The refusal of an old writer: another owner exists, stop for good."""
    return ServiceError(
        Reason.STALE_GENERATION,
        f"generation {generation} of log {log_id.hex()} is over, {newest} is current; stop writing",
        field="generation",
        metadata={
            "log_id": log_id.hex(),
            "generation": str(generation),
            "current": str(newest),
        },
    )


def invalid(field_name: str, message: str) -> ServiceError:
    """INVALID_REQUEST naming a field."""
    return ServiceError(Reason.INVALID_REQUEST, f"{field_name}: {message}", field=field_name)
