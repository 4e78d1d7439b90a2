"""What the cores of the kvstore share: tables, limits, the journal they write to, refusals.

Owns `Core` (the one mutable aggregate) and the `Journal` protocol. Pure: no I/O, no clock. The
cores change the tables at once and emit, in order, journal calls and page work; the runtime makes
them durable and done before it answers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.errors import Reason, ServiceError
from baton.ids import log_id_text
from baton.kv.manifest import Manifest
from baton.kv.numeric import DEFAULT_POLICY, CompatPolicy
from services.kvstore.index import BlockIndex
from services.kvstore.lease import LeaseTable
from services.kvstore.log.state import Parent
from services.kvstore.log.store_records import CloseReason
from services.kvstore.pages import PagePool
from services.kvstore.prefixes import Prefix, PrefixTable
from services.kvstore.state import FillPage, LogprobEntry, LogState, PageRow, PageWork, ZeroPages

TOMBSTONES_MAX = 65_536


class Journal(Protocol):
    """Where the cores record what they did; each call is one record, in order."""

    def opened(self, log: LogState, base: Parent | Manifest | None) -> None:
        """A log began from `base`; with one, a snapshot follows, so that no other log is needed
        to read it again.
        """

    def snapshot(self, log: LogState) -> None:
        """All of the log's state, so that its earlier records are not needed any more."""

    def granted(self, log: LogState, pages: Sequence[int]) -> None:
        """Pages were granted to the log's writer."""

    def released(self, log: LogState, pages: Sequence[int]) -> None:
        """Granted pages came back unwritten."""

    def checkpointed(self, log: LogState, first: int, end: int, rows: Sequence[PageRow]) -> None:
        """KV of positions [first, end) is in `rows`."""

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

    def published(self, prefix: Prefix) -> None:
        """A prefix is offered."""

    def revoked(self, prefix: Prefix, wall_s: float) -> None:
        """A prefix is withdrawn."""


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
    index: BlockIndex = field(default_factory=BlockIndex)
    prefixes: PrefixTable = field(default_factory=PrefixTable)
    logs: dict[bytes, LogState] = field(default_factory=dict)
    # Generations of dropped logs: their late writers are told they are stale, not that the log
    # never was. Bounded; the oldest is forgotten first.
    tombstones: OrderedDict[bytes, int] = field(default_factory=OrderedDict)
    work: list[PageWork] = field(default_factory=list)
    # Holders that are neither logs nor prefixes: page -> open transfers.
    transfers: dict[int, int] = field(default_factory=dict)
    # Pages granted to a transfer that fills them; no log refers to them yet.
    importing: set[int] = field(default_factory=set)
    stale_refused: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    evicted_logs: int = 0

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

    def drain_freed(self) -> None:
        """Turns pages the pool has freed into work and takes them out of the index."""
        freed = self.pool.take_freed()
        if freed:
            for page in freed:
                self.index.forget_page(page)
            self.work.append(ZeroPages(pages=tuple(freed)))

    def take_work(self) -> list[PageWork]:
        """The page work ordered since the last call, in order."""
        self.drain_freed()
        work, self.work = self.work, []
        return work

    def bury(self, log: LogState) -> None:
        """Forgets a log but for its generation."""
        del self.logs[log.log_id]
        self.tombstones[log.log_id] = log.generation
        if len(self.tombstones) > TOMBSTONES_MAX:
            self.tombstones.popitem(last=False)

    def check_invariants(self) -> None:
        """Asserts page conservation, holder counts and the agreement of logs, leases and pool."""
        self.pool.check_invariants()
        holders: dict[int, int] = dict(self.transfers)
        granted: set[int] = set(self.importing)
        for log in self.logs.values():
            _check_log(log, self.block_tokens)
            assert (log.log_id in self.leases) == (log.writer is not None), log_id_text(log.log_id)
            for row in log.rows:
                holders[row.page] = holders.get(row.page, 0) + 1
            for page, page_generation in log.granted.items():
                assert page not in granted, "a page granted to two logs"
                assert self.pool.generation(page) == page_generation
                granted.add(page)
        for prefix in self.prefixes.all():
            for row in prefix.rows:
                holders[row.page] = holders.get(row.page, 0) + 1
        for page, count in holders.items():
            assert self.pool.holders(page) == count, (page, self.pool.holders(page), count)
        counts = self.pool.counts()
        assert counts.granted == len(granted), (counts, len(granted))
        assert counts.live + counts.shared == len(holders)


def _check_log(log: LogState, block_tokens: int) -> None:
    assert sum(row.tokens for row in log.rows) == log.committed
    assert all(row.tokens == block_tokens for row in log.rows[:-1])
    assert len(log.rows) == -(-log.committed // block_tokens)
    assert log.committed <= log.position
    assert log.writer is not None or not log.granted
    for row in log.rows:
        if row.tokens == block_tokens:
            assert row.crc is not None


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
