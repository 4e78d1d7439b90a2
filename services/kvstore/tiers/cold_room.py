"""Room on the NVMe tier: whose copies go when there is no free slot.

Owns that order: the copies of the log used longest ago go first, the last blocks before the first.
Pure. Copies of published prefixes stay; so do those that are being read, those of other tenants
within their quotas, and those of logs used later than the one that wants the room: then there is
none, and the log is not copied.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Final

from services.kvstore.core import Core
from services.kvstore.prefixes import Prefix
from services.kvstore.quotas import Charges
from services.kvstore.state import LogState

PASSED_MAX: Final = 256
"""How many logs whose copies must stay are passed over before there is no room."""

SLACK: Final = 1024


class ColdRoom:
    """Logs with copies, by when they were used last."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._heap: list[tuple[float, int, bytes]] = []
        self._used: dict[bytes, float] = {}
        self._serial = 0
        self._heap_max = SLACK
        self.dropped_slots = 0

    def note(self, log: LogState) -> None:
        """The log has copies, or other ones than before."""
        if not log.cold or self._used.get(log.log_id) == log.last_used_s:
            return
        self._used[log.log_id] = log.last_used_s
        self._serial += 1
        heapq.heappush(self._heap, (log.last_used_s, self._serial, log.log_id))
        if len(self._heap) > self._heap_max:
            self._forget_gone()

    def _forget_gone(self) -> None:
        """What is outdated goes, and what is of logs that ended or have no copies any more."""
        logs = self._core.logs
        self._used = {
            log_id: used
            for log_id, used in self._used.items()
            if (log := logs.get(log_id)) is not None and log.cold
        }
        self._heap = [item for item in self._heap if self._used.get(item[2]) == item[0]]
        heapq.heapify(self._heap)
        self._heap_max = 2 * len(self._heap) + SLACK

    def make(self, count: int, owner: LogState | Prefix) -> int:
        """Frees slots until `count` may be granted for `owner`; how many may, at most `count`."""
        slots = self._core.slots
        assert slots is not None
        charges = slots.pool.charges
        if charges is not None:
            count = self._within_quota(charges, count, owner)
        tenant = _tenant_of(owner)
        self._drop_until(
            lambda: count - slots.free_count,
            owner,
            lambda log: charges is None or charges.may_evict(log.tenant, tenant),
        )
        return min(count, slots.free_count)

    def _within_quota(self, charges: Charges, count: int, owner: LogState | Prefix) -> int:
        """Own copies go until the tenant may have `count` more; how many it may have."""
        tenant = _tenant_of(owner)
        self._drop_until(
            lambda: charges.own_excess(tenant, count), owner, lambda log: log.tenant == tenant
        )
        account = charges.account_of(tenant)
        self._drop_until(
            lambda: charges.account_excess(tenant, count),
            owner,
            lambda log: charges.account_of(log.tenant) == account,
        )
        return min(count, charges.room(tenant))

    def _drop_until(
        self,
        missing: Callable[[], int],
        owner: LogState | Prefix,
        may_lose: Callable[[LogState], bool],
    ) -> None:
        """Drops copies of logs that `may_lose` them until nothing is missing."""
        passed: list[LogState] = []
        while missing() > 0 and len(passed) < PASSED_MAX:
            log = self._first()
            if log is None:
                break
            if isinstance(owner, LogState) and log.last_used_s >= owner.last_used_s:
                passed.append(log)
                break
            if log is owner or not may_lose(log) or self._is_read(log):
                passed.append(log)
                continue
            self._drop(log, missing())
            if log.cold:
                passed.append(log)
        for log in passed:
            self.note(log)

    def _first(self) -> LogState | None:
        """Takes out the log with copies that was used longest ago."""
        while self._heap:
            used, _, log_id = heapq.heappop(self._heap)
            if self._used.get(log_id) != used:
                continue
            del self._used[log_id]
            log = self._core.logs.get(log_id)
            if log is None or not log.cold:
                continue
            if log.last_used_s == used:
                return log
            self.note(log)
        return None

    def _is_read(self, log: LogState) -> bool:
        readers = self._core.slot_readers
        return bool(readers) and any(slot in readers for slot in log.cold.pages().tolist())

    def _drop(self, log: LogState, wanted: int) -> None:
        """Its last `wanted` copies; all of them where others have the same slots."""
        core = self._core
        assert core.slots is not None
        before = core.slots.free_count
        core.cut_copies(log, max(len(log.cold) - wanted, 0) * core.block_tokens)
        if core.slots.free_count - before < wanted:
            core.cut_copies(log, 0)
        self.dropped_slots += core.slots.free_count - before
        core.journal.placed(log, len(log.cold))
        if log.writer is None:
            core.logs.add(log)


def _tenant_of(owner: LogState | Prefix) -> str:
    return owner.owner_tenant if isinstance(owner, Prefix) else owner.tenant
