"""What ends and what stays: cancel, close, TTLs, expired leases, dead workers, eviction.

Owns the end of logs and the room they leave. Pure: time is passed in.

Invariants: the generation is raised before anything is released (O3); tokens outlive KV: eviction
takes the KV of kept logs, least recently used first, and leaves their tokens until the TTL.
"""

from __future__ import annotations

from baton.errors import Reason, ServiceError
from services.kvstore.core import Core
from services.kvstore.history import ScopeChains
from services.kvstore.home import Home
from services.kvstore.log.store_records import CloseReason
from services.kvstore.state import LogState, Phase

CANCELLED = "cancelled"


class Keeper:
    """Ends and evicts logs of one store."""

    def __init__(self, core: Core, chains: ScopeChains) -> None:
        self._core = core
        self._chains = chains
        self._home: Home | None = None

    def bind(self, home: Home) -> None:
        """The home that raises generations; it needs the keeper's room, hence the two steps."""
        self._home = home

    # --- ends -------------------------------------------------------------------------------

    def cancel(self, log_id: bytes, wall_s: float) -> int:
        """Fences a log, then lets go of what its writer had; the generation nobody writes at.

        An unsealed log serves nobody and is dropped; a sealed one is kept until its TTL.
        Cancelling what has ended changes nothing.
        """
        buried = self._core.tombstones.get(log_id)
        if buried is not None:
            return buried
        log = self._core.find(log_id)
        if not log.is_open:
            return log.generation
        self.raise_generation(log)
        if log.phase is Phase.PREFILL:
            self.drop(log, CloseReason.DELETED)
            return log.generation
        log.finish_reason = CANCELLED
        log.phase = Phase.ENDED
        self._settle(log, wall_s)
        return log.generation

    def close(self, log_id: bytes, *, is_dropped: bool, wall_s: float) -> None:
        """Ends a log; it stays until its TTL unless it is dropped. Closing again is harmless."""
        if log_id in self._core.tombstones:
            return
        log = self._core.find(log_id)
        if log.writer is not None:
            self.raise_generation(log)
        if log.phase is Phase.PREFILL or is_dropped:
            self.drop(log, CloseReason.NOT_STORED if is_dropped else CloseReason.DELETED)
            return
        self._settle(log, wall_s)

    def _settle(self, log: LogState, wall_s: float) -> None:
        """An ended log is kept for its TTL, or goes at once when it was opened so."""
        if log.drop_at_end:
            self.drop(log, CloseReason.NOT_STORED)
            return
        self._chains.offer(log)
        log.phase = Phase.KEPT
        log.expires_wall_s = wall_s + log.ttl_s

    def drop(self, log: LogState, reason: CloseReason) -> None:
        """The log is gone: its pages are released, its generation remembered."""
        assert log.writer is None, "fence the writer first"
        self._drop_rows(log)
        self._core.bury(log)
        self._core.journal.closed(log, reason)

    def _drop_rows(self, log: LogState) -> None:
        for row in log.rows:
            self._core.pool.drop(row.page)
        log.rows = []
        log.committed = 0
        log.indexed_blocks = 0
        log.block_keys = []
        self._core.drain_freed()

    def raise_generation(self, log: LogState) -> None:
        """Fences the log's writer, if it has one, under a new generation, and records that."""
        assert self._home is not None
        previous = log.generation
        self._home.fence(log)
        self._core.journal.taken(log, previous)

    # --- the clock --------------------------------------------------------------------------

    def expire_leases(self, now_s: float, wall_s: float) -> list[bytes]:
        """Fences the logs whose workers made no progress for a lease; returns them."""
        expired = self._core.leases.expired(now_s)
        for log_id in expired:
            self._orphan(self._core.logs[log_id], wall_s)
        return expired

    def worker_gone(self, worker_slot: int, wall_s: float) -> list[bytes]:
        """The slot's lock is gone: its logs are fenced, and nothing of it is written any more."""
        lost = [
            log
            for log in self._core.logs.values()
            if log.writer is not None and log.writer.slot == worker_slot
        ]
        for log in lost:
            self._orphan(log, wall_s)
        for fence in self._core.pool.fences():
            if fence.worker_slot == worker_slot:
                self._core.pool.lift(fence)
        self._core.drain_freed()
        return [log.log_id for log in lost]

    def _orphan(self, log: LogState, wall_s: float) -> None:
        """Nobody writes the log now; another worker may take it until its TTL."""
        self.raise_generation(log)
        log.expires_wall_s = wall_s + log.ttl_s

    def expire_logs(self, wall_s: float) -> list[bytes]:
        """Drops the logs without a writer whose time is over; returns them.

        One whose writer ended it and that nobody closed gets its time from now.
        """
        over = []
        for log in self._core.logs.values():
            if log.writer is not None:
                continue
            if log.expires_wall_s is None:
                log.expires_wall_s = wall_s + log.ttl_s
            elif log.expires_wall_s <= wall_s:
                over.append(log)
        for log in over:
            self.drop(log, CloseReason.EXPIRED)
        return [log.log_id for log in over]

    # --- room -------------------------------------------------------------------------------

    def make_room(self, pages: int) -> None:
        """Evicts KV of logs that nobody writes, least recently used first, until `pages` pages
        are free.

        Stops when nothing is left to evict; the caller sees how many are free.
        """
        pool = self._core.pool
        if pool.free_count >= pages:
            return
        kept = [log for log in self._core.logs.values() if log.writer is None and log.rows]
        # One whose writer died may be taken again in a moment: its KV goes last.
        for log in sorted(kept, key=lambda log: (log.is_open, log.last_used_s)):
            if pool.free_count >= pages:
                return
            self._drop_rows(log)
            self._core.evicted_logs += 1

    def offer(self, log: LogState) -> None:
        """Makes the log's full blocks findable in its scope."""
        self._chains.offer(log)


def require_tenant(log: LogState, tenant: str) -> None:
    """Another tenant's log and none at all look the same: LOG_NOT_FOUND."""
    if log.tenant != tenant:
        raise ServiceError(
            Reason.LOG_NOT_FOUND,
            f"no log {log.log_id.hex()} here; it ended, its time was over, or another kvstore "
            "has it",
            field="log_id",
            metadata={"log_id": log.log_id.hex()},
        )
