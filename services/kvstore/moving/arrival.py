"""The new home's half of a move: an invisible replica, then a verified copy, then the log itself.

Owns what is coming and the pages it holds. Pure: time is passed in; bytes are written by others,
who report each page as filled or damaged. Pages of an arrival serve nobody: they are `granted`,
named in `core.importing`, until `open` makes them the log's.

    following --moved()--> receiving --open()--> opened --confirmed()--> (gone)
        |                      |
        +--abandon(), expire()-+--> (gone, pages free)

Invariants: a page counts only after its bytes hashed to what the old home's record says; the page
table must hash to the old home's digest; `open` happens at most once per generation, and only above
every generation this store has seen of the log; pages under a write in flight are never given back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, unique

from baton.errors import Reason, ServiceError
from services.kvstore.chains import ScopeChains
from services.kvstore.core import Core, invalid, stale
from services.kvstore.home import Home
from services.kvstore.log.fields import PageEntry
from services.kvstore.log.folded import log_of_snapshot
from services.kvstore.log.format import RecordAddress
from services.kvstore.log.journal import page_list_digest
from services.kvstore.log.state import Snapshot
from services.kvstore.log.store_records import CloseReason
from services.kvstore.moving.transport import Choice
from services.kvstore.state import LogState, PageRow, Phase
from services.kvstore.store import Now

ARRIVALS_MAX = 1024


@unique
class Stage(Enum):
    """Where an arrival is."""

    FOLLOWING = "following"
    RECEIVING = "receiving"
    OPENED = "opened"


@dataclass(slots=True, kw_only=True)
class ReplicaPage:
    """One page of a replica. `row` names our page and carries the old home's tokens and CRCs."""

    row: PageRow
    is_filled: bool = False
    is_early: bool = False


@dataclass(slots=True, kw_only=True)
class Arrival:
    """One log that is coming. `usable` counts the rows that can be had; KV behind is recomputed."""

    log_id: bytes
    tenant: str
    from_home: str
    deadline_s: float
    stage: Stage = Stage.FOLLOWING
    pages: dict[int, ReplicaPage] = field(default_factory=dict)
    generation: int = 0
    snapshot: Snapshot | None = None
    rows: list[PageRow] = field(default_factory=list)
    usable: int = 0
    choice: Choice | None = None
    writes: int = 0
    is_abandoned: bool = False

    @property
    def is_complete(self) -> bool:
        """Every row that can be had is filled and verified."""
        return all(
            index in self.pages and self.pages[index].is_filled for index in range(self.usable)
        )

    def early_pages(self) -> int:
        """Verified pages that were here before the move."""
        return sum(page.is_early and page.is_filled for page in self.pages.values())


