"""Logs that nobody writes: which time is over next, whose KV is evicted next.

Owns the table of all logs and two heaps over those without a writer. Pure; time is passed in.
What is done costs as much as what is due, whatever the number of logs.

A heap's entry is a hint: it is compared with its log when it comes up, and put back if the log says
otherwise meanwhile. A log has at most one entry that counts in each heap. Entering a log into the
table registers it; whoever ends a log's writer calls `add` again. Where quotas are held there is an
order of eviction for each of `keys_of` a log's tenant, so that nobody walks over logs it spares.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeAlias

from services.kvstore.state import LogState, Phase

Rank: TypeAlias = tuple[bool, bool, float]

RankHeap: TypeAlias = list[tuple[Rank, int, bytes]]

ONE_ORDER: Final = ("",)
"""The key of the only order of eviction where no quotas are held."""

SLACK: Final = 1024
"""How many outdated entries a heap may have beside as many as it has valid ones."""


def eviction_rank(log: LogState) -> Rank:
    """Those of which the NVMe tier has all KV first, for nothing is lost; of each kind the least
    recently used. One whose writer died may be taken again in a moment, one that moved away is
    being fetched: their KV goes last.
    """
    return log.is_open or log.phase is Phase.MOVED, not log.is_copied, log.last_used_s


class LogTable(dict[bytes, LogState]):
    """All logs by id; those without a writer are registered for TTLs and eviction."""

    def __init__(self) -> None:
        super().__init__()
        self._serial = 0
        # Logs without a writer whose end is not set yet: they get one at the next sweep.
        self._endless: dict[bytes, None] = {}
        self._ends: dict[bytes, float] = {}
        self._end_heap: list[tuple[float, int, bytes]] = []
        self._ranks: dict[bytes, Rank] = {}
        self._rank_heaps: dict[str, RankHeap] = {}
        self._rank_entries = 0
        self._keys_of: Callable[[str], tuple[str, ...]] | None = None

    def __setitem__(self, log_id: bytes, log: LogState) -> None:
        super().__setitem__(log_id, log)
        if log.writer is None:
            self.add(log)

    def __delitem__(self, log_id: bytes) -> None:
        super().__delitem__(log_id)
        self._endless.pop(log_id, None)
        self._ends.pop(log_id, None)
        self._ranks.pop(log_id, None)

    def add(self, log: LogState) -> None:
        """Nobody writes the log now, or when its time is over or its rank have changed."""
        if log.expires_wall_s is None:
            self._endless[log.log_id] = None
        else:
            self._push_end(log.log_id, log.expires_wall_s)
        self._push_rank(log, eviction_rank(log))

    def is_registered(self, log_id: bytes) -> bool:
        """Whether a sweep will look at the log."""
        return log_id in self._endless or log_id in self._ends

    # --- ends -------------------------------------------------------------------------------

    def take_endless(self) -> list[LogState]:
        """The logs without a writer that have no end yet; the caller sets it and adds them."""
        found = [self.get(log_id) for log_id in self._endless]
        self._endless.clear()
        return [log for log in found if log is not None and log.writer is None]

    def take_over(self, wall_s: float) -> list[LogState]:
        """The logs without a writer whose time is over, the earliest first."""
        over: list[LogState] = []
        heap = self._end_heap
        while heap and heap[0][0] <= wall_s:
            end, _, log_id = heapq.heappop(heap)
            if self._ends.get(log_id) != end:
                continue
            del self._ends[log_id]
            log = self.get(log_id)
            if log is None or log.writer is not None:
                continue
            if log.expires_wall_s is None:
                self._endless[log_id] = None
            elif log.expires_wall_s <= wall_s:
                over.append(log)
            else:
                self._push_end(log_id, log.expires_wall_s)
        return over

    def _push_end(self, log_id: bytes, end: float) -> None:
        if self._ends.get(log_id) == end:
            return
        self._ends[log_id] = end
        self._serial += 1
        heapq.heappush(self._end_heap, (end, self._serial, log_id))
        if len(self._end_heap) > 2 * len(self._ends) + SLACK:
            self._end_heap = [item for item in self._end_heap if self._ends.get(item[2]) == item[0]]
            heapq.heapify(self._end_heap)

    # --- eviction ---------------------------------------------------------------------------

    def order_by(self, keys_of: Callable[[str], tuple[str, ...]] | None) -> None:
        """From now on a tenant's logs stand in the orders of eviction of these keys; None: in one
        order with everybody's. Walks all logs: it is called when quotas change.
        """
        self._keys_of = keys_of
        ranks, self._ranks, self._rank_heaps = self._ranks, {}, {}
        self._rank_entries = 0
        for log_id, rank in ranks.items():
            self._push_rank(self[log_id], rank)

    def evictable(
        self, keys: Callable[[], Iterable[str]] = lambda: ONE_ORDER
    ) -> Iterator[LogState]:
        """Logs without a writer that have KV, the first to lose it first, of the orders of `keys`,
        which is asked again before each log.

        The caller evicts each one before it asks for the next; what it does not ask for stays.
        """
        while (log := self._first_of(keys())) is not None:
            yield log
            # It has no KV now and gets none without a writer.
            assert not log.rows, "evict each log that is taken"

    def in_order(self) -> Iterator[LogState]:
        """As `evictable`, of all orders, and nothing is taken out. The caller changes no log while
        it asks.
        """
        seen: set[bytes] = set()
        for rank, _, log_id in heapq.merge(*map(_ascending, self._rank_heaps.values())):
            log = self.get(log_id)
            if self._ranks.get(log_id) != rank or log_id in seen:
                continue
            seen.add(log_id)
            if log is not None and log.writer is None and log.rows:
                yield log

    def _first_of(self, keys: Iterable[str]) -> LogState | None:
        firsts = [first for key in keys if (first := self._first(key)) is not None]
        return None if not firsts else self[min(firsts)[2]]

    def _first(self, key: str) -> tuple[Rank, int, bytes] | None:
        """The first entry of an order that is true of its log; those before it are gone."""
        while heap := self._rank_heaps.get(key):
            rank, _, log_id = heap[0]
            log = self.get(log_id)
            is_valid = self._ranks.get(log_id) == rank
            if is_valid and log is not None and log.writer is None and log.rows:
                now = eviction_rank(log)
                if now == rank:
                    return heap[0]
                self._push_rank(log, now)
                continue
            heapq.heappop(heap)
            self._rank_entries -= 1
            if is_valid:
                self._ranks.pop(log_id, None)
        return None

    def _push_rank(self, log: LogState, rank: Rank) -> None:
        if self._ranks.get(log.log_id) == rank:
            return
        self._ranks[log.log_id] = rank
        self._serial += 1
        entry = (rank, self._serial, log.log_id)
        keys = ONE_ORDER if self._keys_of is None else self._keys_of(log.tenant)
        for key in keys:
            heapq.heappush(self._rank_heaps.setdefault(key, []), entry)
        self._rank_entries += len(keys)
        if self._rank_entries > 4 * len(self._ranks) + SLACK:
            self._drop_outdated()

    def _drop_outdated(self) -> None:
        """Keeps the entries that still say how their log ranks, and the heaps that have some."""
        ranks, heaps = self._ranks, self._rank_heaps
        self._rank_heaps = {
            key: kept
            for key, heap in heaps.items()
            if (kept := [item for item in heap if ranks.get(item[2]) == item[0]])
        }
        for heap in self._rank_heaps.values():
            heapq.heapify(heap)
        self._rank_entries = sum(map(len, self._rank_heaps.values()))


def _ascending(heap: RankHeap) -> Iterator[tuple[Rank, int, bytes]]:
    """A heap's entries in order; as many steps as are asked for."""
    front = [(heap[0], 0)] if heap else []
    while front:
        entry, at = heapq.heappop(front)
        yield entry
        for child in (2 * at + 1, 2 * at + 2):
            if child < len(heap):
                heapq.heappush(front, (heap[child], child))
