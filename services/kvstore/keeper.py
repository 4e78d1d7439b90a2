"""What ends and what stays: cancel, close, TTLs, expired leases, dead workers, eviction.

Owns the end of logs and the room they leave. Pure: time is passed in.

Invariants: the generation is raised before anything is released (O3); tokens outlive KV: eviction
takes the KV of kept logs, least recently used first, and leaves their tokens until the TTL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from baton.errors import Reason, ServiceError
from services.kvstore.chains import ScopeChains
from services.kvstore.core import Core
from services.kvstore.home import Home
from services.kvstore.idle import ONE_ORDER
from services.kvstore.log.store_records import CloseReason
from services.kvstore.pages import Fence
from services.kvstore.prefixes import Prefix
from services.kvstore.quotas import REST
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
        """Ends a log; it stays until its TTL unless it is dropped. Closing again is harmless.

        What a session names is not dropped: who asks for it has not heard that it was named.
        """
        if log_id in self._core.tombstones:
            return
        log = self._core.find(log_id)
        is_dropped = is_dropped and self._core.sessions.held_until(log_id) is None
        if log.phase is Phase.MOVED and not is_dropped:
            return
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
        self._core.idle(log)

    def drop(self, log: LogState, reason: CloseReason) -> None:
        """The log is gone: its pages are released, its generation remembered."""
        assert log.writer is None, "fence the writer first"
        self._drop_rows(log)
        self._core.bury(log)
        self._core.journal.closed(log, reason)

    def _drop_rows(self, log: LogState) -> None:
        self._core.pool.drop_many(log.rows.pages())
        log.rows.clear()
        self._core.cut_copies(log, 0)
        log.committed = 0
        log.indexed_blocks = log.foreign_blocks = 0
        log.node, log.node_depth, log.node_blocks = None, 0, 0
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
            self.park(self._core.logs[log_id], wall_s)
        return expired

    def worker_gone(self, worker_slot: int, wall_s: float) -> list[bytes]:
        """The slot's lock is gone: its logs are fenced, and nothing of it is written any more."""
        written = [self._core.logs[log_id] for log_id in self._core.leases]
        lost = [log for log in written if log.writer and log.writer.slot == worker_slot]
        for log in lost:
            self.park(log, wall_s)
        for fence in self._core.pool.fences():
            if fence.worker_slot == worker_slot:
                self.lift(fence)
        self._core.drain_freed()
        return [log.log_id for log in lost]

    def lift(self, fence: Fence) -> None:
        """The fenced writer cannot write any more, or said that it does not: recorded, then free.

        The caller drains what was freed.
        """
        self._core.journal.lifted(fence, self._core.pool.fenced_pages(fence))
        self._core.pool.lift(fence)

    def park(self, log: LogState, wall_s: float) -> None:
        """Nobody writes the log now; another worker may take it until its TTL."""
        self.raise_generation(log)
        log.expires_wall_s = wall_s + log.ttl_s

    def expire_logs(self, wall_s: float) -> list[bytes]:
        """Drops the logs without a writer whose time is over; returns them.

        One whose writer ended it and that nobody closed gets its time from now.
        """
        logs = self._core.logs
        for log in logs.take_endless():
            if log.expires_wall_s is None:
                log.expires_wall_s = wall_s + log.ttl_s
            logs.add(log)
        over: list[LogState] = []
        for log in logs.take_over(wall_s):
            needed_s = self._core.sessions.held_until(log.log_id)
            if needed_s is not None and needed_s > wall_s:
                log.expires_wall_s = needed_s
                logs.add(log)
                continue
            over.append(log)
            self.drop(log, CloseReason.EXPIRED)
        return [log.log_id for log in over]

    # --- room -------------------------------------------------------------------------------

    def make_room(self, pages: int, tenant: str | None = None) -> None:
        """Evicts KV of logs that nobody writes, least recently used first, until `pages` pages
        are free and the quotas let `tenant` (None: the store itself) have them.

        Stops when nothing is left to evict; the caller sees how many are free. Where quotas are
        held a tenant that is at its own gives up its own KV, and no other's within its quota goes.
        """
        pool, charges = self._core.pool, self._core.pool.charges
        if charges is None:
            self._evict(lambda: ONE_ORDER, lambda: pool.free_count >= pages)
            return
        own: tuple[str, ...] = (REST if tenant is None else charges.account_of(tenant),)
        if tenant is not None:
            narrowest = charges.eviction_keys(tenant)[-1:]
            self._evict(lambda: narrowest, lambda: charges.own_excess(tenant, pages) == 0)
            self._evict(lambda: own, lambda: charges.account_excess(tenant, pages) == 0)
            if not charges.may_grant(tenant, pages):
                return
        self._evict(charges.over, lambda: pool.free_count >= pages)
        self._evict(lambda: own, lambda: pool.free_count >= pages)

    def _evict(self, keys: Callable[[], Iterable[str]], is_enough: Callable[[], bool]) -> None:
        """Evicts from these orders until it is enough, or nothing is left in them."""
        assert self._home is not None
        if is_enough():
            return
        for log in self._core.logs.evictable(keys):
            if not log.is_copied and self._evict_prefixes(keys, is_enough):
                return
            self._home.give_up_kv(log, 0)
            self._core.evicted_logs += 1
            if is_enough():
                return
        self._evict_prefixes(keys, is_enough)

    def _evict_prefixes(
        self, keys: Callable[[], Iterable[str]], is_enough: Callable[[], bool]
    ) -> bool:
        """Evicts published prefixes that stand on NVMe whole and that nobody uses, before any KV is
        lost; True once it is enough.
        """
        core = self._core
        charges = core.pool.charges
        if core.slots is None:
            return False
        idle = [
            prefix
            for prefix in core.prefixes.all()
            if prefix.rows
            and not prefix.is_pinned
            and prefix.cold.tokens >= prefix.position
            and any(core.pool.holders(row.page) == 1 for row in prefix.rows)
        ]
        for prefix in sorted(idle, key=lambda prefix: prefix.hits):
            orders = ONE_ORDER if charges is None else charges.eviction_keys(prefix.owner_tenant)
            if set(orders).isdisjoint(keys()):
                continue
            leave_host(core, prefix)
            if is_enough():
                return True
        return False

    def offer(self, log: LogState) -> None:
        """Makes the log's full blocks findable in its scope."""
        self._chains.offer(log)


def leave_host(core: Core, prefix: Prefix) -> None:
    """A published prefix that stands on NVMe in whole gives up its pages in the arena."""
    assert prefix.cold.tokens >= prefix.position
    pages = [row.page for row in prefix.rows]
    prefix.rows = ()
    core.journal.promoted(prefix, 0)
    core.pool.drop_many(pages)
    core.drain_freed()


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