class Arrivals:
    """Everything that is coming to one store."""

    def __init__(self, core: Core, home: Home, chains: ScopeChains, lease_s: float) -> None:
        self._core = core
        self._home = home
        self._chains = chains
        self.lease_s = lease_s
        self._coming: dict[bytes, Arrival] = {}
        # Abandoned while a page was being written: their pages wait for the write to end.
        self._lingering: list[Arrival] = []
        self.arrived = 0
        self.abandoned = 0

    def find(self, log_id: bytes) -> Arrival | None:
        """What is coming under this id."""
        return self._coming.get(log_id)

    def all(self) -> list[Arrival]:
        """Everything that is coming."""
        return list(self._coming.values())

    def home_generation(self, log_id: bytes, generation: int) -> int | None:
        """The log's generation if it has its home here already, above `generation`."""
        log = self._core.logs.get(log_id)
        if log is None or log.phase is Phase.MOVED:
            return None
        return log.generation if log.generation > generation else None

    def has_opened(self, log_id: bytes, generation: int) -> bool:
        """Whether the log has been opened here at `generation` or above, whatever came then."""
        log = self._core.logs.get(log_id)
        newest = self._core.tombstones.get(log_id) if log is None else log.generation
        return newest is not None and newest >= generation

    # --- the replica ------------------------------------------------------------------------

    def follow(self, log_id: bytes, tenant: str, from_home: str, now_s: float) -> Arrival:
        """Expects a log of another home; again is harmless and renews its lease.

        ALREADY_EXISTS when this store is its home; QUEUE_FULL for too many at once.
        """
        log = self._core.logs.get(log_id)
        if log is not None and log.phase is not Phase.MOVED:
            raise ServiceError(
                Reason.ALREADY_EXISTS, "this kvstore is the log's home already", field="log_id"
            )
        known = self._coming.get(log_id)
        if known is not None:
            # What was opened here has moved away since, before its old home had confirmed.
            is_over = known.stage is Stage.OPENED
            if not is_over and known.from_home == from_home and known.tenant == tenant:
                known.deadline_s = max(known.deadline_s, now_s + self.lease_s)
                return known
            self.abandon(log_id)
        if len(self._coming) >= ARRIVALS_MAX:
            raise ServiceError(
                Reason.QUEUE_FULL, f"{ARRIVALS_MAX} logs are coming; retry", retry_after_s=0.5
            )
        arrival = Arrival(
            log_id=log_id, tenant=tenant, from_home=from_home, deadline_s=now_s + self.lease_s
        )
        self._coming[log_id] = arrival
        return arrival

    def announced(self, arrival: Arrival, first_block: int, rows: Sequence[PageRow]) -> list[int]:
        """The old home committed these full rows; returns the blocks to fetch now.

        A replica takes free pages only; what does not fit is fetched after the move, or never.
        """
        assert arrival.stage is Stage.FOLLOWING, arrival.stage
        wanted: list[int] = []
        for index, row in enumerate(rows, start=first_block):
            assert row.crc is not None, "only full pages are copied early"
            held = arrival.pages.get(index)
            if held is not None and _same_content(held.row, row):
                if not held.is_filled:
                    wanted.append(index)
                continue
            if held is not None:
                self._give_back(arrival, index)
            if not self._has_page(arrival.tenant):
                break
            self._reserve(arrival, index, row)
            wanted.append(index)
        return wanted

    def writing(self, arrival: Arrival, blocks: Sequence[int]) -> list[ReplicaPage]:
        """The reserved pages of these blocks, to be written until `written`."""
        arrival.writes += 1
        return [arrival.pages[index] for index in blocks]

    def written(self, arrival: Arrival, verified: Sequence[int]) -> None:
        """The write ended; these blocks hashed to their rows, the others are as before."""
        assert arrival.writes > 0
        arrival.writes -= 1
        if arrival.is_abandoned:
            if arrival.writes == 0:
                self._lingering.remove(arrival)
                self._release(arrival)
            return
        for index in verified:
            page = arrival.pages[index]
            page.is_filled = True
            page.is_early = arrival.stage is Stage.FOLLOWING

    def damaged(self, arrival: Arrival, block: int) -> None:
        """The old home's page is not what its record says: KV from here on is computed again."""
        if arrival.stage is Stage.FOLLOWING:
            self._give_back(arrival, block)
        else:
            arrival.usable = min(arrival.usable, block)

    # --- the move ---------------------------------------------------------------------------

    def make_room(self, arrival: Arrival, tokens: int) -> None:
        """PAGES_EXHAUSTED, before the old home is asked, unless a log of so many tokens fits."""
        block_tokens = self._core.block_tokens
        needed = -(-tokens // block_tokens) - len(arrival.pages)
        self._home.require_room(max(needed, 0), arrival.tenant)

    def moved(
        self, arrival: Arrival, generation: int, snapshot: Snapshot, digest: bytes
    ) -> list[int]:
        """The old home gave the log away: all of its state. Returns the blocks still to fetch.

        Raises, and changes nothing, for what is not this log's or contradicts itself.
        """
        if arrival.is_abandoned:
            raise given_up()
        if arrival.stage is Stage.FOLLOWING:
            self._check(arrival, generation, snapshot)
            rows = [_row_of(entry) for entry in snapshot.entries]
            if page_list_digest(self._core.limits, rows) != digest:
                raise ServiceError(
                    Reason.CHECKSUM_MISMATCH,
                    "the moved log's page table does not hash to its digest",
                    field="chunk_list_digest",
                )
            arrival.stage, arrival.generation = Stage.RECEIVING, generation
            arrival.snapshot, arrival.rows = snapshot, rows
            arrival.usable = len(rows)
            self._fit(arrival)
        return [index for index in range(arrival.usable) if not arrival.pages[index].is_filled]

    def _check(self, arrival: Arrival, generation: int, snapshot: Snapshot) -> None:
        core, identity = self._core, snapshot.identity
        seen = core.tombstones.get(arrival.log_id, 0)
        log = core.logs.get(arrival.log_id)
        if log is not None:
            seen = max(seen, log.generation)
        if generation <= seen:
            raise stale(arrival.log_id, generation, seen)
        if identity.scope.tenant != arrival.tenant:
            raise ServiceError(
                Reason.PERMISSION_DENIED, "the log is another tenant's", field="log_id"
            )
        for name in ("kv_digest", "tokenizer_hash", "block_tokens"):
            ours, theirs = getattr(core.limits, name), getattr(identity, name)
            if ours != theirs:
                raise ServiceError(
                    Reason.COMPAT_MISMATCH,
                    f"{name} of the moved log is not this kvstore's",
                    field=name,
                    metadata={"field": name},
                )
        if not snapshot.is_sealed:
            raise invalid("snapshot", "the log is not sealed")

    def _fit(self, arrival: Arrival) -> None:
        """Drops replica pages that are not the log's, reserves the missing ones."""
        for index in list(arrival.pages):
            if index >= len(arrival.rows) or not _same_content(
                arrival.pages[index].row, arrival.rows[index]
            ):
                self._give_back(arrival, index)
        missing = [index for index in range(len(arrival.rows)) if index not in arrival.pages]
        self._home.make_room(len(missing), arrival.tenant)
        for index in missing:
            if not self._has_page(arrival.tenant):
                arrival.usable = min(arrival.usable, index)
                return
            self._reserve(arrival, index, arrival.rows[index])

    def open(self, arrival: Arrival, now: Now) -> LogState:
        """OPEN(from, generation): every usable row is verified; the log's home is here now.

        Again is harmless. The caller answers once the record is acked and tells the old home once
        it is on disk.
        """
        core = self._core
        if arrival.stage is Stage.OPENED:
            return core.logs[arrival.log_id]
        assert arrival.stage is Stage.RECEIVING, arrival.stage
        assert arrival.snapshot is not None
        assert arrival.is_complete
        assert arrival.writes == 0
        assert not arrival.is_abandoned
        log = self._log(arrival, arrival.snapshot, now)
        for index in [index for index in arrival.pages if index >= arrival.usable]:
            self._give_back(arrival, index)
        log.rows.clear()
        for index in range(arrival.usable):
            log.rows.append(arrival.pages[index].row)
        log.committed = sum(row.tokens for row in log.rows)
        log.cached_tokens = min(log.cached_tokens, log.committed)
        self._replace_old(arrival.log_id)
        for row in log.rows:
            core.importing.discard(row.page)
            core.pool.commit(row.page)
        core.logs[log.log_id] = log
        core.journal.arrived(log, arrival.from_home)
        self._chains.offer(log)
        arrival.stage = Stage.OPENED
        self.arrived += 1
        return log

    def _log(self, arrival: Arrival, snapshot: Snapshot, now: Now) -> LogState:
        address = RecordAddress(
            log_id=arrival.log_id,
            generation=arrival.generation,
            position=len(snapshot.token_ids),
        )
        log = log_of_snapshot(address, snapshot)
        if log is None:
            raise invalid("snapshot.sampling", "cannot be read")
        log.cached_tokens = snapshot.cached_tokens
        log.last_used_s = now.monotonic_s
        log.expires_wall_s = now.wall_s + log.ttl_s
        if not log.is_open:
            log.phase = Phase.KEPT
        return log

    def _replace_old(self, log_id: bytes) -> None:
        """The log comes back to a store that it had left: what was kept of it is dropped."""
        core = self._core
        core.tombstones.pop(log_id, None)
        old = core.logs.get(log_id)
        if old is None:
            return
        del core.logs[log_id]
        assert old.phase is Phase.MOVED
        assert old.writer is None
        core.journal.closed(old, CloseReason.MOVED_AWAY)
        for row in old.rows:
            core.pool.drop(row.page)
        core.cut_copies(old, 0)
        core.drain_freed()

    def confirmed(self, log_id: bytes) -> None:
        """The old home knows: nothing is left to do."""
        arrival = self._coming.get(log_id)
        if arrival is not None and arrival.stage is Stage.OPENED:
            del self._coming[log_id]

    # --- ends -------------------------------------------------------------------------------

    def abandon(self, log_id: bytes) -> None:
        """Lets go of what is coming; of an opened log nothing but the wish to confirm it."""
        arrival = self._coming.pop(log_id, None)
        if arrival is None or arrival.stage is Stage.OPENED:
            return
        self.abandoned += 1
        arrival.is_abandoned = True
        if arrival.writes:
            self._lingering.append(arrival)
            return
        self._release(arrival)

    def expire(self, now_s: float) -> list[bytes]:
        """Abandons replicas whose lease passed; returns their logs."""
        over = [
            arrival.log_id
            for arrival in self._coming.values()
            if arrival.stage is not Stage.OPENED and arrival.deadline_s <= now_s
        ]
        for log_id in over:
            self.abandon(log_id)
        return over

    # --- pages ------------------------------------------------------------------------------

    def _reserve(self, arrival: Arrival, index: int, source: PageRow) -> None:
        (page,) = self._core.pool.grant(1, arrival.tenant)
        self._core.importing.add(page)
        arrival.pages[index] = ReplicaPage(
            row=PageRow(
                page=page,
                page_generation=self._core.pool.generation(page),
                tokens=source.tokens,
                crc=source.crc,
                slot_crcs=list(source.slot_crcs),
            )
        )

    def _has_page(self, tenant: str) -> bool:
        """Whether one more page can be granted to the tenant now."""
        pool = self._core.pool
        return pool.free_count > 0 and (pool.charges is None or pool.charges.may_grant(tenant, 1))

    def _give_back(self, arrival: Arrival, index: int) -> None:
        assert arrival.writes == 0, "a page under a write is not given back"
        page = arrival.pages.pop(index).row.page
        self._core.importing.discard(page)
        self._core.pool.give_back(page)
        self._core.drain_freed()

    def _release(self, arrival: Arrival) -> None:
        for index in list(arrival.pages):
            self._give_back(arrival, index)


def given_up() -> ServiceError:
    """The refusal of a move that was abandoned while it was under way."""
    return ServiceError(
        Reason.LEASE_EXPIRED, "the move was given up meanwhile; ask again", field="log_id"
    )


def _same_content(ours: PageRow, theirs: PageRow) -> bool:
    """Whether two rows say the same of their bytes, wherever these are."""
    return (ours.tokens, ours.crc, ours.slot_crcs) == (theirs.tokens, theirs.crc, theirs.slot_crcs)


def _row_of(entry: PageEntry) -> PageRow:
    """The content half of a record's page table row; its place was another arena's."""
    return PageRow(
        page=0,
        page_generation=0,
        tokens=entry.tokens,
        crc=entry.ref.crc if entry.is_full else None,
        slot_crcs=list(entry.slot_crcs),
    )
